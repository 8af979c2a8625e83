"""Policies that change between a forward and its backward: the recomputation follows those of the forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.modules import as_module
from torch import Tensor, nn

import graphckpt
from graphckpt.rules import Selective

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@as_module(lambda: {"up": nn.Linear(4, 8), "drop": nn.Dropout(0.4), "down": nn.Linear(8, 4)})
def Block(self: Any, x: Tensor) -> Tensor:
    return x + self.down(self.drop(torch.tanh(self.up(x))))


EAGER = {"compile": {"backend": "eager"}}
POLICIES: dict[str, dict[str, Any]] = {
    "full": {"*": True},
    "excluded children": {"[01]": True, "[01].up": False, "[01].drop": False},
    "excluded, disk": {
        "[01]": True,
        "[01].up": {"activation_checkpointing": False, "offload": "disk", "min_elements": 1},
    },
    "selective in full": {"": True, "[01]": Selective("matmul")},
    "compiled": {"[01]": {"activation_checkpointing": True, **EAGER}},
    "compiled excluded child": {"[01]": True, "[01].down": {"activation_checkpointing": False, **EAGER}},
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def loss_of(model: nn.Module) -> Tensor:
    torch.manual_seed(1)
    return model(torch.ones(3, 4)).square().sum()


def grads(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("policies", POLICIES)
@pytest.mark.parametrize("then", ["removed", "others", "disabled"])
def test_backward_follows_the_policies_of_its_forward(policies: str, then: str) -> None:
    plain, wrapped = model(), model()
    loss_of(plain).backward()
    for warm_up in (True, False):
        wrapped.zero_grad()
        handle = graphckpt.apply(wrapped, POLICIES[policies])
        if warm_up:
            loss_of(wrapped).backward()
            wrapped.zero_grad()
        loss = loss_of(wrapped)
        if then == "disabled":
            with graphckpt.blocks.disable_checkpointing():
                loss.backward()
            handle.remove()
        else:
            handle.remove()
            if then == "others":
                handle = graphckpt.apply(wrapped, {"[01].up": True, "[01].drop": "selective"})
            loss.backward()
            handle.remove()
        assert all(map(torch.equal, grads(plain), grads(wrapped)))
        assert not any("forward" in module.__dict__ for module in wrapped.modules())
