"""A run that is killed at any moment and resumed ends at the same bits as one that was not."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import killed
from safetensors.torch import load_file

_CONFIG = """
from graphckpt.config import get_config

data = get_config("common/data.py").data
model = get_config("common/models/gpt2.py").model
optim = get_config("common/optim.py").optim
train = get_config("common/train.py").train

data.update(paths="texts", cache_dir="cache", vocab_size=300, seq_length=16, eval_fraction=0.2)
model.config.update(n_layer=2, n_head=2, n_embd=16)
optim.lr = 5e-3
train.update(output_dir="out", train_micro_batch_size=2, num_accumulation_steps=2, test_micro_batch_size=4)
train.update(train_iter=16, log_period=3, warmup_ratio=0.2, device="cpu")
train.checkpointer.update(period=3, max_to_keep=2)
train.evaluation.update(eval_period=5, eval_iter=2)
train.activation_checkpoint.enabled = True
"""
_NUM_KILLS = 10
_MOMENTS = (  # files whose appearance starts the clock: a run under way, and those that a snapshot is written through
    "last_checkpoint",
    ".model_0000008.tmp",
    "model_0000005",
    ".model_0000011.tmp/snapshot.json",
    "metrics.json",
    ".model_best.tmp/graph.pt",
    "model_0000008",
    ".model_final.tmp",
    ".last_checkpoint.tmp",
    ".*.trash",
)
_TIMES = {"time", "data_time", "total_throughput", "tokens_per_second", "rss_bytes", "peak_rss_bytes"}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the command line in a child of a process that has imported everything; returns the exit code."""
    monkeypatch.chdir(tmp_path)
    generator = random.Random(0)
    (tmp_path / "texts").mkdir()
    for index in range(20):
        text = " ".join(generator.choices([f"w{n}" for n in range(30)], k=300))
        (tmp_path / "texts" / f"{index}.txt").write_text(f"text {index}: {text}\n", encoding="utf-8")
    (tmp_path / "tiny.py").write_text(_CONFIG, encoding="utf-8")
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, killed.__file__]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:

        def run(folder, *more, when=None, after=0.0):
            order = {
                "words": ["train", "--config-file", "tiny.py", f"train.output_dir={folder}", *more],
                "folder": folder,
                "output": f"{folder}.txt",
                "when": when,
                "after": after,
            }
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield run
        process.stdin.close()


def _final(folder):
    state = torch.load(f"{folder}/model_final/graph.pt", weights_only=True)
    return load_file(f"{folder}/model_final/model.safetensors"), state["System-Train-Optimizer-0"]["state"]


def _rows(folder):
    rows = [json.loads(line) for line in Path(folder, "metrics.json").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in _TIMES} for row in rows]


@pytest.mark.slow
def test_killed_at_random_moments_and_resumed_it_ends_at_the_same_bits(run):
    assert run("whole") == 0
    weights, moments = _final("whole")
    generator = random.Random(1)
    ends = []
    for number in range(_NUM_KILLS):
        folder, when = f"killed{number}", _MOMENTS[number % len(_MOMENTS)]
        ends.append(run(folder, when=when, after=generator.uniform(0, 0.03 if when.startswith(".") else 0.4)))
        if number % 5 == 1:  # and once more, on the way back
            ends.append(run(folder, "--resume", when="last_checkpoint", after=generator.uniform(0.1, 0.4)))
        code = run(folder, "--resume")
        if code == 2:  # killed before the first snapshot
            assert "holds no last_checkpoint" in Path(f"{folder}.txt").read_text()
            assert run(folder, "train.overwrite=True") == 0
        final, final_moments = _final(folder)
        assert final.keys() == weights.keys()
        assert all(torch.equal(final[name], weights[name]) for name in weights)
        for number_of, state in moments.items():
            assert all(torch.equal(final_moments[number_of][name], state[name]) for name in state)
        assert _rows(folder) == _rows("whole")
        left = sorted(path.name for path in Path(folder).iterdir() if path.is_dir())
        assert left == ["model_0000011", "model_0000014", "model_best", "model_final"]
    assert ends.count(-9) >= _NUM_KILLS * 3 // 4  # the rest ended before they were killed
