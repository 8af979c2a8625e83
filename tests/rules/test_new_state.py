"""Modules, parameters and buffers that a block gets after its first call take part in its recomputation."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm

import graphckpt

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Averaging(nn.Module):
    """Scales by a running mean of its inputs, if it has one; may register it in its forward."""

    def __init__(self, *, registers=False, in_place=True):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.registers = registers
        self.in_place = in_place

    def forward(self, x):
        if self.registers and not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(8))
        if not hasattr(self, "mean"):
            return self.linear(x)
        if self.in_place:
            self.mean.mul_(0.9).add_(x.detach().mean(0))
        else:
            self.mean = self.mean * 0.9 + x.detach().mean(0)
        return self.linear(x) * self.mean.clone()


def add_norm(module):
    module.norm = nn.BatchNorm1d(8)
    module.register_forward_hook(lambda module, args, output: module.norm(output))


def swap_buffer(module):
    del module.scale
    module.register_buffer("mean", torch.zeros(8))


def with_scale():
    module = Averaging()
    module.register_buffer("scale", torch.ones(8))
    return module


CHANGES = {
    "a parametrization": (lambda: nn.Linear(8, 8), parametrizations.spectral_norm),
    "a hook's buffers": (lambda: nn.Linear(8, 8), spectral_norm),
    "a mask": (lambda: nn.Linear(8, 8), lambda module: prune.l1_unstructured(module, "weight", 0.5)),
    "a child": (nn.Tanh, add_norm),
    "a buffer": (Averaging, lambda module: module.register_buffer("mean", torch.zeros(8))),
    "a buffer for another": (with_scale, swap_buffer),
    "a buffer in forward": (Averaging, lambda module: setattr(module, "registers", True)),
    "a buffer in forward, replaced": (lambda: Averaging(in_place=False), lambda m: setattr(m, "registers", True)),
    "a buffer in the first forward": (lambda: Averaging(registers=True), lambda module: None),
}


def step(model):
    model.zero_grad()
    model(X).square().sum().backward()
    return [*(p.grad.clone() for p in model.parameters()), *(b.clone() for b in model.buffers())]


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.*norm` is deprecated")
@pytest.mark.parametrize("rule", [True, {"rule": "selective", "save": "matmul"}], ids=["full", "selective"])
@pytest.mark.parametrize("num_before", [0, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_new_state_takes_part_in_the_recomputation(change, num_before, rule):
    build, alter = CHANGES[change]
    found = []
    for policies in ({}, {"0": {"activation_checkpointing": rule}}):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(build(), nn.Tanh()), nn.Linear(8, 1))
        with graphckpt.apply(model, policies):
            seen = [step(model) for _ in range(num_before)]
            alter(model[0][0])
            found.append(seen + [step(model) for _ in range(3)])
    for plain, recomputed in zip(*found, strict=True):
        assert all(map(torch.equal, plain, recomputed))


def test_layer_that_got_the_memory_of_the_one_it_replaces():
    found = []
    for policies in ({}, {"0": True}):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 1))
        with graphckpt.apply(model, policies):
            seen = [step(model)]
            for layer in (nn.Sigmoid, nn.Tanh, nn.Sigmoid, nn.Tanh, nn.Sigmoid):
                model[0][1] = nn.Identity()
                model[0][1] = layer()
                seen.append(step(model))
        found.append(seen)
    for plain, recomputed in zip(*found, strict=True):
        assert all(map(torch.equal, plain, recomputed))


@pytest.mark.parametrize("num_segments", [2, "log"])
def test_layers_that_a_segmented_chain_got_later(num_segments):
    found = []
    for policies in ({}, {"": graphckpt.Segments(num_segments)}):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        with graphckpt.apply(model, policies):
            seen = [step(model)]
            model[0] = nn.BatchNorm1d(8)
            seen += [step(model), step(model)]
        found.append(seen)
    for plain, recomputed in zip(*found, strict=True):
        assert all(map(torch.equal, plain, recomputed))


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).T


@pytest.mark.parametrize("rule", ["full", "selective"])
def test_weights_that_parametrize_caches_are_those_of_the_forward(rule):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(2)))
    for block in model:
        parametrize.register_parametrization(block[0], "weight", Symmetric())

    def gradients():
        model.zero_grad()
        with parametrize.cached():
            model(X).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    plain = gradients()
    with graphckpt.apply(model, {"*": rule}):
        for _ in range(2):
            assert all(map(torch.equal, gradients(), plain))
