"""Runs over two ranks that plan their own policies: the weights of the plain run, within the budget, one plan file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from helpers.ranks import run_on_ranks
from helpers.small_run import CONFIG, same_weights, train_in
from torch import Tensor

from graphckpt.planning import Plan, steps
from graphckpt.train.parallel.pipeline import Pipeline

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
STAGES = [  # of one layer, and of two layers with the head
    *("train.dist.pipeline_parallel_size=2", "model.config.n_layer=3", "train.dist.custom_pipeline_stage_id=[0,1,1]"),
    "train.num_accumulation_steps=2",
]
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


def staged_runs(rank: int, folder: Path) -> None:
    steps._TIMED_RUNS = 1
    counts = []
    losses = Pipeline.losses

    def counted(pipeline: Pipeline, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        counts.append(pipeline.grad_sync)
        return losses(pipeline, batch)

    Pipeline.losses = counted  # type: ignore[method-assign]
    assert train_in("plain", *STAGES) == 0
    counts.clear()
    assert train_in("planned", *STAGES, f"{CHECKPOINT}.memory_budget=0.8") == 0
    (folder / f"runs of {rank}").write_text(str(len(counts)))
    assert train_in("too small", *STAGES, f"{CHECKPOINT}.memory_budget=400KiB") != 0


@pytest.mark.parametrize("data_parallel_size", [1, 2])
def test_each_stage_of_a_pipeline_has_a_plan_for_the_budget(place: Path, data_parallel_size: int) -> None:
    more = f"train.dist.data_parallel_size = {data_parallel_size}\n"
    (place / "tiny.py").write_text(CONFIG + WIDE + more, encoding="utf-8")
    run_on_ranks(staged_runs, place, num_ranks=2 * data_parallel_size)
    assert same_weights(place / "plain", place / "planned")
    assert len({(place / f"runs of {rank}").read_text() for rank in range(2 * data_parallel_size)}) == 1
    plan = Plan.load(place / "planned" / "plan.yaml")
    assert [row.block for row in plan.rows] == [f"transformer.h.{number}" for number in range(3)]
    assert {row.option for row in plan.rows[1:]} != {"keep"}
    log = (place / "planned" / "log.txt").read_text(encoding="utf-8")
    assert [log.count(f"plan: stage {number}: memory budget") for number in range(3)] == [1, 1, 0]
