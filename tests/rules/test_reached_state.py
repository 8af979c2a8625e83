"""What an attribute of a module reaches changes once: objects, containers in containers, generators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.modules import as_module
from torch import Tensor, nn

import graphckpt
from graphckpt import Segments

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Statistics:
    """An object with attributes, one of which is a container."""

    def __init__(self) -> None:
        self.count = 0
        self.rows: list[int] = []


class Layer(nn.Module):
    """Scales what it returns by a state that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def scale(self) -> Any:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.down((self.up(x) * self.scale()).tanh()) * self.scale()


class WithObject(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.statistics = Statistics()

    def scale(self) -> int:
        self.statistics.count += 1
        self.statistics.rows.append(1)
        return self.statistics.count + len(self.statistics.rows)


class WithNested(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.counts = {"calls": [{"number": 0}]}

    def scale(self) -> int:
        self.counts["calls"][0]["number"] += 1
        return self.counts["calls"][0]["number"]


class WithGrowing(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, dict[int, int]] = {"calls": {0: 1}}

    def scale(self) -> int:
        calls = self.seen["calls"]
        calls[len(calls)] = len(calls)
        return len(calls)


class WithGenerator(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(7)

    def scale(self) -> Tensor:
        return torch.rand(8, generator=self.generator)


class WithHeldGenerator(WithGenerator):
    def __init__(self) -> None:
        super().__init__()
        self.held = [self.generator]
        del self.generator

    def scale(self) -> Tensor:
        return torch.rand(8, generator=self.held[0])


class Sharing(nn.Sequential):
    """Layers that draw from one generator."""

    def __init__(self) -> None:
        super().__init__(*[WithGenerator() for _ in range(2)])
        for layer in self:
            layer.generator = self[0].generator


KINDS = {
    "object": WithObject,
    "nested": WithNested,
    "growing": WithGrowing,
    "generator": WithGenerator,
    "held generator": WithHeldGenerator,
    "shared generator": Sharing,
}
POLICIES: dict[str, dict[str, Any]] = {
    "full": {"[12]": True},
    "selective": {"[12]": "selective"},
    "joined": {"1": True, "2": "joined"},
    "nested": {"": True, "2": False},
    "segments": {"": Segments(2)},
    "disk": {"[12]": {"activation_checkpointing": True, "offload": "disk", "min_elements": 1}},
}


def run(kind: type[nn.Module], policies: dict[str, Any], micro_batches: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), kind(), kind(), nn.Linear(8, 1))
    found = []
    with graphckpt.apply(model, policies):
        for step in range(4):
            model.zero_grad()
            if step == 2:
                for layer in model.modules():
                    if isinstance(layer, WithObject):
                        layer.statistics = Statistics()  # the object that was there at first is not looked at any more
            losses = [model(X + step).square().sum() for _ in range(micro_batches)]
            for loss in reversed(losses):
                loss.backward()
            found += [*(loss.detach() for loss in losses), *(p.grad for p in model.parameters() if p.grad is not None)]
    return found


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_attributes_reach_changes_once(kind: str, policy: str, micro_batches: int) -> None:
    plain = run(KINDS[kind], {}, micro_batches)
    recomputed = run(KINDS[kind], POLICIES[policy], micro_batches)
    assert len(plain) == len(recomputed) > 40
    assert all(map(torch.equal, plain, recomputed))


@as_module(lambda: {"linear": nn.Linear(8, 8)})
def Drawing(self, x: Tensor, generator: torch.Generator) -> Tensor:
    """Draws from a generator that it is called with."""
    return (self.linear(x) * torch.rand(8, generator=generator)).tanh()


@pytest.mark.parametrize("rule", [True, "selective"])
def test_generators_among_the_arguments_are_rewound(rule: Any) -> None:
    found = []
    for policies in ({}, {"": rule}):
        torch.manual_seed(0)
        model, generator = Drawing(), torch.Generator().manual_seed(1)
        with graphckpt.apply(model, policies):
            for _ in range(2):
                model(X, generator).sum().backward()
        found.append([*(p.grad for p in model.parameters()), generator.get_state()])
    assert all(map(torch.equal, *found))
