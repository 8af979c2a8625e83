"""Turns the trace of a step into programs: what a block allocates and frees, in names that hold for equal blocks.

A storage that only one block sees is *private* to it: only sums of these remain. All others are *shared*: they enter or
leave a block, or several blocks hold them. Each is named by its role for a call of the block, so that the program of
one block fits every equal one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Self, TypeAlias, final


class EventKind(Enum):
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


_OF_BLOCKS = Phase.FORWARD, Phase.BACKWARD


class Interval(NamedTuple):
    """A part of the step. ``call`` counts the calls of blocks in the order of forward; -1 if it belongs to none.

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


@final
@dataclass(frozen=True, slots=True)
class TraceLog:
    spans: list[TraceSpan] = field(default_factory=list)
    """Its intervals in the order of time; an interval may come several times."""
    calls: list[BlockCall] = field(default_factory=list)
    objects: list[ArgumentObject] = field(default_factory=list)
    """The objects among the arguments of calls."""
    far_bytes: Counter[int] = field(default_factory=Counter)
    """The bytes that each call has offloaded, by the number of the call."""
    ahead_bytes: Counter[int] = field(default_factory=Counter)
    """The bytes that an all-gather of a call's parts takes until they are used, by the number of the call."""

    def to_message(self) -> list[Any]:
        """Returns plain values, for JSON."""
        spans = [
            (span.interval.phase.value, span.interval.call, [(e.kind.value, *e[1:]) for e in span.entries])
            for span in self.spans
        ]
        calls = [
            (c.block, c.arguments, c.outputs, [*c.gradients.items()], [*c.backwards], c.returned_before)
            for c in self.calls
        ]
        objects = [(each.storage, each.calls, [*each.reached]) for each in self.objects]
        return [spans, calls, objects, [*self.far_bytes.items()], [*self.ahead_bytes.items()]]

    @classmethod
    def from_message(cls, message: Sequence[Any]) -> Self:
        spans, calls, objects, offloaded, gathered = message
        return cls(
            [
                TraceSpan(Interval(Phase(phase), call), [StorageEvent(EventKind(kind), *e) for kind, *e in entries])
                for phase, call, entries in spans
            ],
            [BlockCall(block, args, outs, dict(grads), set(ids), old) for block, args, outs, grads, ids, old in calls],
            [ArgumentObject(storage, calls_of, dict.fromkeys(reached)) for storage, calls_of, reached in objects],
            Counter(dict(offloaded)),
            Counter(dict(gathered)),
        )


class Role(NamedTuple):
    """The role of a shared storage for a call of a block, such as its second argument."""

    kind: str
    """``"argument"``, ``"output"``, ``"gradient"``, ``"made"`` in forward, ``"reached"`` by an object among the
    arguments and made in forward, ``"left"`` by backward, ``"passing"``."""
    number: int


class PrivateRun(NamedTuple):
    """Events of private storages only: the peak above the level at the start, and the change of the level."""

    peak: int
    change: int


class SharedEvent(NamedTuple):
    kind: EventKind
    role: Role
    num_bytes: int


class StorageEnd(NamedTuple):
    """Where a storage is freed in a step: the interval, and the number of private events before it."""

    interval: Interval
    number: int


EventProgram: TypeAlias = tuple[PrivateRun | SharedEvent, ...]
"""The events of one interval, in order."""


@final
@dataclass(frozen=True, slots=True)
class BlockProgram:
    forward: EventProgram
    backward: EventProgram
    left: tuple[int, ...]
    """Bytes of tensors that outlive its backward, in order; if options differ, the prediction is an estimate."""

    @property
    def holds(self) -> tuple[Role, ...]:
        """The shared storages that it holds from its forward to its backward, in order."""
        counts: Counter[Role] = Counter()
        for step in self.forward:
            if isinstance(step, SharedEvent):
                counts[step.role] += _BALANCE.get(step.kind, 0)
        return tuple(role for role, count in counts.items() if count > 0)


