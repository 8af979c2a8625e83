"""The peak that a config is planned with, in one process, is that of the trainer's step on real ranks.

The counter of the real ranks shares no code with the planner.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import launch
from helpers.small_run import place as place  # noqa: PLC0414 - a fixture
from helpers.thinning import slow_unless

from graphckpt import Plan
from graphckpt.config.run import fake_stages_from
from graphckpt.config.schema import model_of, optimizer_of
from graphckpt.config.source import ConfigSource
from graphckpt.planning.plan import save_stages
from graphckpt.train.build_model import TrainGraph, build_model
from graphckpt.train.output import Report
from graphckpt.train.parallel.ranks import TrainRanks
from tests.parallel.test_live_bytes import Meter

pytestmark = pytest.mark.multi_process

ATTEMPTS = 5
"""gloo's threads may free what they have sent a little late, in any of the steps that are compared."""
CANDIDATES: list[Any] = ["full", {"rule": "selective", "save": "matmul"}]
CONFIG = """
from torch.optim import AdamW

from graphckpt.config import LazyCall, get_config
from graphckpt.train.tasks import CausalLM

data = get_config("common/data.py").data
model = get_config("common/models/llama.py").model
train = get_config("common/train.py").train
optim = LazyCall(AdamW)(lr=1e-3)
task = LazyCall(CausalLM)()

data.update(paths="texts", cache_dir="cache", vocab_size=300, seq_length=128, eval_fraction=0.2)
model.config.update(num_hidden_layers=4, hidden_size=128, intermediate_size=352, vocab_size=512)
model.config.update(num_attention_heads=4, num_key_value_heads=4)
train.update(train_micro_batch_size=2, num_accumulation_steps=1, device="cpu")
"""


def zero(stage: int, size: int = 2) -> list[str]:
    return [*data(size), "train.zero_optimization.enabled=True", f"train.zero_optimization.stage={stage}"]


def data(size: int) -> list[str]:
    return [f"train.dist.data_parallel_size={size}"]


TENSOR = ["train.dist.tensor_parallel_size=2"]
PIPELINE = ["train.dist.pipeline_parallel_size=2", "train.num_accumulation_steps=4"]
WAYS: dict[str, tuple[int, list[str]]] = {
    "ddp": (2, data(2)),
    "ddp, accumulated": (2, [*data(2), "train.num_accumulation_steps=3"]),
    "zero 1": (2, [*zero(1), "train.num_accumulation_steps=4"]),
    "zero 2": (2, [*zero(2), "train.num_accumulation_steps=4"]),
    "zero 3": (2, zero(3)),
    "zero 3, uneven": (3, zero(3, 3)),
    "tp": (2, TENSOR),
    "dp x tp": (4, [*data(2), *TENSOR]),
    "zero 3 x tp": (4, [*zero(3), *TENSOR]),
    "pipeline": (2, PIPELINE),
    "pipeline x dp": (4, [*PIPELINE, *data(2)]),
}


def planned(way: str, budgets: list[Any]) -> list[Plan]:
    """Returns the plan of each pipeline stage; the last budget is that of all further ones."""
    plans = []
    options = {"candidates": CANDIDATES}
    with fake_stages_from("ranks.py", WAYS[way][1], device="cpu", options=options) as stages:
        for number, stage in enumerate(stages):
            with stage as steps:
                plans.append(steps.plan(budgets[min(number, len(budgets) - 1)]))
    return plans


def metered(words: list[str], file: str, predicted: int) -> int:
    """Returns the lowest peak of the trainer's steps on this rank, under the plan in a file if any.

    Steps run until all ranks have been at most as high as predicted, :data:`ATTEMPTS` at most.
    """
    section = "train.activation_checkpoint"
    planned_words = [f"{section}.enabled=True", f"{section}.plan={file}"] if file else [f"{section}.enabled=False"]
    with ConfigSource("ranks.py", [*words, *planned_words]).checked() as run:
        task, device = run.task(), torch.device("cpu")
        opened = run.data().open(task, seed=1, report=Report.silent())
        built = build_model(lambda: model_of(run), task, run.train, TrainRanks(run.train.dist, device), device)
        optimizer = optimizer_of(run, built.model)
        graph = TrainGraph(built, optimizer, None, built.block_fields())  # type: ignore[arg-type]
        sizes = run.train.sizes
        ids = opened.train.batch(range(sizes.micro_batch * sizes.accumulation))["input_ids"]  # type: ignore[arg-type]
        batch = {"input_ids": ids, "labels": ids.clone()}  # two, as on a device
        for _ in range(4):  # the first ones watch what blocks do
            graph(**batch)
        moments = [value for state in optimizer.state.values() for value in state.values()]
        lowest = sys.maxsize
        are_low: list[Any] = [None] * dist.get_world_size()
        with Meter([*batch.values(), *built.model.parameters(), *built.model.buffers(), *moments]) as meter:
            graph(**batch)  # shows the counter what is alive between steps
            for _ in range(ATTEMPTS):
                meter.peak = 0
                graph(**batch)
                lowest = min(lowest, meter.peak)
                dist.all_gather_object(are_low, lowest <= predicted)
                if all(are_low):
                    break
        return lowest


def peaks_agree(rank: int, way: str, rows: list[tuple[str, list[int]]]) -> None:
    for file, predicted in rows:
        everywhere: list[Any] = [None] * dist.get_world_size()
        per_stage = len(everywhere) // len(predicted)
        dist.all_gather_object(everywhere, metered(WAYS[way][1], file, predicted[rank // per_stage]))
        of_stages = [everywhere[n : n + per_stage] for n in range(0, len(everywhere), per_stage)]
        where = way, file, predicted, everywhere
        assert [ranks[0] for ranks in of_stages] == [max(ranks) for ranks in of_stages] == predicted, where


@pytest.mark.parametrize("way", [pytest.param(way, marks=slow_unless(way == "zero 3")) for way in WAYS])
def test_a_predicted_peak_is_that_of_the_trainer(place: Path, way: str) -> None:
    """Everything kept, the lowest peak, and a plan between them, which the trainer reads from their files."""
    (place / "ranks.py").write_text(CONFIG, encoding="utf-8")
    lowest = planned(way, ["min"])
    middle = planned(way, [(plan.predicted_peak_bytes + plan.plain_peak_bytes) // 2 for plan in lowest])
    rows = [("", [plan.plain_peak_bytes for plan in lowest])]
    for file, plans in {"lowest.yaml": lowest, "middle.yaml": middle}.items():
        save_stages(plans, file)
        rows.append((file, [plan.predicted_peak_bytes for plan in plans]))
    launch(peaks_agree, WAYS[way][0], place, way, rows)
    policies = [[plan.policies for plan in plans] for plans in (lowest, middle)]
    assert policies[1] not in ([{}] * len(middle), policies[0])
