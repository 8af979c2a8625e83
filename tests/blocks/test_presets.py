"""Policies that people know: which layers they recompute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.layer_stacks import D, ResidualLayer, SequentialModel
from helpers.modules import as_module
from torch import nn

import graphckpt
from graphckpt.blocks import presets
from graphckpt.blocks.apply import Policies
from graphckpt.blocks.select import layers as layer_names
from graphckpt.errors import ConfigError
from graphckpt.train.policies import block_policies
from graphckpt.train.settings import ActivationCheckpointConfig


@as_module(lambda num_layers: {"layers": nn.ModuleList(ResidualLayer() for _ in range(num_layers))})
def Looped(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Layers in a list."""
    for layer in self.layers:
        x = layer(x)
    return x


def runs(model: nn.Module, policies: Policies, x: torch.Tensor) -> list[int]:
    """Returns how often each layer begins to run in a step: once, or again for backward."""
    layers = {name: model.get_submodule(name) for name in layer_names(model)}
    counts = dict.fromkeys(layers, 0)

    def counting(name: str) -> Callable[..., None]:
        def count(*_: object) -> None:
            counts[name] += 1

        return count

    hooks = [layer.up.register_forward_pre_hook(counting(name)) for name, layer in layers.items()]
    with graphckpt.apply(model, policies):
        model(x).square().mean().backward()
    for hook in hooks:
        hook.remove()
    return list(counts.values())


X = torch.ones(8, D)


@pytest.mark.parametrize(
    ("policies", "expected"),
    [
        (lambda m: presets.every_k(m, 1), [2] * 9),
        (lambda m: presets.every_k(m, 4), [2, 1, 1, 1, 2, 1, 1, 1, 2]),
        (lambda m: presets.first_k(m, 2), [2, 2, 1, 1, 1, 1, 1, 1, 1]),
        (lambda m: presets.uniform(m, 1), [2] * 9),
        (lambda m: presets.uniform(m, 4), [2] * 9),
        (lambda m: presets.uniform(m, 9), [2] * 9),
        (presets.sqrt, [2, 2, 2, 2, 2, 2, 1, 1, 1]),
    ],
)
def test_presets_say_which_layers_run_again(
    policies: Callable[[nn.Module], dict[str, Any]], expected: list[int]
) -> None:
    model = SequentialModel(9)
    found = policies(model)
    assert runs(model, found, X) == expected
    with_config = ActivationCheckpointConfig(enabled=True, rule=None, policies=found)
    assert set(block_policies(model, with_config)) == set(found), "a config takes them too"


def test_presets_on_layers_that_a_loop_calls() -> None:
    model = Looped(num_layers=5)
    assert presets.every_k(model, 2, "selective") == dict.fromkeys(["layers.0", "layers.2", "layers.4"], "selective")
    assert runs(model, presets.uniform(model, 1), X) == [2] * 5
    ran = []
    for number, layer in enumerate(model.layers):
        layer.up.register_forward_pre_hook(lambda *_, number=number: ran.append(number))
    for policies, again in ((presets.uniform(model, 2), [4, 2, 3, 0, 1]), (presets.sqrt(model), [0, 1])):
        with graphckpt.apply(model, policies):
            for _ in range(2):
                ran.clear()
                model(X).square().mean().backward()
        assert ran == [0, 1, 2, 3, 4, *again]


def test_presets_that_cannot_act_say_so() -> None:
    model = SequentialModel(3)
    for wrong in (0, -1, True, 1.5):
        for preset in (presets.every_k, presets.first_k, presets.uniform):
            with pytest.raises(ConfigError, match=r": .: expected a positive int, got .* · fix: use a whole number"):
                preset(model, wrong)
    with pytest.raises(ConfigError, match="first_k: expected k up to 3, got 4 · fix: use 1 to 3"):
        presets.first_k(model, 4)
    with pytest.raises(ConfigError, match=r"sqrt: 'body\.0': expected at least 4 layers, got 3"):
        presets.sqrt(model)
    with pytest.raises(ConfigError, match="Linear: no list of layers was found"):
        presets.every_k(nn.Linear(2, 2), 1)