@final
class StepLog:
    """A traced step, with the lifetime of each storage."""

    def __init__(self, trace: TraceLog) -> None:
        self.calls = trace.calls
        self._spans, self.dropped = _with_drops(trace.spans)
        self.intervals = list(dict.fromkeys(span.interval for span in self._spans))
        self.sizes: dict[int, int] = {}
        self._entries: dict[Interval, list[StorageEvent]] = {}
        self._where_born: dict[int, Interval] = {}
        self._where_gone: dict[int, Interval] = {}
        for interval, entry in self._events():
            self._entries.setdefault(interval, []).append(entry)
            if entry.kind is EventKind.BORN:
                self._where_born[entry.storage] = interval
                self.sizes[entry.storage] = entry.num_bytes
            elif entry.kind is EventKind.GONE:
                self._where_gone[entry.storage] = interval
        self.objects = trace.objects
        self.reached = frozenset(storage for each in self.objects for storage in each.reached)
        """The storages that live as long as an object among the arguments of blocks."""
        self._loose = self._released_early()
        self._masked = frozenset(self._released_by_blocks())
        self._roles: list[dict[int, Role]] = []
        self.shared: frozenset[int] = frozenset()
        """The storages that have a role for any call."""
        self.ends: dict[int, StorageEnd] = {}
        """Where non-block code releases a shared storage, if the trace shows it; a block may still hold it."""

    def _events(self) -> Iterator[tuple[Interval, StorageEvent]]:
        return ((span.interval, entry) for span in self._spans for entry in span.entries)

    @property
    def has_backward(self) -> bool:
        return any(phase is Phase.BACKWARD and call not in self.dropped for phase, call in self.intervals)

    def allocated(self, call: int) -> list[int]:
        return [e.storage for e in self.entries(Interval(Phase.FORWARD, call)) if e.kind is EventKind.BORN]

    def leaving(self, call: int) -> set[int]:
        """Returns which storages that the forward of a call allocates outlive the call, by their numbers.

        Outputs and what objects reach are left out: they have a role in every run, while a number may be that of
        another storage under another option, since a recomputed block copies buffers first.
        """
        own = {Interval(Phase.FORWARD, call), Interval(Phase.BACKWARD, call)}
        others = self.reached.union(self.calls[call].outputs)
        allocated = enumerate(self.allocated(call))
        return {n for n, storage in allocated if storage not in others and self._where_gone.get(storage) not in own}

    def reached_by(self, call: int) -> list[int]:
        return list(dict.fromkeys(s for each in self.objects if call in each.calls for s in each.reached))

    def name_roles(self, leaving: Sequence[Collection[int]]) -> None:
        """Names the shared storages; ``leaving`` holds, for each call, those that it allocates and that outlive it."""
        self._roles = [self._roles_of(call, leaving[call]) for call in range(len(self.calls))]
        self.shared = self.reached.union(*self._roles, (each.storage for each in self.objects))
        for call, roles in enumerate(self._roles):  # allocated by one block and freed by another
            own = (e for phase in _OF_BLOCKS for e in self.entries(Interval(phase, call)) if e.kind is EventKind.GONE)
            ending = [e.storage for e in own if e.storage in self.shared and e.storage not in self.reached]
            passing = [storage for storage in ending if storage not in roles]
            roles.update({storage: Role("passing", number) for number, storage in enumerate(passing)})
        self.ends = {
            entry.storage: StorageEnd(interval, number)
            for interval in self.intervals
            for number, entry in self.outside(interval)
            if entry.kind is EventKind.GONE and entry.storage in self.shared and entry.storage not in self._masked
        }

    def entries(self, interval: Interval) -> Sequence[StorageEvent]:
        return self._entries.get(interval, ())

    def roles(self, call: int) -> Mapping[int, Role]:
        return self._roles[call]

    def of_backward(self) -> frozenset[int]:
        """Returns the shared storages that were allocated in backward, or later."""
        roles = (item for each in self._roles for item in each.items())
        storages = (storage for storage, role in roles if role.kind in ("gradient", "left"))
        return frozenset(s for s in storages if self._where_born[s].phase not in (Phase.BEFORE, Phase.FORWARD))

    def is_gone(self, storage: int) -> bool:
        return storage in self._where_gone

    def outside(self, interval: Interval) -> Iterator[tuple[int, StorageEvent]]:
        """Yields the events of an interval outside of blocks, each with the number of private events before it."""
        number = 0
        for entry in self.entries(interval):
            if entry.storage >= 0 and entry.kind not in _BALANCE:
                yield number, entry
                number += entry.storage not in self.shared

    def program(self, call: int) -> BlockProgram:
        """Returns the program of a call. Storages that are freed because a block releases them are left out."""
        roles = self._roles[call]
        forward, backward = (
            tuple(_fold((e for e in self.entries(Interval(phase, call)) if not self._is_masked(e)), roles))
            for phase in _OF_BLOCKS
        )
        left = sorted((role, self.sizes[storage]) for storage, role in roles.items() if role.kind == "left")
        return BlockProgram(forward, backward, tuple(num_bytes for _, num_bytes in left))

    def _is_masked(self, entry: StorageEvent) -> bool:
        if entry.kind is EventKind.GONE:
            return entry.storage in self.reached or (entry.storage in self._masked and entry.storage in self.shared)
        return (entry.call, entry.storage) in self._loose

    def _released_early(self) -> set[tuple[int, int]]:
        """Returns calls and storages that they hold, and release after their forward and before their backward.

        A part of their graph is dropped there, so other code decides how long the storage lives.
        """
        early: set[tuple[int, int]] = set()
        others: set[tuple[int, int]] = set()
        begun: set[int] = set()
        for span in self._spans:
            phase, call = span.interval
            begun |= {call} if phase is Phase.BACKWARD else set()
            for entry in span.entries:
                if entry.kind is EventKind.RELEASED:
                    is_own = entry.call in begun or span.interval == (Phase.FORWARD, entry.call)
                    (others if is_own else early).add((entry.call, entry.storage))
        return early - others

    def _released_by_blocks(self) -> Iterator[int]:
        """Yields the storages that are freed at the moment in which a block releases them."""
        released: dict[int, int] = {}
        for _, entry in self._events():
            if entry.kind is EventKind.RELEASED and (entry.call, entry.storage) not in self._loose:
                released[entry.storage] = entry.op
            elif entry.kind is EventKind.GONE and released.get(entry.storage) == entry.op:
                yield entry.storage

    def _roles_of(self, call: int, leaving: Collection[int]) -> dict[int, Role]:
        border, allocated = self.calls[call], self.allocated(call)
        born_here = (s for s in self.reached_by(call) if self._where_born.get(s) == (Phase.FORWARD, call))
        roles: dict[int, Role] = {}
        for kind, storages in (
            ("argument", enumerate(border.arguments)),
            ("output", enumerate(border.outputs)),
            ("gradient", border.gradients.items()),
            ("reached", enumerate(born_here)),
            ("made", ((number, allocated[number]) for number in sorted(leaving) if number < len(allocated))),
        ):
            for number, storage in storages:
                roles.setdefault(storage, Role(kind, number))
        own, number = Interval(Phase.BACKWARD, call), 0
        for entry in self.entries(own):
            storage = entry.storage
            if entry.kind is EventKind.BORN and storage not in roles and self._where_gone.get(storage) != own:
                roles[storage] = Role("left", number)
                number += 1
        roles.pop(-1, None)
        return roles


