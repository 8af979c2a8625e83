"""The memory levels of a step for a given plan, as a chain of blocks. Integers only."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Literal, NamedTuple, Protocol, final

from graphckpt.errors import ConfigError

ChainPlan = tuple[int, ...]
"""The option of each block; ``COVERED`` if the option of an earlier block includes it."""

COVERED = -1


@final
@dataclass(frozen=True, slots=True)
class Move:
    """The effect of an option of one or several consecutive blocks on the memory level, in bytes."""

    forward_peak: int
    """Highest level in the block's forward and in what follows it before the next block, above the level before it."""
    kept: int
    """How much the block's forward raises the level; may be 0 or negative."""
    backward_peak: int
    """Highest level in the block's backward, above the level after its forward."""
    held: Hashable
    """The state for the next block: the tensors shared with later blocks that blocks hold so far."""
    waits: float = 0.0
    """Seconds that the option waits because of earlier options."""
    length: int = 1
    """The number of blocks that the option includes: this one, and those after it."""


class Chain(Protocol):
    """A step as a chain of blocks with options."""

    @property
    def num_blocks(self) -> int:
        """The number of blocks."""

    @property
    def start(self) -> Hashable:
        """The state for the first block."""

    @property
    def base(self) -> int:
        """The level before the first block, in bytes."""

    @property
    def fixed_peak(self) -> int:
        """The peak of the intervals that no option changes, such as the optimizer, in bytes."""

    def options(self, block: int) -> Sequence[float]:
        """The seconds of each option of a block, forward and backward, of all blocks that it includes."""

    def move(self, block: int, option: int, held: Hashable) -> Move | None:
        """The effect of the option; ``None`` if it is not allowed here."""

    def head_peak(self, held: Hashable) -> int:
        """Highest level between the last forward and the first backward, above the level then, in bytes."""


@final
class ChainInterval(NamedTuple):
    """A part of the step.

    >>> str(ChainInterval("backward", 3)), str(ChainInterval("head"))
    ('backward of block 3', 'head')
    """

    kind: Literal["forward", "head", "backward", "fixed"]
    block: int | None = None

    def __str__(self) -> str:
        """For messages."""
        return self.kind if self.block is None else f"{self.kind} of block {self.block}"


def levels(
    chain: Chain, plan: Sequence[int], in_flight: Sequence[int] | None = None
) -> list[tuple[ChainInterval, int]]:
    """Returns the highest level of each interval in bytes, in the order of time, and the fixed intervals last.

    ::

        level |     F1 __        head     __ B1       F_i: level before block i + forward_peak
              |  F0 __|  |_____--____----|  |__ B0    B_i: level after block i + backward_peak
              |  __|  |__|               |__|  |__    so both follow from the options of blocks 0..i
              +----------------------------------> time

    Args:
        chain: The step.
        plan: An option for each block.
        in_flight: Additional bytes of the forwards in their order, of the head, and of the backwards in theirs.

    Raises:
        ConfigError: The chain does not allow an option.
    """
    level, held = chain.base, chain.start
    forward: list[tuple[ChainInterval, int]] = []
    backward: list[tuple[ChainInterval, int]] = []
    for block, option in enumerate(plan):
        if option == COVERED:
            continue
        move = _allowed(chain, block, option, held)
        forward.append((ChainInterval("forward", block), level + move.forward_peak))
        level, held = level + move.kept, move.held
        backward.append((ChainInterval("backward", block), level + move.backward_peak))
    rows = [*forward, (ChainInterval("head"), level + chain.head_peak(held)), *reversed(backward)]
    if in_flight is not None:
        rows = [(interval, high + more) for (interval, high), more in zip(rows, in_flight, strict=True)]
    return [*rows, (ChainInterval("fixed"), chain.fixed_peak)]


def binding(chain: Chain, plan: Sequence[int], in_flight: Sequence[int] | None = None) -> tuple[ChainInterval, int]:
    """Returns the first interval that reaches the peak, and the peak in bytes."""
    return max(levels(chain, plan, in_flight), key=lambda row: row[1])


def peak(chain: Chain, plan: Sequence[int], in_flight: Sequence[int] | None = None) -> int:
    """Returns the peak of a plan in bytes; the arguments are those of :func:`levels`."""
    return binding(chain, plan, in_flight)[1]


def seconds(chain: Chain, plan: Sequence[int]) -> float:
    """Returns the sum of the options' seconds, with those that they wait."""
    held, spent = chain.start, []
    for block, option in enumerate(plan):
        if option == COVERED:
            continue
        move = _allowed(chain, block, option, held)
        spent += [chain.options(block)[option], move.waits]
        held = move.held
    return fsum(spent)


def _allowed(chain: Chain, block: int, option: int, held: Hashable) -> Move:
    move = chain.move(block, option, held)
    if move is None:
        raise ConfigError(f"block {block}: option {option} is not allowed after {held!r} · fix: choose another one")
    return move
