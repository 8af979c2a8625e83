"""Modules, parameters and buffers that a block gets after its first call take part in its recomputation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuzz.bench import Bench
from fuzz.shapes import plain
from helpers.contract import assert_same_steps
from helpers.hard_modules import D
from helpers.layer_stacks import mlp_layers, stack_of
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm

import graphckpt
from graphckpt import Segments
from graphckpt.blocks.apply import Policies

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Averaging(nn.Module):
    """Scales by a running mean of its inputs, if it has one; may register it in its forward."""

    def __init__(self, *, registers: bool = False, in_place: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.registers = registers
        self.in_place = in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.registers and not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(D))
        if not hasattr(self, "mean"):
            return self.linear(x)
        if self.in_place:
            self.mean.mul_(0.9).add_(x.detach().mean(0))
        else:
            self.mean = self.mean * 0.9 + x.detach().mean(0)
        return self.linear(x) * self.mean.clone()


def add_norm(module: nn.Module) -> None:
    module.norm = nn.BatchNorm1d(D)
    module.register_forward_hook(lambda module, args, output: module.norm(output))


def swap_buffer(module: nn.Module) -> None:
    del module.scale
    module.register_buffer("mean", torch.zeros(D))


def with_scale() -> Averaging:
    module = Averaging()
    module.register_buffer("scale", torch.ones(D))
    return module


CHANGES = {
    "a parametrization": (lambda: nn.Linear(D, D), parametrizations.spectral_norm),
    "a hook's buffers": (lambda: nn.Linear(D, D), spectral_norm),
    "a mask": (lambda: nn.Linear(D, D), lambda module: prune.l1_unstructured(module, "weight", 0.5)),
    "a child": (nn.Tanh, add_norm),
    "a buffer": (Averaging, lambda module: module.register_buffer("mean", torch.zeros(D))),
    "a buffer for another": (with_scale, swap_buffer),
    "a buffer in forward": (Averaging, lambda module: setattr(module, "registers", True)),
    "a buffer in forward, replaced": (lambda: Averaging(in_place=False), lambda m: setattr(m, "registers", True)),
    "a buffer in the first forward": (lambda: Averaging(registers=True), lambda module: None),
}


def model_of(build: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(nn.Sequential(build(), nn.Tanh()), nn.Linear(D, 1))


def altered(alter: Callable[[nn.Module], object]) -> Callable[[Bench], None]:
    """Returns a step of a model that is altered before it."""

    def step(bench: Bench) -> None:
        alter(bench.model)
        plain(bench)

    return step


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.*norm` is deprecated")
@pytest.mark.parametrize("rule", [True, {"rule": "selective", "save": "matmul"}], ids=["full", "selective"])
@pytest.mark.parametrize("num_before", [0, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_new_state_takes_part_in_the_recomputation(change: str, num_before: int, rule: bool | dict[str, Any]) -> None:
    build, alter = CHANGES[change]
    steps = ["plain"] * num_before + [altered(lambda model: alter(model[0][0])), "plain", "plain"]
    assert_same_steps(lambda: model_of(build), {"0": {"activation_checkpointing": rule}}, steps)


def test_layer_that_got_the_memory_of_the_one_it_replaces() -> None:
    def put(layer: type[nn.Module]) -> Callable[[Bench], None]:
        def alter(model: nn.Module) -> None:
            model[0][1] = nn.Identity()
            model[0][1] = layer()

        return altered(alter)

    layers = (nn.Sigmoid, nn.Tanh, nn.Sigmoid, nn.Tanh, nn.Sigmoid)
    assert_same_steps(lambda: model_of(lambda: nn.Linear(D, D)), {"0": True}, ["plain", *map(put, layers)])


@pytest.mark.parametrize("num_segments", [2, "log"])
def test_layers_that_a_segmented_chain_got_later(num_segments: int | str) -> None:
    steps = ["plain", altered(lambda model: model.__setitem__(0, nn.BatchNorm1d(D))), "plain"]
    assert_same_steps(lambda: stack_of(lambda: nn.Linear(D, D), 4), {"": Segments(num_segments)}, steps)


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).T


@pytest.mark.parametrize("rule", ["full", "selective"])
def test_weights_that_parametrize_caches_are_those_of_the_forward(rule: str) -> None:
    torch.manual_seed(0)
    model = mlp_layers(2, 8, 8)
    for block in model:
        parametrize.register_parametrization(block[0], "weight", Symmetric())

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        with parametrize.cached():
            model(X).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    plain = gradients()
    with graphckpt.apply(model, {"*": rule}):
        for _ in range(2):
            assert all(map(torch.equal, gradients(), plain))


@pytest.mark.parametrize("rule", [True, "selective"])
def test_a_recurrent_layer_may_get_other_parameters_in_a_later_call(rule: bool | str) -> None:
    """It then makes its lists of weights anew, and once more after the call: attributes of a module of PyTorch's."""

    def gradients(rules: Policies) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.GRU(4, 4)), torch.randn(3, 2, 4)
        others = {name: (p.detach() + 0.5).requires_grad_() for name, p in model.named_parameters()}
        handle = graphckpt.apply(model, rules)
        for weights in (dict(model.named_parameters()), others, others):
            torch.func.functional_call(model, weights, x)[0].sin().sum().backward()
        handle.remove()
        return [p.grad for p in (*model.parameters(), *others.values())]

    assert all(map(torch.equal, gradients({"0": rule}), gradients({})))


