"""Every rule on every architecture: the step's loss, gradients, buffers and random stream keep every bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.architectures import ARCHITECTURES, Architecture
from helpers.hard_modules import rng_state
from helpers.thinning import slow_unless
from torch import nn

import graphckpt
from graphckpt import Tiles

POLICIES: dict[str, dict[str, Any]] = {
    "full": {"layers": True},
    "selective-matmul": {"layers": {"rule": "selective", "save": "matmul"}},
    "selective-attention": {"layers": {"rule": "selective", "save": "attention"}},
    "selective-both": {"layers": "selective"},
    "holes": {"layers": True, "holes": False},
    "nested": {"": True, "layers": {"rule": "selective", "save": "matmul"}},
    "one-tile": {"layers": Tiles(1)},
    "mixed": {"layers": True, "every other layer": False},
}


FAMILIES = {
    *("gpt2", "llama", "gemma2", "mixtral", "mamba", "bert", "deberta_v2", "t5", "bart", "swin", "resnet", "wav2vec2"),
}
"""Architectures that differ most: `make test` runs all policies below on them, and one policy on each of the others."""
ON_FAMILIES = {"full", "selective-both", "holes", "nested"}
if torch.cuda.is_available():
    FAMILIES, ON_FAMILIES = {"gpt2", "bert", "llama", "t5", "qwen2_moe", "vit"}, {"full", "selective-both"}


def policy_rules(model: nn.Module, architecture: Architecture, policy: dict[str, Any]) -> dict[str, Any]:
    """Replaces the words of a policy by the names of the modules that they mean in this model."""
    layers = list(architecture.layer_modules(model))
    rules: dict[str, Any] = {}
    for word, value in policy.items():
        names = {
            "layers": layers,
            "": [""],
            "every other layer": layers[1::2],
            "holes": [
                f"{layer}.{name}"
                for layer in layers
                for name, child in list(model.get_submodule(layer).named_children())[::2]
                if not isinstance(child, (nn.ModuleList, nn.ModuleDict))
            ],
        }[word]
        rules |= dict.fromkeys(names, value)
    return rules


def step(architecture: Architecture, model: nn.Module, device: str) -> dict[str, torch.Tensor]:
    """Runs two forwards and backwards and returns all that the contract speaks of."""
    torch.manual_seed(3)
    seen = {}
    inputs = {name: value.to(device) for name, value in architecture.inputs().items()}
    for number in range(2):
        loss = architecture.loss(model(**inputs))
        loss.backward()
        seen[f"loss {number}"] = loss.detach()
    seen |= {f"grad {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    seen |= {f"buffer {name}": b.clone() for name, b in model.named_buffers()}
    seen["RNG state"] = rng_state(device)
    return seen


@pytest.fixture(scope="module")
def plain_steps() -> dict[str, dict[str, torch.Tensor]]:
    return {}


def cases() -> Iterator[pytest.ParameterSet]:
    """Every policy on the families, three on the others; one kind of kept ops on some, as "nested" has them."""
    for number, architecture in enumerate(ARCHITECTURES):
        rotating = [policy for policy in POLICIES if not policy.startswith("selective-")][number % 5]
        for policy in (
            POLICIES if architecture.name in FAMILIES else dict.fromkeys((rotating, "full", "selective-both"))
        ):
            is_fast = policy in ON_FAMILIES if architecture.name in FAMILIES else policy == rotating
            is_fast &= architecture.name in FAMILIES or not torch.cuda.is_available()
            if number % 4 == 0 or policy not in {"selective-matmul", "selective-attention"}:
                yield pytest.param(architecture, policy, id=f"{architecture.name}-{policy}", marks=slow_unless(is_fast))


@pytest.mark.parametrize(("architecture", "policy"), list(cases()))
@pytest.mark.one_schedule("a rule uses one stream")
def test_same_bits_as_the_plain_step(
    architecture: Architecture, policy: str, plain_steps: dict[str, dict[str, torch.Tensor]], device: str
) -> None:
    if architecture.name not in plain_steps:
        plain_steps[architecture.name] = step(architecture, architecture.build().to(device), device)
    plain = plain_steps[architecture.name]
    model = architecture.build().to(device)

    with graphckpt.apply(model, policy_rules(model, architecture, POLICIES[policy])) as handle:
        ours = step(architecture, model, device)
        explanation = handle.explain(show=False)

    assert ours.keys() == plain.keys()
    assert [name for name in plain if not torch.equal(ours[name], plain[name])] == []
    assert sum(row.reruns for row in explanation.rows) > 0, "nothing ran again: the policy was not active"
