"""Times steps in which every block is recomputed, by what is compared: nothing, samples, or every value.

All variants run in one process, in turns and in a new random order each turn, on one model, which is built anew several
times; a ratio compares two variants of one turn. A turn of ``"default"`` is 64 steps, in which each block
is checked once. Where a step is too long for that, its cost is that of ``"values"`` divided by 64, and the table says
so.

    python benchmarks/value_check.py [--builds 6] [--turns 5]
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from time import process_time
from typing import Any

import torch
from overhead import SUBJECTS, Subject, forward_backward
from report import header, spread, table, write
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

import graphckpt
from graphckpt.engine.sampling import PERIOD

CHECKS = ("none", "default", "values")
SETTLED = 4  # steps, after which only every 64th call of a block is checked


def gpt2_768() -> nn.Module:
    settings = {"n_embd": 768, "n_layer": 4, "n_head": 12, "vocab_size": 512, "n_positions": 512, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(**settings, loss_type="ForCausalLM", bos_token_id=1, eos_token_id=2)).train()


LARGE = Subject(
    name="GPT-2, 4 layers of width 768, batch 1 x 512",
    build=gpt2_768,
    inputs=lambda: (torch.randint(0, 512, (1, 512)),),
    loss=lambda model, ids: model(ids, labels=ids).loss,
    blocks="transformer.h.*",
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4),
    steps=1,
)
MODELS = [*(replace(subject, steps=PERIOD) for subject in SUBJECTS), LARGE]


def steps_of(subject: Subject, rule: Any) -> dict[str, Callable[[], torch.Tensor]]:
    """Builds one model for all variants: the place of a model in memory changes its speed by more than a check."""
    torch.manual_seed(0)
    model, inputs = subject.build(), subject.inputs()
    handle = graphckpt.apply(model, {subject.blocks: rule})
    run = forward_backward(subject, model, inputs)

    def step(check: str) -> torch.Tensor:
        for wrapper in handle._wrappers:
            wrapper.context.determinism_check = check
        return run()

    for _ in range(SETTLED):
        run()
    return {check: partial(step, check) for check in CHECKS}


def measure(subject: Subject, rule: Any, builds: int, turns: int) -> dict[str, list[float]]:
    """Returns the CPU seconds of one step, by variant and turn."""
    seconds = defaultdict(list)
    for _ in range(builds):
        steps = steps_of(subject, rule)
        for turn in range(turns + 1):
            for check in random.sample(CHECKS, len(CHECKS)):
                count = max(1, subject.steps // 8) if check == "values" else subject.steps
                begin = process_time()
                for _ in range(count):
                    steps[check]()
                if turn:  # the first is to warm up
                    seconds[check].append((process_time() - begin) / count)
    return seconds


def rows_of(subject: Subject, rule: Any, builds: int, turns: int) -> dict[str, Any]:
    seconds = measure(subject, rule, builds, turns)
    extra = [(every - none) / none for every, none in zip(seconds["values"], seconds["none"], strict=True)]
    if subject.steps == PERIOD:
        sampled = [default / none - 1 for default, none in zip(seconds["default"], seconds["none"], strict=True)]
        how = f"measured over {PERIOD} steps"
    else:
        sampled, how = [each / PERIOD for each in extra], f"that of values / {PERIOD}"
    return {
        "model": subject.name,
        "rule": str(rule),
        "none": median(seconds["none"]),
        "values": spread([1 + each for each in extra]),
        "default": spread([1 + each for each in sampled]),
        "how": how,
    }


def of(ratios: dict[str, float]) -> str:
    return f"{ratios['median']:.4f} ({ratios['min']:.3f} to {ratios['max']:.3f})"


def main() -> None:
    """Measures all and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--builds", type=int, default=6, help="how often the models are built anew")
    parser.add_argument("--turns", type=int, default=5, help="turns per build")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    head = header(n=f"{options.builds} builds x {options.turns} turns")
    rows = []
    for subject in MODELS:
        for rule in ("full", "selective") if subject is not LARGE else ("full",):
            rows.append(rows_of(subject, rule, options.builds, options.turns))
            print(rows[-1]["model"], rule, rows[-1]["default"], rows[-1]["values"], flush=True)
    cells = [
        [row["model"], row["rule"], f"{1e3 * row['none']:.2f} ms", of(row["default"]), row["how"], of(row["values"])]
        for row in rows
    ]
    titles = ["model", "rule", "step with none", "default / none", "how", "values / none"]
    write("value_check", head, rows, table(titles, cells))


if __name__ == "__main__":
    main()
