"""The trace of a step: which storages are allocated, freed and held by blocks, in which interval. Data only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol, final

OpSeconds = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], float]
"""Returns the seconds that an op takes on a device, from the op, its arguments and its result."""


class EventKind(Enum):
    """What happened to a storage."""

    BORN = "born"
    GONE = "gone"
    HELD = "held"
    RELEASED = "released"


class Phase(Enum):
    """The kinds of intervals into which the calls of blocks divide a step."""

    FORWARD = "forward of"
    AFTER_FORWARD = "after the forward of"
    BACKWARD = "backward of"
    AFTER_BACKWARD = "after the backward of"
    BEFORE = "before the first block"
    OPTIMIZER = "optimizer"


class Interval(NamedTuple):
    """A part of the step. ``call`` counts the calls of blocks in the order of forward; -1 if it belongs to none.

    Of an optimizer it counts the updates.
    """

    phase: Phase
    call: int = -1

    @property
    def is_of_block(self) -> bool:
        """Whether the policy of a block determines what happens in it."""
        return self.phase in (Phase.FORWARD, Phase.BACKWARD)


class StorageEvent(NamedTuple):
    """One allocation or release."""

    kind: EventKind
    storage: int
    num_bytes: int
    op: int
    """The number of ops that had begun."""
    call: int = -1
    """The call of a block that has held or releases it; -1 if there is none."""


@final
@dataclass(frozen=True, slots=True)
class TraceSpan:
    """The events from one mark to the next."""

    interval: Interval
    entries: list[StorageEvent] = field(default_factory=list)


@final
@dataclass(frozen=True, slots=True)
class BlockCall:
    """One forward of one block, and the storages that enter or leave it."""

    block: int
    arguments: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    gradients: dict[int, int] = field(default_factory=dict)
    """The storage of the gradient of each output, by the number of the output."""
    backwards: set[int] = field(default_factory=set)
    """The ids of the backwards of the step that have computed gradients of its outputs."""
    returned_before: list[int] = field(default_factory=list)
    """The storages of the arguments that are the very tensors which the call before has returned."""


@final
@dataclass(frozen=True, slots=True)
class ArgumentObject:
    """An object that blocks are called with, such as a cache of keys: what it reaches lives as long as it does."""

    storage: int
    """The number of a storage of no bytes that is freed together with the object."""
    calls: list[int] = field(default_factory=list)
    reached: dict[int, None] = field(default_factory=dict)
    """The storages that it reaches after one of these calls, in order."""


class TraceLog(Protocol):
    """A traced step."""

    @property
    def stretches(self) -> list[TraceSpan]:
        """Its intervals in the order of time; an interval may come several times."""

    @property
    def calls(self) -> list[BlockCall]:
        """The forwards of blocks, in order."""

    @property
    def objects(self) -> list[ArgumentObject]:
        """The objects among the arguments of these."""
