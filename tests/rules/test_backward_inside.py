"""A backward inside of a block's own forward is refused; the way out is a policy on the layers inside."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.modules import as_module
from torch import Tensor, nn

import graphckpt
from graphckpt import RecomputeError, Selective


@as_module(lambda of="input": {"layers": nn.Sequential(nn.Linear(8, 8), nn.Tanh()), "last": nn.Linear(8, 8), "of": of})
def Force(self: Any, x: Tensor) -> Tensor:
    """Adds the gradient of an energy, as models of atoms do."""
    wanted = x if self.of == "input" else self.layers[0].weight
    (force,) = torch.autograd.grad(self.layers(x).pow(2).sum(), wanted, create_graph=True)
    return (x + force.mean() * self.last(x)).sin()


@as_module(lambda: {"child": nn.Sequential(nn.Linear(8, 8), nn.Tanh())})
def GradientOfOutput(self: Any, x: Tensor) -> Tensor:
    """Differentiates what comes before its child by the child's output: only the child's ops are met."""
    energy = self.child(x)
    (force,) = torch.autograd.grad(energy, self.child[0].weight, torch.ones_like(energy), retain_graph=True)
    return energy * force.mean()


@as_module(lambda: {"linear": nn.Linear(8, 8)})
def GradientOfOuter(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Runs a backward through another block, which was called before."""
    (gradient,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    return self.linear(y + gradient)


def model_of(block: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), copy.deepcopy(block), nn.Linear(8, 8))


def steps(model: nn.Module, *, amp: bool = False) -> list[Tensor]:
    found = []
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        x = torch.randn(4, 8, generator=generator, requires_grad=True)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            y = model(x)
        y.float().pow(2).sum().backward()
        found += [y.detach(), *(p.grad.clone() for p in [x, *model.parameters()] if p.grad is not None)]
    return found


ON, OFF = {"activation_checkpointing": True}, {"activation_checkpointing": False}
REFUSED: dict[str, dict[str, Any]] = {
    "full": {"1": ON},
    "all": {"": ON},
    "selective": {"1": Selective()},
    "selective in full": {"": ON, "1": Selective()},
    "disk": {"1": {**ON, "offload": "disk", "min_elements": 1}},
    "joined": {"0": ON, "1": "joined"},
    "excluded layers": {"1": ON, "1.layers": OFF, "1.last": OFF},
}


@pytest.mark.parametrize("rules", REFUSED)
@pytest.mark.parametrize("of", ["input", "weight"])
def test_a_block_that_differentiates_itself_is_refused(of: str, rules: str) -> None:
    model = model_of(Force(of))
    plain = steps(model)
    with graphckpt.apply(model, REFUSED[rules]) as handle:
        for _ in range(2):  # nothing of the first call is left behind
            with pytest.raises(RecomputeError, match=r"its forward runs a backward.*set the policy on the layers"):
                steps(model)
        assert all(getattr(wrapper.context.store, "num_alive", 0) == 0 for wrapper in handle._wrappers)
    assert all(map(torch.equal, steps(model), plain))


def test_a_backward_that_meets_an_excluded_child_only_or_another_block_is_refused() -> None:
    model = model_of(GradientOfOutput())
    with (
        graphckpt.apply(model, {"1": ON, "1.child": OFF}),
        pytest.raises(RecomputeError, match="its forward runs a backward"),
    ):
        steps(model)
    first, second = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), GradientOfOuter()
    x = torch.randn(4, 8, requires_grad=True)
    with (
        graphckpt.apply(nn.ModuleList([first, second]), {"*": ON}),
        pytest.raises(RecomputeError, match=r"^1: its forward runs a backward"),
    ):
        second(x, first(x)).sum().backward()


ALLOWED: dict[str, dict[str, Any]] = {
    "on its layers": {"1.layers": ON, "1.last": ON},
    "around it, excluded": {"": ON, "1": OFF},
    "selective inside": {"0": ON, "1.layers": Selective("matmul")},
    "offloaded": {"1": {"offload": "disk", "min_elements": 1}},
}


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("rules", ALLOWED)
@pytest.mark.parametrize("of", ["input", "weight"])
def test_policies_that_leave_it_alone_give_the_bits_of_the_plain_step(of: str, rules: str, amp: bool) -> None:
    model = model_of(Force(of))
    plain = steps(model, amp=amp)
    with graphckpt.apply(model, ALLOWED[rules]):
        assert all(map(torch.equal, steps(model, amp=amp), plain))


@as_module(lambda: {"linear": nn.Linear(8, 8)})
def BesideInput(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return self.linear(x), x


@as_module(lambda: {"child": BesideInput(), "last": nn.Linear(8, 8)})
def CallsCheckpoint(self: Any, x: Tensor) -> Tensor:
    """Recomputes a part of itself in which it edits what a child returns beside the part's own input."""

    def part(value: Tensor) -> Tensor:
        y, value = self.child(value)
        return self.last(y.mul_(0.5) + value.sin()).sin()

    return graphckpt.checkpoint(part, x)


def test_a_recomputation_that_ends_within_an_inner_call_leaves_no_hook_behind() -> None:
    model, x = model_of(CallsCheckpoint()), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    with graphckpt.apply(model, {"1": ON, "1.child": OFF, "1.last": OFF}):
        for each in (model, plain):
            for _ in range(2):
                each(x)  # is dropped
                each(x).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
