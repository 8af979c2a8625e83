"""The engine on a CUDA device: its generators, a step in a CUDA graph."""

from __future__ import annotations

import pytest
import torch
from helpers.modules import as_module
from torch import nn

import graphckpt

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


def test_rng_state_of_every_device_in_use_is_restored() -> None:
    """A block whose tensors come as keywords and in containers, which PyTorch's own checkpoint does not look into."""

    @as_module()
    def Drops(self, *, states: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.dropout(states["h"].sin(), 0.5) * torch.rand((), device="cuda")

    x = torch.randn(64, 64, device="cuda", requires_grad=True)
    grads = []
    for rules in ({}, {"0": True}):
        torch.manual_seed(1)
        model = nn.Sequential(Drops())
        with graphckpt.apply(model, rules):
            (grad,) = torch.autograd.grad(model[0](states={"h": x * 1}).sum(), x)
        grads.append((grad, torch.cuda.get_rng_state()))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


class Region(nn.Sequential):
    """Its layers under autocast."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return super().forward(x).float()


@as_module(lambda: {"linear": nn.Linear(8, 8)})
def Slope(self, x: torch.Tensor) -> torch.Tensor:
    """Runs backward in its forward, through the layers before it too, and uses its weight before and after that."""
    energy = self.linear(x).tanh().pow(2).sum()
    (slope,) = torch.autograd.grad(energy, self.linear.weight, create_graph=True)
    return x + slope.mean() * self.linear(x)


def test_a_backward_within_a_forward_leaves_its_casts_in_the_cache() -> None:
    """The cache is the process's; backward recomputes in a thread of the device, which is in no region of its own."""
    grads = []
    for policy in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Region(Slope()), nn.Linear(8, 8)).cuda()
        graphckpt.apply(model, {"1": {"activation_checkpointing": policy}})
        x = torch.randn(4, 8).cuda().requires_grad_()
        model(model(x).sin()).sum().backward()
        grads.append([x.grad, *(parameter.grad for parameter in model.parameters())])
    assert all(map(torch.equal, *grads))
