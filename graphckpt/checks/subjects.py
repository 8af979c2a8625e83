"""Small models of different kinds, with dropout and statistics, and the policies under which each is checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from graphckpt.rules import Segments

# Enough for a joined run, an excluded child and layers beside both.
NUM_LAYERS = 4
_B, _T, _D, _HEADS, _VOCABULARY = 4, 64, 64, 4, 256

_ALL = "layers.*"
RULES: Mapping[str, Mapping[str, Any]] = {
    "keep": {_ALL: "keep"},
    "full": {_ALL: True},
    "selective": {_ALL: "selective"},
    "selective(matmul)": {_ALL: {"activation_checkpointing": {"rule": "selective", "save": "matmul"}}},
    "segments(sqrt)": {"layers": Segments("sqrt")},
    "joined": {_ALL: True, "layers.1": "joined", "layers.2": "joined"},
    "mixed": {"layers.0": True, "layers.1": "selective", "layers.2": True, "layers.2.1": "keep"},
}
"""By name: policies of a model whose layers are in ``layers``. ``mixed`` has an excluded child."""

STORES: Mapping[str, Mapping[str, Any]] = {
    "device": {},
    "contiguous": {"contiguous": True},
    "host": {"offload": True, "min_elements": 1},
    "disk": {"offload": "disk", "min_elements": 1},
}
"""By name: fields of each block that say where its saved tensors are."""


@final
@dataclass(frozen=True)
class Training:
    """A model with its optimizer and its batch, on a device."""

    model: nn.Module
    batch: Tensor
    optimizer: torch.optim.Optimizer
    autocasts: bool

    def forward_backward(self) -> Tensor:
        autocast = torch.autocast(self.batch.device.type, dtype=torch.bfloat16) if self.autocasts else nullcontext()
        with autocast:
            loss: Tensor = self.model(self.batch).float().square().mean()
        loss.backward()
        return loss

    def step(self) -> Tensor:
        loss = self.forward_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


@final
@dataclass(frozen=True)
class Subject:
    """A model to check."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Tensor]
    autocasts: bool = False
    tiles: str = ""
    """A module whose samples do not depend on each other, so that it can be computed in slices."""

    def train(self, device: torch.device, **settings: Any) -> Training:
        """Builds it, always with the same weights, batch and RNG state; ``settings`` are those of AdamW."""
        # On the CPU, so that all devices get the same weights; the second seed is that of what dropout draws.
        torch.manual_seed(0)
        model = self.build().to(device).train()
        batch = self.batch().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **settings)
        torch.manual_seed(1)
        return Training(model, batch, optimizer, self.autocasts)


class _Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return x + y


class _Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (_HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


def _mlp() -> nn.Module:
    layers = [
        _Residual(nn.Linear(_D, 4 * _D), nn.BatchNorm1d(4 * _D), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4 * _D, _D))
        for _ in range(NUM_LAYERS)
    ]
    return _with_layers(nn.Linear(16, _D), layers, nn.Linear(_D, 8))


def _transformer(width: int = _D) -> nn.Module:
    layers = [
        nn.Sequential(
            _Residual(nn.LayerNorm(width), _Attention(width)),
            _Residual(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Linear(4 * width, width),
                nn.Dropout(0.1),
            ),
        )
        for _ in range(NUM_LAYERS)
    ]
    return _with_layers(nn.Embedding(_VOCABULARY, width), layers, nn.Linear(width, _VOCABULARY))


def _convolutional() -> nn.Module:
    # Statistics that move, an op in place, and dropout of whole channels: each is recomputed in a way of its own.
    layers = [
        _Residual(
            nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Dropout2d(0.1),
            nn.Conv2d(16, 16, 3, padding=1),
        )
        for _ in range(NUM_LAYERS)
    ]  # fmt: skip
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 8))
    return _with_layers(nn.Conv2d(3, 16, 3, padding=1), layers, head)


def _with_layers(stem: nn.Module, layers: list[Any], head: nn.Module) -> nn.Module:
    model = nn.Sequential()
    model.add_module("stem", stem)
    model.add_module("layers", nn.Sequential(*layers))
    model.add_module("head", head)
    return model


def _tokens(batch: int = _B, length: int = _T) -> Tensor:
    return torch.randint(_VOCABULARY, (batch, length))


# With dropout and statistics: what a recomputation gets wrong first is what it draws or counts twice.
SUBJECTS = (
    Subject("mlp", _mlp, lambda: torch.randn(64, 16), tiles="head"),
    Subject("transformer", _transformer, _tokens, tiles="head"),
    Subject("transformer, bf16 autocast", _transformer, _tokens, autocasts=True),
    Subject("conv", _convolutional, lambda: torch.randn(8, 3, 16, 16)),
)
LARGER = Subject("larger transformer", partial(_transformer, 256), partial(_tokens, 8, 128))
"""Takes so many bytes that a segment of the allocator is a small share of them."""
