"""Hooks on gradients that a block's forward registers act as often as in the plain step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.modules import as_module
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook

import graphckpt

D = 8

POLICIES: dict[str, dict[str, Any]] = {
    "full": {"[12]": True},
    "selective": {"[12]": "selective"},
    "tiles": {"[12]": {"tiles": 1}},
    "joined": {"1": True, "2": "joined"},
    "disk": {"[12]": {"activation_checkpointing": True, "offload": "disk", "min_elements": 1}},
    "excluded child": {"[12]": True, "[12].up": False},
    "values": {"[12]": {"activation_checkpointing": True, "determinism_check": "values"}},
    "to the end": {"[12]": {"activation_checkpointing": True, "early_stop": False}},
}

calls: list[str] = []


def halve(grad: Tensor) -> Tensor:
    return grad * 0.5


def halve_all(grads: tuple[Tensor | None, ...], *_: Any) -> tuple[Tensor | None, ...]:
    return tuple(None if grad is None else grad * 0.5 for grad in grads)


def halve_grad(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def scales(block: Any, x: Tensor, other: Tensor) -> None:
    x.register_hook(halve)


def reverses(block: Any, x: Tensor, other: Tensor) -> None:
    x.register_hook(torch.neg)


def reverses_another(block: Any, x: Tensor, other: Tensor) -> None:
    other.register_hook(torch.neg)


def scales_before_the_node(block: Any, x: Tensor, other: Tensor) -> None:
    if x.grad_fn is not None:
        x.grad_fn.register_prehook(halve_all)


def scales_after_the_node(block: Any, x: Tensor, other: Tensor) -> None:
    if x.grad_fn is not None:
        x.grad_fn.register_hook(halve_all)


def counts_several(block: Any, x: Tensor, other: Tensor) -> None:
    register_multi_grad_hook((x, block.up.weight), lambda grads: calls.append("all"))
    register_multi_grad_hook((x, block.up.weight), lambda grad: calls.append("any"), mode="any")


def scales_parameter(block: Any, x: Tensor, other: Tensor) -> None:
    block.up.weight.register_hook(halve)


def scales_parameter_once(block: Any, x: Tensor, other: Tensor) -> None:
    if block.handle is not None:
        block.handle.remove()
    block.handle = block.up.weight.register_hook(halve)


def scales_parameter_for_now(block: Any, x: Tensor, other: Tensor) -> None:
    handle = block.up.weight.register_hook(halve)
    block.up(x)
    handle.remove()


def scales_accumulated(block: Any, x: Tensor, other: Tensor) -> None:
    block.up.weight.register_post_accumulate_grad_hook(halve_grad)


def scales_before_accumulation(block: Any, x: Tensor, other: Tensor) -> None:
    get_gradient_edge(block.up.weight).node.register_prehook(halve_all)


def counts_after_accumulation(block: Any, x: Tensor, other: Tensor) -> None:
    get_gradient_edge(block.up.weight).node.register_hook(lambda *_: calls.append("accumulated"))


def retains(block: Any, x: Tensor, other: Tensor) -> None:
    other.retain_grad()


def scales_within(block: Any, x: Tensor, other: Tensor) -> None:
    block.within = halve  # of the output of `up`, which may be an excluded child


def counts_in_modules(block: Any, x: Tensor, other: Tensor) -> None:
    if not block.is_set_up:
        block.is_set_up = True
        block.up.register_full_backward_hook(lambda *_: calls.append("module"))


REGISTER = [
    scales, reverses, reverses_another, scales_before_the_node, scales_after_the_node, counts_several,
    scales_parameter, scales_parameter_once, scales_parameter_for_now, scales_accumulated, scales_before_accumulation,
    counts_after_accumulation, retains, scales_within, counts_in_modules,
]  # fmt: skip


@as_module(
    lambda register: {
        "up": nn.Linear(D, 2 * D), "down": nn.Linear(2 * D, D), "register": register, "handle": None, "within": None,
        "is_set_up": False,
    }
)  # fmt: skip
def Registers(self: Any, x: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    self.register(self, x, inputs["other"])
    h = self.up(x)
    if self.within is not None:
        h.register_hook(self.within)
    return x + self.down(torch.tanh(h)) + inputs["other"]


def gradients(register: Callable[..., None], policies: dict[str, Any], *, wrap: Callable[[Any], Any] = dict) -> Any:
    calls.clear()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), Registers(register), Registers(register))
    weight = nn.Parameter(torch.ones(4, D))
    grads = []
    with graphckpt.apply(model, policies):
        for step in range(3):
            x = model[0](torch.ones(4, D))
            other = weight * 2
            for block in list(model)[1:]:
                x = block(x, wrap({"other": other}))
            loss = x.square().mean()
            loss.backward(retain_graph=step == 1)
            if step == 1:
                loss.backward()
            grads += [p.grad.clone() for p in (*model.parameters(), weight) if p.grad is not None]
            grads += [other.grad] if other.retains_grad and other.grad is not None else []
    return grads, sorted(calls)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("register", REGISTER)
def test_a_hook_acts_once(register: Callable[..., None], policy: str) -> None:
    plain, plain_calls = gradients(register, {})
    ours, our_calls = gradients(register, POLICIES[policy])
    assert len(ours) == len(plain)
    assert all(map(torch.equal, ours, plain))
    assert our_calls == plain_calls


class Box:
    def __init__(self, inputs: dict[str, Tensor]) -> None:
        self.inputs = inputs

    def __getitem__(self, key: str) -> Tensor:
        return self.inputs[key]


@pytest.mark.parametrize("policy", ["full", "selective", "disk"])
def test_a_hook_on_a_tensor_of_an_object_among_the_arguments(policy: str) -> None:
    plain, _ = gradients(reverses_another, {}, wrap=Box)
    ours, _ = gradients(reverses_another, POLICIES[policy], wrap=Box)
    assert all(map(torch.equal, ours, plain))


def test_hooks_from_before_the_call_stay() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), Registers(scales_parameter), Registers(scales))
    model[1].up.weight.register_hook(lambda grad: calls.append("before"))
    calls.clear()
    with graphckpt.apply(model, POLICIES["full"]):
        x = model[0](torch.ones(4, D))
        x.register_hook(lambda grad: calls.append("argument"))
        inputs = {"other": torch.ones(4, D, requires_grad=True)}
        model[2](model[1](x, inputs), inputs).sum().backward()
    assert sorted(calls) == ["argument", "before"]
    assert len(model[1].up.weight._backward_hooks) == 2


def test_an_attribute_that_a_call_has_set_first_is_that_of_the_forward_after_backward() -> None:
    @as_module(lambda: {"linear": nn.Linear(D, D), "mark": None})
    def Marks(self: Any, x: Tensor) -> Tensor:
        self.mark = object()
        return torch.tanh(self.linear(x))

    model = nn.Sequential(Marks(), nn.Linear(D, D))
    with graphckpt.apply(model, {"0": True}):
        output = model(torch.ones(4, D))
        mark = model[0].mark
        output.sum().backward()
    assert model[0].mark is mark
