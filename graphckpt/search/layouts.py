"""Layouts of a run over the ranks of a cluster, as text and by arithmetic: data, tensor and pipeline parallelism, ZeRO.

No torch. What a config makes of a layout is the subject of :mod:`graphckpt.config.layouts`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, NamedTuple, TypeAlias, final, get_args

from graphckpt.errors import ConfigError, did_you_mean

ZeroStage: TypeAlias = Literal[0, 1, 2, 3]

_NAMES = {
    "dp": "data_parallel_size",
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "zero": "zero_stage",
}
_FIX = 'fix: "dp=8 tp=8 zero=3"'


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """A division of the ranks of a run among the kinds of parallelism.

    >>> str(Layout(8, 8, zero_stage=3)), str(Layout(8, 1, 2))
    ('dp=8 tp=8 zero=3', 'dp=8 pp=2')
    """

    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    zero_stage: ZeroStage = 0
    """The stage of ZeRO, by FSDP2 over the data-parallel ranks; 0 is none."""

    def __str__(self) -> str:
        """Returns the sizes above 1, as ``--layout`` takes them."""
        named = zip(("dp", "tp", "pp"), self.sizes, strict=True)
        sizes = [f"{name}={size}" for name, size in named if size > 1]
        return " ".join([*sizes, *([f"zero={self.zero_stage}"] if self.zero_stage else [])]) or "dp=1"

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The sizes of data, tensor and pipeline parallelism."""
        return self.data_parallel_size, self.tensor_parallel_size, self.pipeline_parallel_size

    @property
    def num_ranks(self) -> int:
        """The product of the sizes."""
        dp, tp, pp = self.sizes
        return dp * tp * pp

    def overrides(self) -> list[str]:
        """Returns the overrides that set the layout in a config."""
        stage = [f"train.zero_optimization.stage={self.zero_stage}"] if self.zero_stage else []
        return [
            f"train.dist.data_parallel_size={self.data_parallel_size}",
            f"train.dist.tensor_parallel_size={self.tensor_parallel_size}",
            f"train.dist.pipeline_parallel_size={self.pipeline_parallel_size}",
            f"train.zero_optimization.enabled={self.zero_stage > 0}",
            *stage,
        ]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values."""
        names = ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size", "zero_stage")
        return {"layout": str(self), **{name: getattr(self, name) for name in names}}


def layouts_of(world_size: int) -> list[Layout]:
    """Returns all layouts of so many ranks, each with every stage of ZeRO.

    >>> [str(layout) for layout in layouts_of(2)[::4]], len(layouts_of(64))
    (['pp=2', 'tp=2', 'dp=2'], 112)
    """
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    pairs = [(dp, tp) for dp, tp in product(divisors, divisors) if world_size % (dp * tp) == 0]
    return [Layout(dp, tp, world_size // (dp * tp), stage) for dp, tp in pairs for stage in get_args(ZeroStage)]


def parse_layout(text: str, world_size: int) -> Layout:
    """Reads a layout such as ``"dp=8 tp=8 zero=3"``. A size that is missing is 1, and the stage of ZeRO 0.

    Raises:
        ConfigError: a name or a number cannot be used, or the product of the sizes is not ``world_size``.

    >>> parse_layout("tp=8 dp=8 zero=3", 64) == Layout(8, 8, zero_stage=3)
    True
    """
    where = f"layout {text!r}"
    values: dict[str, Any] = {}
    for word in re.split(r"[\s,]+", text.strip()):
        name, _, number = word.partition("=")
        if name not in _NAMES:
            hint = did_you_mean(name, list(_NAMES))
            raise ConfigError(f"{where}: expected sizes of dp, tp, pp and zero, got {word!r}{hint} · {_FIX}")
        low, high = (0, 3) if name == "zero" else (1, world_size)
        if not re.fullmatch(r"\d{1,9}", number) or not low <= int(number) <= high:
            raise ConfigError(f"{where}: {name}: expected an int from {low} to {high}, got {number!r} · {_FIX}")
        if _NAMES[name] in values:
            raise ConfigError(f"{where}: expected {name} once, got it twice · {_FIX}")
        values[_NAMES[name]] = int(number)
    layout = Layout(**values)
    if layout.num_ranks != world_size:
        what = f"expected sizes whose product is the world size {world_size}, got {layout.num_ranks}"
        raise ConfigError(f"{where}: {what} · fix: change dp, tp or pp, or the world size")
    return layout


class StateBytes(NamedTuple):
    """The bytes of weights, gradients and optimizer states."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0

    def divided(self, parts: int) -> StateBytes:
        return StateBytes(*(num_bytes // parts for num_bytes in self))

    @classmethod
    def sum_of(cls, values: Iterable[StateBytes]) -> StateBytes:
        """Returns the sums.

        >>> StateBytes.sum_of([StateBytes(1, 2, 3), StateBytes(10, 20, 30)])
        StateBytes(weights=11, gradients=22, optimizer=33)
        """
        return cls(*map(sum, zip(cls(), *values, strict=True)))

    def least_of_rank(self, zero_stage: int, num_ranks: int, accumulation: int) -> int:
        """Returns the bytes that are alive at the same time on one of the data-parallel ranks, at least.

        FSDP2 gathers the weights of stages 1 and 2 for all micro-batches of an update, besides their shards. Gradients
        of stage 1 are full before the last micro-batch; with one micro-batch they are sharded layer by layer.

        >>> states = StateBytes(weights=8, gradients=8, optimizer=16)
        >>> [states.least_of_rank(stage, 8, accumulation=2) for stage in range(4)]
        [32, 19, 12, 4]
        """
        # Of the example, by stage: 8 + 8 + 16; 8 + (8 + 16) / 8 + 8; 8 + (8 + 16) / 8 + 8 / 8; (8 + 8 + 16) / 8.
        if zero_stage == 0:
            return sum(self)
        if zero_stage == 3:
            return sum(self) // num_ranks
        gradients = self.gradients if zero_stage == 1 else self.gradients // num_ranks
        between = gradients if accumulation > 1 else 0
        return self.weights + (self.weights + self.optimizer) // num_ranks + between


def crosses_nodes(layout: Layout, ranks_per_node: int) -> bool:
    """Whether the ranks of a tensor-parallel group are on several nodes.

    >>> crosses_nodes(Layout(1, 16), 8), crosses_nodes(Layout(8, 8), 8), crosses_nodes(Layout(2, 3), 4)
    (True, False, True)
    """
    # Groups are of consecutive ranks: with 3 of each on nodes of 4, ranks 3, 4 and 5 are on two.
    size = layout.tensor_parallel_size
    firsts = range(0, layout.num_ranks, size)
    return any(first // ranks_per_node != (first + size - 1) // ranks_per_node for first in firsts)