class Sums(nn.Module):
    """Adds up in an attribute that is ``None`` at first, with or without a graph."""

    def __init__(self, *, is_detached: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.is_detached = is_detached
        self.total: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).tanh()
        mean = y.detach().mean() if self.is_detached else y.mean()
        if self.total is None:
            self.total = mean.clone()
        else:
            self.total += mean
        return y * self.total.item()


@pytest.mark.parametrize("policy", [True, "selective", False])
@pytest.mark.parametrize("is_detached", [True, False])
def test_an_attribute_that_begins_as_none_and_is_added_to_in_place(policy: Any, is_detached: bool) -> None:
    steps = []
    for policies in ({}, {"": True, "0": policy} if policy is False else {"0": policy}):
        torch.manual_seed(0)
        model = nn.Sequential(Sums(is_detached=is_detached), nn.Linear(D, D))
        with graphckpt.apply(model, policies):
            for step in range(3):
                model[0].total = None
                torch.manual_seed(step)
                losses = [model(torch.randn(4, D)).sum() for _ in range(3)]
                (torch.stack(losses).sum() + model[0].total).backward()
        steps.append([*(p.grad for p in model.parameters()), model[0].total])
    assert all(map(torch.equal, *steps))


def lazy_layers() -> nn.Module:
    layers = [nn.Sequential(nn.LazyLinear(D), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(D)) for _ in range(2)]
    return nn.Sequential(*layers)


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize(
    "policies",
    [
        {"*": True},
        {"*": "selective"},
        {"": Segments(2)},
        {"*": True, "*.0": False},
        {"0": True, "1": "joined"},
        {"*": {"activation_checkpointing": True, "offload": "disk", "min_elements": 1}},
    ],
    ids=["full", "selective", "segments", "excluded", "joined", "disk"],
)
def test_lazy_modules_are_initialized_in_the_first_call(policies: Policies) -> None:
    steps = []
    for each in ({}, policies):
        torch.manual_seed(0)
        model = lazy_layers()
        with graphckpt.apply(model, each):
            for _ in range(3):
                model.zero_grad()
                model(X).square().sum().backward()
        steps.append([*(p.grad for p in model.parameters()), *model.buffers()])
    assert all(map(torch.equal, *steps))


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_modules_in_a_checkpointed_function() -> None:
    steps = []
    for run in (lambda layer, x: layer(x), graphckpt.checkpoint):
        torch.manual_seed(0)
        model = lazy_layers()
        for _ in range(2):
            x = X
            for layer in model:
                x = run(layer, x)
            x.square().sum().backward()
        steps.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *steps))