# Note [Dropped graphs]
# A step may drop the graph of a call without a backward: m(x).detach(), or an output that is not used. What the call
# saves then dies with its graph, and how much that is depends on the option of its block. So the moment of the drop
# becomes the BACKWARD interval of the call, in which it releases what it holds and computes nothing, and all that
# handles backwards handles drops. A graph that is dropped in parts counts as dropped with the last of them.


def _with_drops(spans: Sequence[TraceSpan]) -> tuple[Sequence[TraceSpan], frozenset[int]]:
    """Adds a backward for each call whose graph is dropped; returns these calls too. See Note [Dropped graphs]."""
    with_backward = {span.interval.call for span in spans if span.interval.phase is Phase.BACKWARD}
    creator_of: dict[int, int] = {}
    ops: dict[int, set[int]] = {}
    for (phase, call), entries in ((span.interval, span.entries) for span in spans):
        own = call if phase is Phase.FORWARD else -1
        for entry in entries:
            if entry.kind is EventKind.BORN and own >= 0:
                creator_of[entry.storage] = own
            elif entry.kind is EventKind.RELEASED and entry.call not in (-1, own) and entry.call not in with_backward:
                ops.setdefault(entry.call, set()).add(entry.op)
    if not ops:
        return spans, frozenset()

    def dropped_by(interval: Interval, entry: StorageEvent) -> int:
        call = creator_of.get(entry.storage, -1) if entry.kind is EventKind.GONE else entry.call
        is_release = entry.kind in (EventKind.GONE, EventKind.RELEASED) and interval != (Phase.FORWARD, call)
        return call if is_release and entry.op in ops.get(call, ()) else -1

    drops = {call: TraceSpan(Interval(Phase.BACKWARD, call)) for call in ops}
    pending = set(ops)
    result: list[TraceSpan] = []
    for span in spans:
        result.append(TraceSpan(span.interval))
        for entry in span.entries:
            call = dropped_by(span.interval, entry)
            if call in pending and entry.op == max(ops[call]):  # what else this op frees, it frees in any order
                pending.remove(call)
                after = span.interval if span.interval.is_of_block else Interval(Phase.AFTER_BACKWARD, call)
                result += [drops[call], TraceSpan(after)]
            (result[-1] if call < 0 else drops[call]).entries.append(entry)
    return result, frozenset(drops)


