"""Stacks of equal layers, models around such stacks, and steps of them, which tests of all packages share.

Layers in an ``nn.Sequential``, the plainest first:

- :func:`linear_layers`: a product and an activation each, where the layers only have to be blocks;
- :func:`mlp_layers`: two products around an activation, where bytes matter: most of what a layer saves lies within it;
- :func:`residual_layers`: of :class:`ResidualLayer`, with dropout for the random state, or without it;
- :func:`stack_of`: of any other layer, such as one that a test is about.

Models that have more than layers: :class:`SequentialModel` calls its layers as one ``nn.Sequential``,
:class:`ListModel` calls them in a loop, and :func:`tiny_gpt2` is a model of Transformers.

Steps, where any will do: :func:`mlp_step` and :func:`gpt2_step`. They set the seed; nothing else here does. Weights are
drawn in the order of the layers.

Elsewhere are chains of layers that are hard to recompute (:mod:`helpers.hard_modules`), models of many architectures
(:mod:`helpers.architectures`), and single modules that a test writes as their forward (:mod:`helpers.modules`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel

D = 16  # width


def stack_of(make_layer: Callable[[], nn.Module], num_layers: int) -> nn.Sequential:
    """Returns layers of which each is a call of ``make_layer``."""
    return nn.Sequential(*(make_layer() for _ in range(num_layers)))


def linear_layers(num_layers: int, width: int = D, activation: Callable[[], nn.Module] = nn.Tanh) -> nn.Sequential:
    return stack_of(lambda: nn.Sequential(nn.Linear(width, width), activation()), num_layers)


def mlp_layers(
    num_layers: int, width: int = D, inner: int | None = None, activation: Callable[[], nn.Module] = nn.GELU
) -> nn.Sequential:
    """``inner``, the width between the two products, is four times ``width`` unless it is given."""
    inner = 4 * width if inner is None else inner
    return stack_of(lambda: nn.Sequential(nn.Linear(width, inner), activation(), nn.Linear(inner, width)), num_layers)


class ResidualLayer(nn.Module):
    """``x + down(activation(up(x)))``, with dropout at the end unless it is ``None``."""

    def __init__(
        self,
        width: int = D,
        inner: int | None = None,
        activation: Callable[[Tensor], Tensor] = F.gelu,
        dropout: float | None = 0.1,
    ) -> None:
        super().__init__()
        inner = 4 * width if inner is None else inner
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.drop = None if dropout is None else nn.Dropout(dropout)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        if self.drop is None:
            return x + self.down(self.activation(self.up(x)))
        return x + self.drop(self.down(self.activation(self.up(x))))  # one expression: no variable holds a result


class ReLULayer(ResidualLayer):
    """Without dropout: its steps are equal whatever ran before."""

    def __init__(self) -> None:
        super().__init__(activation=F.relu, dropout=None)


def residual_layers(
    num_layers: int,
    width: int = D,
    inner: int | None = None,
    activation: Callable[[Tensor], Tensor] = F.gelu,
    dropout: float | None = 0.1,
) -> nn.Sequential:
    return stack_of(lambda: ResidualLayer(width, inner, activation, dropout), num_layers)


class SequentialModel(nn.Module):
    """Residual layers in an ``nn.Sequential``, between two linear ones."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, 4)
        self.body = residual_layers(num_layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(self.first(x)))


class ListModel(nn.Module):
    """Residual layers in an ``nn.ModuleList``, a norm, a head, and nothing that Transformers marks."""

    def __init__(
        self, num_layers: int = 4, num_outputs: int = 8, norm: Callable[[int], nn.Module] = nn.BatchNorm1d
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(D, D)
        self.layers = nn.ModuleList(ResidualLayer() for _ in range(num_layers))
        self.norm = norm(D)
        self.head = nn.Linear(D, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def tiny_gpt2(**sizes: object) -> GPT2LMHeadModel:
    """Returns a GPT-2 in train mode, of four layers and 16 features unless fields of its config say otherwise."""
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415 - takes seconds

    small = {"n_layer": 4, "n_embd": 16, "n_head": 2, "n_positions": 32, "vocab_size": 32, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(**small | sizes, bos_token_id=0, eos_token_id=0)).train()


def mlp_step(num_layers: int = 6, rows: int = 256, inner: int = 4 * D) -> tuple[nn.Sequential, Callable[[], None]]:
    """Returns some :func:`mlp_layers`, and a step of them."""
    torch.manual_seed(0)
    model = mlp_layers(num_layers, D, inner)
    x = torch.randn(rows, D)

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    return model, step


def gpt2_step(*, num_tokens: int = 24, **sizes: object) -> tuple[GPT2LMHeadModel, Callable[[], None]]:
    """Returns a :func:`tiny_gpt2`, and a step of it."""
    torch.manual_seed(0)
    model = tiny_gpt2(**sizes)
    ids = torch.randint(0, model.config.vocab_size, (4, num_tokens))

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    return model, step
