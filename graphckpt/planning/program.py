"""The trace of a step: which storages are allocated and freed in each interval, and which calls of blocks there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Self, TypeAlias, final


class EventKind(StrEnum):
    BORN = "born"
    GONE = "gone"
    RELEASED = "released"
    """A block has released a tensor that a store has held for it, or the place of one that is offloaded."""


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


class StorageEvent(NamedTuple):
    kind: EventKind
    storage: int
    """Its number; -1 if the call of a block releases something."""
    num_bytes: int
    op: int
    """The number of ops that had begun."""
    call: int = -1
    """The call of a block that releases something; -1 if there is none."""


class TraceSpan(NamedTuple):
    """The events from one mark to the next."""

    interval: Interval
    entries: list[StorageEvent]


@final
@dataclass(slots=True)
class BlockCall:
    """One forward of one block, and the storages that enter or leave it."""

    block: int
    arguments: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    backwards: list[int] = field(default_factory=list)
    """The ids of the backwards of the step that have computed gradients of its outputs."""
    returned_before: list[int] = field(default_factory=list)
    """The storages of the arguments that are the very tensors which the call before has returned."""
    far_bytes: int = 0
    """The bytes that it has offloaded."""
    ahead_bytes: int = 0
    """The bytes that an all-gather of its parts takes until they are used."""


@final
@dataclass(frozen=True, slots=True)
class TraceLog:
    spans: list[TraceSpan]
    """Its intervals in the order of time; an interval may come several times."""
    calls: list[BlockCall] = field(default_factory=list)

    def to_message(self) -> list[Any]:
        """Returns values for JSON, which writes named tuples as lists, and the kinds of events as text."""
        return [self.spans, [astuple(call) for call in self.calls]]

    @classmethod
    def from_message(cls, message: Sequence[Any]) -> Self:
        spans, calls = message
        return cls(
            [
                TraceSpan(Interval(Phase(phase), call), [StorageEvent(EventKind(kind), *e) for kind, *e in entries])
                for (phase, call), entries in spans
            ],
            [BlockCall(*call) for call in calls],
        )


class LevelSpan(NamedTuple):
    """Live bytes in an interval."""

    start: int
    peak: int
    end: int


LevelLog: TypeAlias = Mapping[Interval, LevelSpan]
"""The levels of a step, by interval, in the order of time."""


@final
class StepLog:
    """A traced step, with its levels, the size of each storage, and the interval in which it is freed."""

    def __init__(self, trace: TraceLog) -> None:
        self.calls = trace.calls
        spans, self.dropped = _with_drops(trace.spans)
        self.entries: dict[Interval, list[StorageEvent]] = {}
        for span in spans:
            self.entries.setdefault(span.interval, []).extend(span.entries)
        self.levels: dict[Interval, LevelSpan] = {}
        self.sizes: dict[int, int] = {}
        self.where_gone: dict[int, Interval] = {}
        level = 0
        for interval, entries in self.entries.items():
            start = peak = level
            for entry in entries:
                if entry.kind is EventKind.BORN:
                    self.sizes[entry.storage] = entry.num_bytes
                    level += entry.num_bytes
                elif entry.kind is EventKind.GONE:
                    self.where_gone[entry.storage] = interval
                    level -= entry.num_bytes
                peak = max(peak, level)
            self.levels[interval] = LevelSpan(start, peak, level)

    @property
    def has_backward(self) -> bool:
        return any(phase is Phase.BACKWARD and call not in self.dropped for phase, call in self.levels)

    def allocated_bytes(self, interval: Interval) -> tuple[int, ...]:
        """Returns the bytes of each storage that an interval allocates, in order."""
        entries = self.entries.get(interval, ())
        return tuple(entry.num_bytes for entry in entries if entry.kind is EventKind.BORN)


# Note [Dropped graphs]
# A step may drop the graph of a call without a backward: m(x).detach(), or an output that is not used. What the call
# saves then dies with its graph, and how much that is depends on the option of its block. So the moment of the drop
# becomes the BACKWARD interval of the call, in which it releases what it holds and computes nothing, and all that
# handles backwards handles drops. A graph that is dropped in parts counts as dropped with the last of them.
#
#     forward of 0 (a born) | after it (op 7: a released, a gone)                    as traced
#     forward of 0 (a born) | after it | backward of 0 (a released, a gone) | ...    as it is read
#
# All that one op frees carries the number of that op. Releases say which call is dropped and by which op; storages that
# the same op frees belong to the drop if the call's forward has allocated them.


def _with_drops(spans: Sequence[TraceSpan]) -> tuple[Sequence[TraceSpan], frozenset[int]]:
    """Adds a backward for each call whose graph is dropped; returns these calls too. See Note [Dropped graphs]."""
    with_backward = {span.interval.call for span in spans if span.interval.phase is Phase.BACKWARD}
    # By storage: the call whose forward has allocated it. By call without a backward: the ops that release a part of
    # it.
    creator_of: dict[int, int] = {}
    ops: dict[int, set[int]] = {}
    for (phase, call), entries in spans:
        forward = call if phase is Phase.FORWARD else -1
        for entry in entries:
            if entry.kind is EventKind.BORN and forward >= 0:
                creator_of[entry.storage] = forward
            elif entry.kind is EventKind.RELEASED and entry.call != forward and entry.call not in with_backward:
                ops.setdefault(entry.call, set()).add(entry.op)
    if not ops:
        return spans, frozenset()

    def dropped_by(interval: Interval, entry: StorageEvent) -> int:
        call = creator_of.get(entry.storage, -1) if entry.kind is EventKind.GONE else entry.call
        is_release = entry.kind in (EventKind.GONE, EventKind.RELEASED) and interval != (Phase.FORWARD, call)
        return call if is_release and entry.op in ops.get(call, ()) else -1

    drops = {call: TraceSpan(Interval(Phase.BACKWARD, call), []) for call in ops}
    pending = set(ops)
    result: list[TraceSpan] = []
    for span in spans:
        result.append(TraceSpan(span.interval, []))
        for entry in span.entries:
            call = dropped_by(span.interval, entry)
            # Parts that were released before are moved as well, to the last: `drops[call]` collects them.
            if call in pending and entry.op == max(ops[call]):  # what else this op frees, it frees in any order
                pending.remove(call)
                after = span.interval if span.interval.is_of_block else Interval(Phase.AFTER_BACKWARD, call)
                result += [drops[call], TraceSpan(after, [])]
            (result[-1] if call < 0 else drops[call]).entries.append(entry)
    return result, frozenset(drops)
