"""The record of a step: which storages come and go in which interval, and which of them the blocks hold. Data only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol, final

OpSeconds = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], float]
"""What one op takes on a device: called with the op, its arguments and its result."""


class EventKind(Enum):
    """What happened to a storage."""

    BORN = "born"
    GONE = "gone"
    HELD = "held"
    RELEASED = "released"


class Phase(Enum):
    """The intervals into which the calls of blocks cut a step."""

    FORWARD = "forward of"
    AFTER_FORWARD = "after the forward of"
    BACKWARD = "backward of"
    AFTER_BACKWARD = "after the backward of"
    BEFORE = "before the first block"
    OPTIMIZER = "optimizer"


class Interval(NamedTuple):
    """A stretch of the step. ``call`` counts the calls of blocks in the order of forward; -1 if it is of none."""

    phase: Phase
    call: int = -1

    @property
    def is_of_block(self) -> bool:
        """Whether a policy decides what happens in it."""
        return self.phase in (Phase.FORWARD, Phase.BACKWARD)


class StorageEvent(NamedTuple):
    """One line of the log."""

    kind: EventKind
    storage: int
    num_bytes: int
    op: int
    """How many ops had begun."""


@final
@dataclass(frozen=True, slots=True)
class TraceSpan:
    """What happened from one mark to the next."""

    interval: Interval
    entries: list[StorageEvent] = field(default_factory=list)


@final
@dataclass(frozen=True, slots=True)
class BlockCall:
    """One forward of one block, and the storages that pass its border."""

    block: int
    arguments: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    gradients: dict[int, int] = field(default_factory=dict)
    """By the number of an output: the storage of its gradient."""


class TraceLog(Protocol):
    """A recorded step."""

    @property
    def stretches(self) -> list[TraceSpan]:
        """Its intervals in the order of time; an interval may come several times."""

    @property
    def calls(self) -> list[BlockCall]:
        """The forwards of blocks, in order."""
