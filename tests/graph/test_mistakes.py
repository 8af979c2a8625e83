"""Likely mistakes in the use of a Graph: each is one error that names the cause and the fix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.train_graphs import SquareGraph
from torch import nn

from graphckpt import ConfigError, Graph, GraphError


@pytest.fixture
def step() -> SquareGraph:
    return SquareGraph(nn.Linear(8, 8))


def test_backward_without_an_optimizer() -> None:
    message = r"build: backward\(\) was called, but without an optimizer .* fix: call self\.add_optimizer\(\.\.\.\)"
    with pytest.raises(GraphError, match=message):
        Graph.trace(lambda x: (x.requires_grad_() * 1).sum().backward())(torch.ones(2, 8))


def test_the_optimizer_of_another_model() -> None:
    step = SquareGraph(nn.Linear(8, 8), optimizer=torch.optim.SGD(nn.Linear(8, 8).parameters(), lr=0.1))
    with pytest.raises(GraphError, match=r"parameters of its optimizers are not those of its modules · fix: create"):
        step(torch.ones(2, 8))


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("amp", r"config\.enable_amp\(dtype=torch\.bfloat16\)"),
        ("gradient_accumulation_steps", r"config\.set_gradient_accumulation_steps\(4\)"),
        ("memory_buget", r"did you mean 'memory_budget'\? · fix: use strict_static, .*, enable_amp\("),
    ],
)
def test_settings_of_another_name(name: str, fix: str, step: SquareGraph) -> None:
    with pytest.raises(ConfigError, match=f"no field '{name}'.*{fix}"):
        setattr(step.config, name, True)


def test_states_of_other_shapes_load_nothing(step: SquareGraph) -> None:
    model = step.model.origin
    step(torch.ones(2, 8))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state: dict[str, Any] = step.state_dict()
    wrong = {**state, "model": {"weight": torch.zeros(3, 3), "bias": torch.zeros(8)}}
    for strict in (True, False):
        with pytest.raises(GraphError, match=r"(?s)nothing .*model\.weight: expected shape \(8, 8\), got \(3, 3"):
            step.load_state_dict(wrong, strict=strict)
    missing = {"model": {"bias": torch.zeros(8)}}
    with pytest.raises(GraphError, match=r"(?s)missing System-Train-Optimizer-0, .*model\.weight.*or strict=False"):
        step.load_state_dict(missing)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
