"""The intervals into which the calls of blocks divide a step, and what a meter reads in each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple, Self, TypeAlias, final


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


@final
@dataclass(frozen=True)
class StepReadings:
    """The levels of one step, in bytes, and its seconds. Calls of blocks are counted in the order of forwards."""

    block_of_call: Sequence[int]
    spans: LevelLog
    """Relative to the level at the start of the step."""
    seconds: Mapping[Interval, float]
    total_seconds: float
    start_bytes: int
    """The level at the start of the step: weights, optimizer states, and gradients that are not freed."""
    allocated: Mapping[Interval, int] = field(default_factory=dict)
    """The bytes that were allocated in each interval."""
    of_blocks: Mapping[Interval, int] = field(default_factory=dict)
    """The bytes at the start of each interval that forwards of blocks have allocated, on an absent device."""
    dropped: frozenset[int] = frozenset()
    """The calls whose graph was freed without a backward. An empty interval of their backward says when."""
    joinable: frozenset[int] = frozenset()
    """The calls that can be recomputed as one with the call before, as far as this step shows."""
    is_repeated: bool = False
    """Whether two backwards ran through one call."""
    passed_on: Sequence[int] = ()
    """By call: the bytes of its arguments that are the very tensors which the call before has returned."""
    far_bytes: Mapping[int, int] = field(default_factory=dict)
    """By call: the bytes that it has offloaded."""
    ahead_bytes: Mapping[int, int] = field(default_factory=dict)
    """By call: the bytes that an all-gather of its parts takes until they are used."""
    recomputed: Mapping[int, int] = field(default_factory=dict)
    """By call: what its recomputation has added to the level, which is the most that any policy retains of it."""
    signatures: Sequence[str] = ()
    """By call: the shapes that it was called with."""
    are_typical: Sequence[bool] = ()
    """By call: whether an argument has history. The backward of a call without it computes less."""

    @cached_property
    def levels(self) -> LevelLog:
        return {interval: span.raised(self.start_bytes) for interval, span in self.spans.items()}

    @property
    def peak_bytes(self) -> int:
        return self.start_bytes + max(span.peak for span in self.spans.values())

    @property
    def end_bytes(self) -> int:
        return self.start_bytes + next(reversed(list(self.spans.values()))).end

    @property
    def has_backward(self) -> bool:
        return any(i.phase is Phase.BACKWARD and i.call not in self.dropped for i in self.spans)

    def to_message(self) -> dict[str, Any]:
        """Returns plain values, for JSON."""
        message = {each.name: getattr(self, each.name) for each in fields(self)}
        plain = {name: [*value.items()] for name, value in message.items() if isinstance(value, Mapping)}
        return message | plain | {name: sorted(message[name]) for name in ("dropped", "joinable")}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Self:
        changed: dict[str, Any] = {name: frozenset(message[name]) for name in ("dropped", "joinable")}
        changed |= {name: dict(message[name]) for name in ("far_bytes", "ahead_bytes", "recomputed")}
        for name in ("spans", "seconds", "allocated", "of_blocks"):
            changed[name] = {Interval(Phase(phase), call): value for (phase, call), value in message[name]}
        changed["spans"] = {interval: LevelSpan(*span) for interval, span in changed["spans"].items()}
        return cls(**{**message, **changed})
