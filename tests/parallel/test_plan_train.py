"""Runs over two ranks that plan their own policies: the weights of the plain run, within the budget, one plan file."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.ranks import run_on_ranks
from helpers.small_run import CONFIG, same_weights, train_in

from graphckpt.planning import Plan, steps

pytestmark = [pytest.mark.multi_process, pytest.mark.slow]

CHECKPOINT = "train.activation_checkpoint"
WIDE = """
data.seq_length = 64
model.config.update(n_embd=32, n_positions=64)
train.update(train_iter=1, train_micro_batch_size=4, num_accumulation_steps=1, log_period=1)
train.evaluation.enabled = False
"""
DATA = ["train.dist.data_parallel_size=2"]
TENSOR = ["train.dist.tensor_parallel_size=2"]
ZERO = [*DATA, "train.zero_optimization.enabled=True", "train.zero_optimization.stage=3"]


def runs(rank: int, folder: Path) -> None:
    steps._TIMED_RUNS = 1
    for name, words in {"data": DATA, "tensor": TENSOR, "zero": ZERO}.items():
        assert name == "zero" or train_in(f"{name} plain", *words) == 0
        more = [f"{CHECKPOINT}.partition=True", f"{CHECKPOINT}.contiguous=True"] if name == "tensor" else []
        assert train_in(f"{name} planned", *words, f"{CHECKPOINT}.memory_budget=0.7", *more) == 0


def test_planned_runs_have_the_weights_of_plain_ones(place: Path) -> None:
    (place / "tiny.py").write_text(CONFIG + WIDE, encoding="utf-8")
    run_on_ranks(runs, place)
    for name in ("data", "tensor", "zero"):
        assert name == "zero" or same_weights(place / f"{name} plain", place / f"{name} planned"), name
        plan = Plan.load(place / f"{name} planned" / "plan.yaml")
        assert plan.predicted_peak_bytes <= plan.budget_bytes < plan.plain_peak_bytes
        assert plan.policies
        log = (place / f"{name} planned" / "log.txt").read_text(encoding="utf-8")
        assert log.count("plan: memory budget") == 1
