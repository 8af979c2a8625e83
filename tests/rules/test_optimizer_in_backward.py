"""An optimizer that steps in backward, as soon as a gradient is there, with excluded children."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import graphckpt
from graphckpt.blocks.apply import Policies

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """Calls ``last`` at its end; may read its weight itself."""

    def __init__(self, *, reads_weight: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.reads_weight = reads_weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        if self.reads_weight:
            x = x @ self.last.weight.detach().exp()  # with a gradient, the step would wait for the recomputation
        return self.last(torch.sigmoid(x))


def step_in_backward(model: nn.Module) -> None:
    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    optimizers = {parameter: torch.optim.AdamW([parameter], lr=0.1) for parameter in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)


def train(policies: Policies, **kwargs: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(**kwargs), Block(**kwargs), nn.Linear(8, 2))
    step_in_backward(model)
    with graphckpt.apply(model, policies):
        for _ in range(3):
            model(X).square().sum().backward()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("rule", [True, {"rule": "selective", "save": "matmul"}], ids=["full", "selective"])
@pytest.mark.parametrize("child", ["first", "norm", "last", "(first|last)"])
def test_weights_are_those_of_the_plain_loop(child: str, rule: bool | dict[str, Any]) -> None:
    policies = {
        "[01]": {"activation_checkpointing": rule},
        f"re:[01]\\.{child}": {"activation_checkpointing": False},
    }
    assert all(map(torch.equal, train(policies), train({})))


def test_a_parent_that_reads_a_weight_after_its_step_is_an_error() -> None:
    policies = {"[01]": True, "[01].last": {"activation_checkpointing": False}}
    with pytest.raises(graphckpt.RecomputeError, match=r"^1: a parameter of an excluded child, which its parent reads"):
        train(policies, reads_weight=True)
