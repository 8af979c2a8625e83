"""Measures CPU time and resident memory of commands, each in a process of its own, in turns.

The resident memory of a command cannot be seen below that of this process, which starts it.

OMP_NUM_THREADS=1 python benchmarks/commands.py [--turns 3]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from report import header, table, write

GPT2 = "--config-file configs/gpt2_pretrain.py --device h200"
LLAMA_7B = (
    "model.config.num_hidden_layers=32 model.config.hidden_size=4096 model.config.num_attention_heads=32 "
    "model.config.num_key_value_heads=32 model.config.intermediate_size=11008 data.seq_length=2048 "
    "train.train_micro_batch_size=1"
)
COMMANDS = {  # goals: seconds of the CPU
    "graphckpt --help": 0.3,
    f"graphckpt plan {GPT2} --memory-budget 10GiB": 10,
    f"graphckpt plan {GPT2} --memory-budget 48GiB": 10,
    f"graphckpt plan {GPT2}": 10,
    f"graphckpt plan {GPT2} --memory-budget 5GiB --offload cpu": 10,
    "graphckpt plan --config-file configs/bert_large_pretrain.py --device h200 --memory-budget 24GiB": 10,
    f"graphckpt plan --config-file configs/llama_pretrain.py --device h200 --memory-budget max {LLAMA_7B}": 10,
    f"graphckpt find-batch-size {GPT2}": 30,
}


def run(command: str) -> tuple[float, float]:
    """Returns CPU seconds, and the most MiB that were resident."""
    words = [sys.executable, "-m", *shlex.split(command)]
    process = subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=Path(__file__).parents[1]
    )
    _, status, used = os.wait4(process.pid, 0)
    assert status == 0, f"{command}: exit status {status}"
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    turns = parser.parse_args().turns
    head = header(n=f"{turns} turns of all commands in random order; the least CPU time, user and system, of each")
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for _ in range(turns):
        for command in random.sample(list(COMMANDS), len(COMMANDS)):
            found[command].append(run(command))
            print(json.dumps({"command": command, "measured": found[command][-1]}), flush=True)
    rows: list[dict[str, Any]] = []
    for command, goal in COMMANDS.items():
        seconds, resident = zip(*found[command], strict=True)
        rows.append({"command": command, "cpu_seconds": seconds, "goal": goal, "resident_MiB": max(resident)})
    lines = [
        [f"`{row['command']}`", f"{min(row['cpu_seconds']):.2f}", f"{row['goal']:g}", f"{row['resident_MiB']:.0f}"]
        for row in rows
    ]
    write("commands", head, rows, table(["command", "CPU s", "goal", "most MiB resident"], lines))


if __name__ == "__main__":
    main()
