"""A run that plans its own policies, or plans anew where memory runs out: within the budget, and the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.memory_limit import MemoryLimit, limited_address_space
from helpers.small_run import CONFIG, rows_of, same_weights, train

from graphckpt.planning.plan import Plan
from graphckpt.train import trainer
from graphckpt.train.build_model import TrainGraph
from graphckpt.train.hooks.log import LogHook

BUDGET = "train.activation_checkpoint.memory_budget"
WIDE = """
data.seq_length = 128
model.config.update(n_embd=32, n_positions=128)
train.update(train_iter=3, train_micro_batch_size=8, num_accumulation_steps=2)
train.evaluation.enabled = False
"""


@pytest.fixture(autouse=True)
def wide(place: Path) -> None:
    (place / "tiny.py").write_text(CONFIG + WIDE, encoding="utf-8")


def test_weights_are_those_of_the_plain_run_and_planning_counts_as_no_iteration(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("train.output_dir=plain") == 0
    calls = []
    with monkeypatch.context() as patch:
        for owner, name in ((trainer, "plan_on_batch"), (LogHook, "before_step")):
            plain = getattr(owner, name)
            patch.setattr(owner, name, lambda *args, f=plain, n=name: (calls.append(n), f(*args)))
        assert train("train.output_dir=planned", f"{BUDGET}=0.6") == 0
    assert calls == ["plan_on_batch", *["before_step"] * 3]
    assert same_weights(place / "plain", place / "planned")
    printed = capsys.readouterr().out
    assert "plan: memory budget" in printed
    plan = Plan.load(place / "planned" / "plan.yaml")
    assert plan.predicted_peak_bytes <= plan.budget_bytes < plan.plain_peak_bytes
    assert plan.policies
    by_hand = [
        "train.activation_checkpoint.rule=null",
        f"train.activation_checkpoint.policies={json.dumps(plan.policies)}",
    ]
    for name, more in (("by_hand", by_hand), ("by_file", ["train.activation_checkpoint.plan=planned/plan.yaml"])):
        assert train(f"train.output_dir={name}", "train.activation_checkpoint.enabled=True", *more) == 0
        assert same_weights(place / "plain", place / name)
        assert kept_bytes(capsys.readouterr().out) == kept_bytes(printed.partition("plan: ")[2])


def kept_bytes(printed: str) -> str:
    """Returns what the run kept for backward, by its table."""
    return next(line for line in printed.splitlines() if line.startswith("kept for backward"))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_layers_are_compiled_where_the_config_says_so(place: Path) -> None:
    assert train("train.output_dir=plain", "train.train_iter=1") == 0
    compiled = "train.activation_checkpoint.compile={backend: eager}"
    assert train("train.output_dir=planned", f"{BUDGET}=0.6", compiled, "train.train_iter=1") == 0
    torch._dynamo.reset()
    plan = Plan.load(place / "planned" / "plan.yaml")
    assert all(row.option.endswith(", compiled") for row in plan.rows)
    assert all(fields["compile"] == {"backend": "eager"} for fields in plan.policies.values())
    assert same_weights(place / "plain", place / "planned")


def limit_call(monkeypatch: pytest.MonkeyPatch, number: int, limit: int | None) -> list[MemoryLimit]:
    """Limits what the ``number``-th update allocates; returns the limits that were in place."""
    plain, used = TrainGraph.__call__, []

    def call(self: TrainGraph, **batch: Any) -> Any:
        used.append(MemoryLimit(limit if len(used) == number else None))
        with used[-1]:
            return plain(self, **batch)

    monkeypatch.setattr(TrainGraph, "__call__", call)
    return used


def test_run_goes_on_with_the_same_bits(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        used = limit_call(patch, 2, None)
        assert train("train.output_dir=plain", "train.train_iter=4") == 0
    peak = used[2].peak_bytes
    used = limit_call(monkeypatch, 2, int(0.8 * peak))
    text = "memory ran out; the step is repeated: 2x keep -> .*full.*; predicted peak"
    with limited_address_space(), pytest.warns(UserWarning, match=text):
        assert train("train.output_dir=limited", "train.train_iter=4") == 0
    assert [limit.num_raised for limit in used] == [0, 0, 1, 0]
    assert used[3].peak_bytes <= 0.8 * peak
    assert same_weights(place / "plain", place / "limited")
    assert rows_of(place / "plain") == rows_of(place / "limited")


def test_a_run_out_of_memory_raises_where_the_config_says_so(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    used = limit_call(monkeypatch, 1, 1_000_000)
    assert train("train.activation_checkpoint.on_out_of_memory=raise") == 2
    assert "memory ran out: tried to allocate" in capsys.readouterr().err
    assert len(used) == 2
