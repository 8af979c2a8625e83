"""Buffers and attributes that a forward begins to change only in a later call than its first."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.modules import as_module
from torch import nn

import graphckpt

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()


@as_module(lambda: {"mean": nn.Buffer(torch.zeros(8))})
def OwnNorm(self, x):
    """A batch norm that writes its statistics through ``data``, which no version counter shows."""
    if self.training:
        self.mean.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return x - self.mean


class Count(nn.Module):
    """Scales by the number of its calls, which it counts in ``place``."""

    def __init__(self, place):
        super().__init__()
        self.place = place
        self.number, self.calls, self.table, self.cache = 0, [], {}, None
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.place == "buffer":
            self.steps += 1
            scale = self.steps.item()
        elif self.place == "buffer through data":
            self.steps.data.add_(1)
            scale = self.steps.item()
        elif self.place == "number":
            self.number += 1
            scale = self.number
        elif self.place == "list":
            self.calls.append(1)
            scale = len(self.calls)
        elif self.place == "dict":
            self.table["calls"] = self.table.get("calls", 0) + 1
            scale = self.table["calls"]
        elif self.place == "new attribute":
            self.late = getattr(self, "late", 1.5) + 1.0
            scale = self.late
        else:
            scale = 1.0 if self.cache is None else self.cache.sum().item()
            self.cache = x.detach().clone() if self.cache is None else self.cache + 1
        return x * scale


@as_module(lambda late: {"first": nn.Linear(8, 8), "late": late, "last": nn.Linear(8, 8), "is_on": False})
def Branch(self, x):
    """Calls ``late`` from the call number ``begin`` on only."""
    x = torch.tanh(self.first(x))
    if self.is_on:
        x = self.late(x)
    return torch.tanh(self.last(x))


LATE = {
    "BatchNorm": lambda: nn.BatchNorm1d(8),
    "BatchNorm, cumulative": lambda: nn.BatchNorm1d(8, momentum=None),
    "own norm": OwnNorm,
    **{
        place: lambda place=place: Count(place) for place in ("buffer", "buffer through data", "number", "list", "dict")
    },
    "new attribute": lambda: Count("new attribute"),
    "cached tensor": lambda: Count("cache"),
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


def state_of(model):
    fields = {k: v for m in model.modules() if isinstance(m, Count) for k, v in vars(m).items() if k[0] != "_"}
    return [*copy.deepcopy(list(fields.values())), *(b.clone() for b in model.buffers())]


def run(late, policies):
    torch.manual_seed(0)
    model = nn.Sequential(Branch(late()), Branch(late()), nn.Linear(8, 2))
    with graphckpt.apply(model, policies):
        for number in range(4):
            model[0].is_on = model[1].is_on = number >= 2
            model.zero_grad()
            X.grad = None
            model(X).square().sum().backward()
            if number == 0:
                with torch.no_grad():
                    model(X)
            yield [
                X.grad.clone(),
                *(None if p.grad is None else p.grad.clone() for p in model.parameters()),
                *state_of(model),
            ]


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return one == other


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("late", LATE)
def test_what_begins_to_change_in_a_later_call_changes_once(late, policy):
    for number, (plain, seen) in enumerate(zip(run(LATE[late], {}), run(LATE[late], POLICIES[policy]), strict=True)):
        assert all(map(equal, plain, seen)), f"step {number}"


@as_module(lambda: {"linear": nn.Linear(8, 8), "is_first": True})
def FirstCall(self, x):
    """Scales in its first call only."""
    x = self.linear(x)
    if self.is_first:
        self.is_first = False
        x = x * 2  # saves nothing, so that a recomputation without it would not be noticed
    return torch.tanh(x)


def test_a_flag_that_the_first_call_clears_is_set_in_its_recomputation():
    gradients = []
    for policies in ({}, {"0": FULL}):
        torch.manual_seed(0)
        model = nn.Sequential(FirstCall(), nn.Linear(8, 2))
        with graphckpt.apply(model, policies):
            model(X.detach()).square().sum().backward()
        assert model[0].is_first is False
        gradients.append(model[0].linear.weight.grad)
    assert torch.equal(*gradients)
