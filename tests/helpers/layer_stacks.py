"""Small residual layers, with dropout and without, and a stack of them, which tests of policies and plans share."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from helpers.modules import as_module

D = 16  # width


@as_module(lambda: {"up": nn.Linear(D, 4 * D), "down": nn.Linear(4 * D, D), "drop": nn.Dropout(0.1)})
def Layer(self, x: Tensor) -> Tensor:
    return x + self.drop(self.down(F.gelu(self.up(x))))


@as_module(lambda: {"up": nn.Linear(D, 4 * D), "down": nn.Linear(4 * D, D)})
def ReLULayer(self, x: Tensor) -> Tensor:
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
