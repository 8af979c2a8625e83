"""Blocks that draw from Python's or NumPy's global generator: same masks in the recomputation, drawn once."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers.layer_stacks import stack_of
from helpers.modules import as_module
from helpers.train_graphs import SquareGraph
from torch import nn

import graphckpt
from graphckpt import thread_state as rng
from graphckpt.blocks.apply import Policies

Draw = Callable[[torch.Tensor], torch.Tensor]

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
DRAWS: dict[str, Draw] = {
    "Python": lambda x: torch.tensor([random.random() for _ in range(8)]),
    "Python's gauss": lambda x: torch.tensor([random.gauss(0, 1) for _ in range(7)] + [0.0]),
    "NumPy": lambda x: torch.from_numpy(np.random.rand(8)).float(),  # noqa: NPY002
    "both, in training mode": lambda x: torch.tensor(np.random.choice(8, 8) + random.random()).float(),  # noqa: NPY002
}


@as_module(lambda draw: {"first": nn.Linear(8, 8), "last": nn.Linear(8, 8), "draw": draw})
def Noisy(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Multiplies by host noise, in training mode only, between two layers."""
    x = torch.tanh(self.first(x))
    if self.training:
        x = x * self.draw(x)
    return torch.tanh(self.last(x))


class Inner(Noisy):
    """Draws in a child."""

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw)
        self.inner = Noisy(draw)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.inner(x))


FULL = {"activation_checkpointing": True}
POLICIES = {
    "full": {"[01]": FULL},
    "selective": {"[01]": {"activation_checkpointing": {"rule": "selective", "save": "matmul"}}},
    "joined": {"0": FULL, "1": {"activation_checkpointing": "joined"}},
    "segments": {"": {**FULL, "segments": 2}},
    "excluded child that draws": {"[01]": FULL, "[01].inner": {"activation_checkpointing": False}},
    "nested": {"": FULL, "1": FULL, "1.inner": FULL},
}


def run(draw: Draw, policies: Policies, num_steps: int = 3) -> Iterator[tuple[list[torch.Tensor], dict[str, int]]]:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    model = nn.Sequential(Inner(draw), Inner(draw), nn.Linear(8, 2))
    with graphckpt.apply(model, policies):
        for number in range(num_steps):
            model.train(number != 1)  # each mode learns on its own
            model.zero_grad()
            model(X).square().sum().backward()
            gradients = [parameter.grad.clone() for parameter in model.parameters()]
            yield gradients, rng.HostRNGState.read().fingerprints()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("library", DRAWS)
def test_masks_and_generators_are_those_of_the_plain_step(library: str, policy: str) -> None:
    plain_steps = list(run(DRAWS[library], {}))  # the generators are those of the process: one after the other
    for plain, seen in zip(plain_steps, run(DRAWS[library], POLICIES[policy]), strict=True):
        assert all(map(torch.equal, plain[0], seen[0]))
        assert plain[1] == seen[1]


def test_a_function_without_modules_draws_the_same_mask() -> None:
    x = X.clone().requires_grad_()

    def noisy(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * torch.from_numpy(np.random.rand(8)).float())  # noqa: NPY002

    gradients = []
    for call in (lambda: noisy(x), lambda: graphckpt.checkpoint(noisy, x)):
        np.random.seed(0)  # noqa: NPY002
        gradients += torch.autograd.grad(call().square().sum(), x)
        gradients.append(torch.tensor(np.random.rand()))  # noqa: NPY002
    assert torch.equal(gradients[0], gradients[2])
    assert torch.equal(gradients[1], gradients[3])


def test_only_blocks_that_draw_read_the_state_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    original = rng.HostRNGState.read
    monkeypatch.setattr(rng.HostRNGState, "read", classmethod(lambda cls: (reads.append(1), original())[1]))
    counts = {}
    for name, draw in (("draws", DRAWS["NumPy"]), ("does not draw", lambda x: x)):
        for number, _ in enumerate(run(draw, {"0": FULL}, num_steps=5)):
            counts[name, number] = len(reads)
            reads.clear()
    assert counts["does not draw", 4] == 1, "the read of this test itself"
    assert counts["draws", 4] > 1
    assert counts["does not draw", 0] > 1, "the first call learns whether the block draws"


def test_plan_and_verify_restore_the_generators() -> None:
    torch.manual_seed(0)
    model = stack_of(lambda: Noisy(DRAWS["both, in training mode"]), 4).append(nn.Linear(8, 2))
    before = rng.HostRNGState.read().fingerprints()
    graphckpt.plan(model, lambda: model(X).square().sum().backward(), memory_budget=0.9)
    assert rng.HostRNGState.read().fingerprints() == before

    step = SquareGraph(model, {"0": True})
    step.verify(X)  # raises if a gradient or a generator differs from the plain step's
    assert rng.HostRNGState.read().fingerprints() == before


def test_a_block_that_does_not_draw_leaves_the_generators_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 2))
    with graphckpt.apply(model, {"0": True, "0.2": {"activation_checkpointing": False}}):
        loss = model(X).square().sum()  # the first call, which reads the states to learn
        random.random(), np.random.rand()  # noqa: NPY002
        before = rng.HostRNGState.read().fingerprints()
        loss.backward()
        assert rng.HostRNGState.read().fingerprints() == before
