"""The intervals into which the calls of blocks divide a step, and live bytes in each."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple, TypeAlias


class Phase(StrEnum):
    """The kinds of intervals into which the calls of blocks divide a step."""

    FORWARD = "forward of"
    AFTER_FORWARD = "after the forward of"
    BACKWARD = "backward of"
    AFTER_BACKWARD = "after the backward of"
    BEFORE = "before the first block"
    OPTIMIZER = "optimizer"


_OF_BLOCKS = Phase.FORWARD, Phase.BACKWARD


class Interval(NamedTuple):
    """An interval of the step. ``call`` counts the calls of blocks in the order of forward; -1 if it belongs to none.

    Of an optimizer it counts the updates.
    """

    phase: Phase
    call: int = -1

    @property
    def is_of_block(self) -> bool:
        """Whether the policy of a block determines what happens in it."""
        return self.phase in _OF_BLOCKS


class LevelSpan(NamedTuple):
    """Live bytes in an interval."""

    start: int
    peak: int
    end: int

    def raised(self, num_bytes: int) -> LevelSpan:
        return LevelSpan(*(each + num_bytes for each in self))


LevelLog: TypeAlias = Mapping[Interval, LevelSpan]
"""The levels of a step, by interval, in the order of time."""