def with_holds(program: BlockProgram, roles: Collection[Role]) -> BlockProgram:
    """Returns a program that holds ``roles``, which other code releases before its backward ends.

    No store reports these: the block itself has kept them alive.
    """
    holds = program.holds
    ends = (step for step in program.backward if isinstance(step, SharedEvent) and step.kind is EventKind.GONE)
    late = {end.role: end.num_bytes for end in ends if end.role in roles and end.role not in holds}
    if not late:
        return program
    forward: list[PrivateRun | SharedEvent] = [
        SharedEvent(EventKind.HELD, r, n) for r, n in late.items() if r.kind == "argument"
    ]
    for step in program.forward:
        forward.append(step)
        if isinstance(step, SharedEvent) and step.kind is EventKind.BORN and step.role in late:
            forward.append(SharedEvent(EventKind.HELD, step.role, step.num_bytes))
    backward = tuple(
        step._replace(kind=EventKind.RELEASED)
        if isinstance(step, SharedEvent) and step.kind is EventKind.GONE and step.role in late
        else step
        for step in program.backward
    )
    return BlockProgram(tuple(forward), backward, program.left)


_BALANCE = {EventKind.HELD: 1, EventKind.RELEASED: -1}


def _fold(entries: Iterable[StorageEvent], roles: Mapping[int, Role]) -> Iterator[PrivateRun | SharedEvent]:
    peak = change = 0
    for entry in entries:
        role = roles.get(entry.storage)
        if role is not None:
            if peak or change:
                yield PrivateRun(peak, change)
                peak = change = 0
            yield SharedEvent(entry.kind, role, entry.num_bytes)
        elif entry.kind is EventKind.BORN:
            change += entry.num_bytes
            peak = max(peak, change)
        elif entry.kind is EventKind.GONE:
            change -= entry.num_bytes
    if peak or change:
        yield PrivateRun(peak, change)
