"""Small residual layers, with dropout and without, and models of them, which tests of policies and plans share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.modules import as_module

D = 16  # width


@as_module(lambda: {"up": nn.Linear(D, 4 * D), "down": nn.Linear(4 * D, D), "drop": nn.Dropout(0.1)})
def Layer(self: Any, x: Tensor) -> Tensor:
    return x + self.drop(self.down(F.gelu(self.up(x))))


@as_module(lambda: {"up": nn.Linear(D, 4 * D), "down": nn.Linear(4 * D, D)})
def ReLULayer(self: Any, x: Tensor) -> Tensor:
    """Without dropout: its steps are equal whatever ran before."""
    return x + self.down(F.relu(self.up(x)))


class Piled(nn.Module):
    """Layers in a sequence."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, 4)
        self.body = nn.Sequential(*(Layer() for _ in range(num_layers)))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(self.first(x)))


class Listed(nn.Module):
    """Layers in a list, a norm, a head, and nothing that Transformers marks."""

    def __init__(self, num_layers: int = 4, num_outputs: int = 8, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.embed = nn.Linear(D, D)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.norm = norm(D)
        self.head = nn.Linear(D, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def mlp_step(num_layers: int = 6, rows: int = 256, inner: int = 4 * D) -> tuple[nn.Module, Callable[[], None]]:
    """Returns a sequence of small layers, and a step of it."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(D, inner), nn.GELU(), nn.Linear(inner, D)) for _ in range(num_layers))
    )
    x = torch.randn(rows, D)

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    return model, step
