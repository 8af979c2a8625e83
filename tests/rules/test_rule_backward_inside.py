"""A backward inside of a block's own forward: what came before it is recomputed, what follows it is kept."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphckpt
from graphckpt import Selective


class Force(nn.Module):
    """Adds the gradient of an energy, as models of atoms do, and counts how often that is computed."""

    num_calls = 0

    def __init__(self, of: str = "input", *, inplace: bool = False) -> None:
        super().__init__()
        self.linear, self.act, self.of = nn.Linear(8, 8), nn.ELU(inplace=inplace), of

    def forward(self, x: Tensor) -> Tensor:
        energy = self.act(self.linear(x)).tanh().pow(2).sum()
        (force,) = torch.autograd.grad(energy, x if self.of == "input" else self.linear.weight, create_graph=True)
        Force.num_calls += not torch.compiler.is_compiling()
        return (x + force.mean() * self.linear(x)).sin()


class Twice(nn.Sequential):
    """Calls its children twice: parts of the graph are met by one backward and made by two forwards."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x).cos())


MODELS: dict[str, Any] = {
    "once": lambda: nn.Sequential(nn.Linear(8, 8), Force(), nn.Linear(8, 8)),
    "of a weight": lambda: nn.Sequential(nn.Linear(8, 8), Force("weight"), Force("weight"), nn.Linear(8, 8)),
    "twice": lambda: nn.Sequential(nn.Linear(8, 8), Twice(Force(), Force()), nn.Linear(8, 8)),
    "spectral norm": lambda: nn.Sequential(
        nn.Linear(8, 8), nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), Force()), nn.Tanh()
    ),
    "in place": lambda: nn.Sequential(nn.Linear(8, 8), nn.Sequential(Force(inplace=True)), nn.Tanh()),
}


def everything(*_: Any, **__: Any) -> bool:
    return True


RULES: dict[str, dict[str, Any]] = {
    "full": {"1": {"activation_checkpointing": True}},
    "all": {"": {"activation_checkpointing": True}},
    "selective": {"1": {"activation_checkpointing": Selective()}},
    "selective in full": {
        "": {"activation_checkpointing": True},
        "1": {"activation_checkpointing": Selective(everything)},
    },
    "excluded": {"": {"activation_checkpointing": True}, "re:1.*linear": {"activation_checkpointing": False}},
    "disk": {"1": {"activation_checkpointing": True, "offload": "disk", "min_elements": 1}},
    "joined": {"*": {"activation_checkpointing": "joined"}},
}


def steps(
    model: nn.Module, *, amp: bool = False, rules: dict[str, Any] | None = None, times: int = 3, needs_grad: bool = True
) -> list[Tensor]:
    """Returns the outputs and gradients of steps with two backward calls each, within the autocast region."""
    model = copy.deepcopy(model)
    seen = []
    handle = None if rules is None else graphckpt.apply(model, rules)
    generator = torch.Generator().manual_seed(1)
    for _ in range(times):
        x = torch.randn(4, 8, generator=generator, requires_grad=needs_grad)
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            y = model(x)
            y.sum().backward(retain_graph=True)
            y.pow(2).sum().backward()
        seen += [y.detach(), *(p.grad.clone() for p in [x, *model.parameters()] if p.grad is not None)]
        seen += [b.clone() for b in model.buffers()]
    if handle is not None:
        assert all(
            getattr(wrapper.context.store, "num_alive", 0) == 0
            for wrapper in handle._wrappers
            if wrapper.context.is_placed
        )
        handle.remove()
    return seen


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("kind", MODELS)
def test_every_bit_is_that_of_the_plain_step(kind: str, rules: str, amp: bool) -> None:
    torch.manual_seed(0)
    model = MODELS[kind]()
    expected = steps(model, amp=amp)
    found = steps(model, amp=amp, rules=RULES[rules])
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


class GradientOfChild(nn.Module):
    """Differentiates its child by its input."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, x: Tensor) -> Tensor:
        energy = self.child(x)
        (force,) = torch.autograd.grad(energy.pow(2).sum(), x, retain_graph=True)
        return energy + force.tanh()


class KeepsState(nn.Module):
    """Sets an attribute, so that it is recomputed although it is an excluded child."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.state = torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x + self.state)
        self.state = y.detach().mean(0)
        return y


class AddsOnLaterCalls(nn.Module):
    """Counts its calls, and computes another function in the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        y = self.linear(x)
        return y + x.sin() if self.count % 2 == 0 else y


class EditsSecondOutput(nn.Module):
    """Calls its child twice, and modifies the second output in place."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, x: Tensor) -> Tensor:
        return self.child(self.child(x).sin()).mul_(0.5).cos()


