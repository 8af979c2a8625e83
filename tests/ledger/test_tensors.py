"""The storages of a measured step: what allocated each, what saved it, and that their sum is the level."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.layer_stacks import mlp_layers
from torch import nn

import graphckpt
from graphckpt.blocks.apply import Policies
from graphckpt.ledger.explanation import Explanation


def measured(policies: Policies, steps: int = 2) -> tuple[nn.Module, Explanation]:
    torch.manual_seed(0)
    model = mlp_layers(3)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(32, 16)
    with graphckpt.apply(model, policies) as handle:
        for _ in range(steps):
            with handle.measure():
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return model, handle.explain(show=False)


@pytest.mark.parametrize("policies", [{}, {"*": True}, {"0": True, "1": "selective"}, {"*": {"contiguous": True}}])
@pytest.mark.parametrize("steps", [1, 2])
def test_the_living_tensors_sum_to_every_level(policies: dict[str, Any], steps: int) -> None:
    _, seen = measured(policies, steps)
    for at, event in enumerate(seen.timeline):
        assert sum(life.num_bytes for life in seen.tensors if life.is_alive(at)) == event.live_bytes


def test_kinds_have_the_bytes_of_weights_gradients_and_states_and_those_from_before_have_no_op() -> None:
    model, seen = measured({"*": True})
    weights = sum(p.nbytes for p in model.parameters())
    sums = {}
    for life in seen.tensors:
        sums[life.kind] = sums.get(life.kind, 0) + life.num_bytes
    assert sums["weights"] == sums["gradients"] == weights
    steps = 4 * sum(1 for _ in model.parameters())  # AdamW counts its steps in a tensor of 4 bytes
    assert sums["optimizer states"] == 2 * weights + steps
    old = [life for life in seen.tensors if life.is_old]
    assert {life.kind for life in old} >= {"weights", "optimizer states"}
    assert {(life.op, life.source) for life in old} == {("", "")}
    _, first = measured({}, steps=1)
    assert any(life.kind == "optimizer states" and not life.is_old for life in first.tensors), "the step creates them"


def test_a_result_has_its_op_shape_dtype_block_and_line() -> None:
    _, seen = measured({"*": True})
    life = next(life for life in seen.tensors if life.op.startswith("aten.gelu") and life.phase == "forward")
    assert (life.shape, life.dtype, life.block, life.num_bytes) == ((32, 64), "float32", "0", 32 * 64 * 4)
    assert life.source.startswith("test_tensors.py:")
    assert life.source.endswith(" in measured"), "the calls inside of torch and graphckpt are skipped"
    again = next(life for life in seen.tensors if life.op.startswith("aten.gelu") and life.recomputed_by)
    assert again.recomputed_by == again.block == "2"
    assert life.end is not None
    assert again.begin > life.end


def test_only_what_a_block_really_saves_is_saved_by_it() -> None:
    _, plain = measured({})
    _, full = measured({"*": True})

    def saved(seen: Explanation) -> Any:
        return {(life.saved_by, life.op.split(".")[1]) for life in seen.tensors if life.saved_by and life.op}

    assert ("1", "gelu") in saved(plain)
    assert not [name for name in saved(full) if name[1] == "gelu"]
    assert ("1", "addmm") in saved(full), "its input"
    for life in full.tensors:
        assert not life.is_saved(len(full.timeline) - 1)


def test_gradients_of_an_earlier_step_are_freed_within_the_step() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    model(x).sum().backward()
    with graphckpt.apply(model, {}) as handle:
        with handle.measure():
            model.zero_grad()
            model(x).sum().backward()
        seen = handle.explain(show=False)
    old = [life for life in seen.tensors if life.is_old and life.kind == "gradients"]
    assert sum(life.num_bytes for life in old) == sum(p.nbytes for p in model.parameters())
    assert all(life.end is not None and life.end < len(seen.timeline) for life in old)


@pytest.mark.parametrize(
    "policies",
    [
        {},
        {"0": True},
        {"1": {"activation_checkpointing": False, "contiguous": True}},
        {"1": {"activation_checkpointing": False, "offload": "disk"}, "2": True},
        {"*": {"activation_checkpointing": False, "contiguous": True}},
        {"*": True, "1": {"activation_checkpointing": True, "offload": "disk"}},
    ],
)
def test_the_backward_of_each_block_is_its_own(policies: dict[str, Any]) -> None:
    _, seen = measured(policies)
    gradients = [t for t in seen.tensors if t.phase == "backward" and t.op.startswith("aten.gelu_backward")]
    assert [t.block for t in gradients] == ["2", "1", "0"]
    weights = [t for t in seen.tensors if t.phase == "backward" and t.shape in ((64, 16), (16, 64))]
    assert [t.block for t in weights] == ["2", "2", "1", "1", "0", "0"]


def test_the_backward_of_an_excluded_child_is_its_own_and_what_follows_that_of_its_parent() -> None:
    _, seen = measured({"1": True, "1.0": False})
    weights = [t.block for t in seen.tensors if t.phase == "backward" and t.shape in ((64, 16), (16, 64))]
    assert weights == ["2", "2", "1", "1.0", "0", "0"]
