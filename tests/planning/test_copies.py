"""Copies of the model that the planned step makes, as of a teacher or an average, have no part in its measurement."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.layer_stacks import residual_layers
from torch import nn

import graphckpt

# Legend: N rows, D width
N, D = 64, 16

pytestmark = [
    pytest.mark.filterwarnings("ignore:offload to 'disk' saves"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


def student() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(residual_layers(4, D, dropout=None), nn.Linear(D, 3))


def saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    twin: nn.Module = torch.load(file, weights_only=False)
    return twin


def layer_by_layer(module: nn.Module) -> nn.Module:
    return nn.Sequential(*(copy.deepcopy(layer) for layer in module))  # type: ignore[arg-type]


def step_of(model: nn.Sequential, copied: Callable[[nn.Module], nn.Module], twins: list[nn.Module]) -> None:
    x_ND = torch.randn(N, D, generator=torch.Generator().manual_seed(0))
    teacher = copied(model[0]).requires_grad_(False)
    features_ND = model[0](x_ND)
    other = copied(model[0])  # behind the forward, as averages are
    assert torch.equal(other(x_ND), features_ND)
    ((features_ND - teacher(0.9 * x_ND)).square().mean() + model[1](features_ND).square().mean()).backward()
    twins += [teacher, other]


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "disk": {"offload": "disk"},
    "compiled": {"compile": {"backend": "aot_eager"}, "candidates": ["full"]},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("copied", [copy.deepcopy, saved, layer_by_layer])
def test_copies_in_a_planned_step(copied: Callable[[nn.Module], nn.Module], options: dict[str, Any]) -> None:
    plain, twins = student(), []  # type: ignore[var-annotated]
    step_of(plain, copied, twins)
    model = student()
    twins.clear()
    plan = graphckpt.plan(model, lambda: step_of(model, copied, twins), memory_budget="min", progress=False, **options)
    for twin in [model, *twins]:
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        graphckpt.remove(twin)
    x_ND = torch.ones(N, D)
    for twin in twins:  # the weights of none were of another module's
        assert torch.equal(twin(x_ND), plain[0](x_ND))
    with plan.apply():
        model.zero_grad()
        step_of(model, copied, twins)
    if "compile" not in options:
        for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, expected.grad)  # type: ignore[arg-type]


def test_a_copy_that_is_made_while_layers_are_compiled_runs_its_own_weights() -> None:
    model = student()
    twins: list[nn.Module] = []

    def step() -> None:
        twins.append(copy.deepcopy(model[0]))
        model(torch.ones(N, D)).square().mean().backward()

    graphckpt.plan(model, step, memory_budget="min", progress=False, **OPTIONS["compiled"])
    for twin in twins:
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        assert torch.equal(twin(torch.ones(N, D)), torch.ones(N, D))