ON, OFF = {"activation_checkpointing": True}, {"activation_checkpointing": False}
KEEPS_NOTHING = {"activation_checkpointing": Selective("attention")}


@pytest.mark.parametrize("needs_grad", [False, True], ids=["no gradient of the input", "a gradient of the input"])
@pytest.mark.parametrize(
    ("model", "rules"),
    [
        (
            nn.Sequential(nn.Linear(8, 8), nn.Sequential(GradientOfChild(nn.Linear(8, 8)), nn.Linear(8, 8))),
            {"": ON, "1": KEEPS_NOTHING, "1.1": OFF},
        ),
        (Twice(nn.Linear(8, 8), nn.Sequential(Force("weight"))), {"": ON, "1": OFF, "1.0": ON}),
        (
            nn.Sequential(nn.Linear(8, 8), KeepsState(), nn.Sequential(nn.Linear(8, 8), Force())),
            {"": ON, "1": OFF, "1.linear": {"min_elements": 1}, "2": KEEPS_NOTHING, "2.1.linear": OFF},
        ),
        (
            nn.Sequential(nn.Sequential(EditsSecondOutput(AddsOnLaterCalls()), GradientOfChild(nn.Linear(8, 8)))),
            {"0": ON, "0.0.child": OFF},
        ),
    ],
    ids=["behind it", "around it, called twice", "recomputed after all", "recomputed before the forward ends"],
)
def test_excluded_children(model: nn.Module, rules: dict[str, Any], needs_grad: bool) -> None:
    expected = steps(model, needs_grad=needs_grad)
    found = steps(model, needs_grad=needs_grad, rules=rules)
    assert all(map(torch.equal, found, expected))


def test_the_backward_inside_is_not_repeated() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Force(), nn.Linear(8, 8))
    Force.num_calls = 0
    steps(model, amp=False, rules=RULES["all"], times=2)
    assert Force.num_calls == 2  # once in each forward, in no recomputation


class TakesGradientLate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.last = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)]), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x).tanh()
        (force,) = torch.autograd.grad(y.pow(2).sum(), y, create_graph=True)
        return y + self.last(force.sin())


def test_what_came_before_it_is_not_kept() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(TakesGradientLate())
    x = torch.randn(256, 64, requires_grad=True)
    handle = graphckpt.apply(model, {"0": {"activation_checkpointing": True}})
    model(x).sum().backward()
    with handle.measure():
        model(x).sum().backward()
    explanation = handle.explain(show=False)
    (row,) = [row for row in explanation.rows if row.block == "0"]
    tensor = 256 * 64 * 4
    # plain: the inputs of six linear layers, tanh, its gradient, sin and the last input
    assert row.bytes_before >= 9 * tensor
    assert tensor < row.bytes_after <= 5 * tensor
    assert "its forward runs a backward" in row.note


class LooksAtLeaf(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin() if x.is_leaf else x.cos()


@pytest.mark.parametrize("rule", [True, Selective(everything)], ids=["full", "selective"])
def test_the_output_of_an_excluded_child_has_history(rule: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), LooksAtLeaf(), nn.Linear(8, 8)))
    rules = {"0": {"activation_checkpointing": rule}, "0.0": {"activation_checkpointing": False}}
    assert all(map(torch.equal, steps(model, amp=False, rules=rules), steps(model, amp=False)))


def test_functional_call_of_an_embedding_that_is_renormalized() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 8, max_norm=0.5), nn.Linear(8, 8))
    index = torch.tensor([0, 3, 3, 1])

    def grads() -> list[Tensor]:
        other = {name: (p.detach() * 1.5).requires_grad_() for name, p in model.named_parameters()}
        torch.func.functional_call(model, other, (index,)).pow(2).sum().backward()
        return [p.grad for p in other.values() if p.grad is not None]

    expected = grads()
    with graphckpt.apply(model, {"": {"activation_checkpointing": True}}):
        for _ in range(2):
            assert all(map(torch.equal, grads(), expected))


def test_function_that_modifies_a_view_in_place_is_refused() -> None:
    """Its recomputation within the backward inside must get so far as to tell."""
    force, factors = Force("weight"), iter([None, 0.5])

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            factor = next(factors, 0.5)
            return graphckpt.checkpoint(lambda y: force((y if factor is None else y.mul_(factor)).tanh()), x.view(-1))

    net = nn.Sequential(nn.Linear(8, 8), Net())
    graphckpt.apply(net, {"": True})
    net(torch.randn(1, 8)).sum().backward()
    with pytest.raises(graphckpt.RecomputeError, match="modified its argument `y` in place"):
        net(torch.randn(1, 8)).sum().backward()
