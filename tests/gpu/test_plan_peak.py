"""The peak that a plan predicts is that of the allocator, for a step whose weights and optimizer count."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.modules import as_module
from helpers.train_graphs import SquareGraph
from torch import nn
from torch.nn import functional as F

import graphckpt
from graphckpt.planning import Plan

pytestmark = pytest.mark.gpu

WIDTH = 128
OFF = 0.01


@as_module(lambda: {"up": nn.Linear(WIDTH, 4 * WIDTH), "down": nn.Linear(4 * WIDTH, WIDTH)})
def Layer(self, x: torch.Tensor) -> torch.Tensor:
    return x + self.down(F.gelu(self.up(x)))


def planned_alone(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor
) -> tuple[Plan, Callable[[], object]]:
    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    plan = graphckpt.plan(model, step, memory_budget=0.8, blocks="[0-5]")
    plan.apply()
    return plan, step


def planned_graph(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor
) -> tuple[Plan, Callable[[], object]]:
    step = SquareGraph(model, optimizer=optimizer)
    step.config.capture = "eager"
    plan = step.plan(x, memory_budget=0.8, blocks="model.[0-5]")
    plan.apply()
    return plan, lambda: step(x)


@pytest.mark.serial
@pytest.mark.parametrize("planned", [planned_alone, planned_graph])
def test_the_predicted_peak_is_without_the_copies_that_planning_holds(planned):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    model = nn.Sequential(*(Layer() for _ in range(6))).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(512, WIDTH, device="cuda")
    plan, step = planned(model, optimizer, x)
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    assert abs(plan.predicted_peak_bytes - peak) <= OFF * (peak - before)
    assert peak <= plan.budget_bytes
