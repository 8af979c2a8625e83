"""Buffers and attributes that a forward begins to change only in a later call than its first."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuzz.bench import Bench, differing
from fuzz.shapes import no_grad_between, plain
from helpers.contract import assert_same_steps, seen_in
from helpers.hard_modules import D
from helpers.modules import as_module
from torch import nn


@as_module(lambda: {"mean": nn.Buffer(torch.zeros(D))})
def OwnNorm(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A batch norm that writes its statistics through ``data``, which no version counter shows."""
    if self.training:
        self.mean.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return x - self.mean


def counts_in_a_buffer(module: nn.Module, x: torch.Tensor) -> int:
    module.steps += 1
    return module.steps.item()


def counts_through_data(module: nn.Module, x: torch.Tensor) -> int:
    module.steps.data.add_(1)
    return module.steps.item()


def counts_in_a_number(module: nn.Module, x: torch.Tensor) -> int:
    module.number += 1
    return module.number


def counts_in_a_list(module: nn.Module, x: torch.Tensor) -> int:
    module.calls.append(1)
    return len(module.calls)


def counts_in_a_dict(module: nn.Module, x: torch.Tensor) -> int:
    module.table["calls"] = module.table.get("calls", 0) + 1
    return module.table["calls"]


def counts_in_a_new_attribute(module: nn.Module, x: torch.Tensor) -> float:
    module.late = getattr(module, "late", 1.5) + 1.0
    return module.late


def counts_in_a_cached_tensor(module: nn.Module, x: torch.Tensor) -> float:
    scale = 1.0 if module.cache is None else module.cache.sum().item()
    module.cache = x.detach().clone() if module.cache is None else module.cache + 1
    return scale


@as_module(lambda count: {"count": count, "number": 0, "calls": [], "table": {}, "cache": None, "steps": steps()})
def Count(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Scales by the number of its calls."""
    return x * self.count(self, x)


def steps() -> torch.Tensor:
    return nn.Buffer(torch.zeros((), dtype=torch.long))


@as_module(lambda late: {"first": nn.Linear(D, D), "late": late, "last": nn.Linear(D, D), "is_on": False})
def Branch(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Calls ``late`` from some call on only."""
    x = torch.tanh(self.first(x))
    if self.is_on:
        x = self.late(x)
    return torch.tanh(self.last(x))


COUNTS = (
    counts_in_a_buffer, counts_through_data, counts_in_a_number, counts_in_a_list, counts_in_a_dict,
    counts_in_a_new_attribute, counts_in_a_cached_tensor,
)  # fmt: skip
LATE = {
    "BatchNorm": lambda: nn.BatchNorm1d(D),
    "BatchNorm, cumulative": lambda: nn.BatchNorm1d(D, momentum=None),
    "own norm": OwnNorm,
    **{count.__name__: functools.partial(Count, count) for count in COUNTS},
}
FULL = {"activation_checkpointing": True}
POLICIES = {
    "full": {"0": FULL, "1": FULL},
    "selective": {"[01]": {"activation_checkpointing": {"rule": "selective", "save": "matmul"}}},
    "joined": {"0": FULL, "1": {"activation_checkpointing": "joined"}},
    "segments": {"": {**FULL, "segments": 2}},
    "excluded child": {"[01]": FULL, "[01].last": {"activation_checkpointing": False}},
    "nested": {"": FULL, "1": FULL},
}


def late_step(bench: Bench) -> None:
    bench.model[0].is_on = bench.model[1].is_on = True
    plain(bench)


STEPS = (no_grad_between, plain, late_step, late_step)


@functools.cache
def model_of(late: str) -> Callable[[], nn.Sequential]:
    return lambda: nn.Sequential(Branch(LATE[late]()), Branch(LATE[late]()), nn.Linear(D, 2))


@functools.cache
def plain_steps(late: str) -> dict[str, tuple[torch.Tensor, bool] | None]:
    return seen_in(model_of(late), None, STEPS)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("late", LATE)
def test_state_that_begins_to_change_in_a_later_call_changes_once(late: str, policy: str) -> None:
    assert differing(seen_in(model_of(late), POLICIES[policy], STEPS), plain_steps(late)) == []


@as_module(lambda: {"linear": nn.Linear(D, D), "is_first": True})
def FirstCall(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Scales in its first call only."""
    x = self.linear(x)
    if self.is_first:
        self.is_first = False
        x = x * 2  # saves nothing, so that a recomputation without it would not be noticed
    return torch.tanh(x)


@as_module(lambda: {"linear": nn.Linear(D, D), "drop": nn.Dropout(0.0)})
def SetsFlag(self: Any, x: torch.Tensor) -> Any:
    """Sets a flag of a module of PyTorch's that it has read before."""
    x = self.linear(x)
    if not self.drop.inplace:
        self.drop.inplace = True
        x = x * 2
    return torch.tanh(self.drop(x))


def test_a_flag_of_a_module_of_pytorch_that_the_first_call_sets_is_not_set_in_its_recomputation() -> None:
    """An own flag that goes from ``False`` to ``True`` would count as one-time set-up."""
    assert_same_steps(lambda: nn.Sequential(SetsFlag(), nn.Linear(D, 2)), {"0": FULL})


def test_a_flag_that_the_first_call_clears_is_set_in_its_recomputation() -> None:
    assert_same_steps(lambda: nn.Sequential(FirstCall(), nn.Linear(D, 2)), {"0": FULL})
