"""Predicts the peak of any plan, to the byte, from the traces of each block under each option.

One idea: a storage that a block shares with other code is alive as long as it has a *holder*::

    holder                    from         to              depends on
    code outside of blocks    BORN         GONE            nothing: it is the same under every plan
    a block that saves it     HELD         RELEASED        the option of the block

So the events of a step are those between the blocks, and for each block those under its option::

    program of a block         its events, in which storages have roles such as "first argument": fits all equal blocks
    MemoryModel.events         the events of one interval of the step, in which storages have numbers
    EventSeq.outcome           their effect on the level of live bytes, given the holders before; cached
    LiveState.advance          the level after an interval, and its peak; MemoryModel.levels advances through the step

:class:`JoinedRuns` replaces the events of blocks that are recomputed as one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from math import fsum
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, final

from graphckpt.planning.program import (
    BlockProgram,
    EventKind,
    Interval,
    Phase,
    PrivateRun,
    Role,
    StepLog,
    TraceLog,
)
from graphckpt.rules.basic import Full

if TYPE_CHECKING:
    from graphckpt.planning.candidates import Option

# Note [Holders of a storage]
# The holders of a storage are one int, so that they compare and hash fast: the lowest bit, and a count of blocks. It is
# negative while blocks hold an object that will reach the storage, such as a cache of keys, before it is allocated.
_OTHER = 1  # code outside of blocks
_BLOCK = 2  # is added for each block
_UNBORN = -(1 << 40)  # is added until it is allocated; far below any count of blocks


class Change(NamedTuple):
    kind: EventKind
    storage: int
    num_bytes: int


class EventOutcome(NamedTuple):
    peak: int
    """Above the level at the start."""
    change: int
    """Of the level."""
    holders: tuple[int, ...]
    """At the end, by storage; see Note [Holders of a storage]."""


OutcomeCache: TypeAlias = "dict[tuple[PrivateRun | Change, ...], dict[tuple[int, ...], EventOutcome]]"
"""By events, with storages numbered in their order: the outcomes by the holders at the start."""


@final
class EventSeq:
    """The events of an interval, in order, compared by identity. Sequences that do the same share their outcomes."""

    __slots__ = ("_events", "_outcomes", "storages")

    def __init__(self, events: Iterable[PrivateRun | Change], outcomes: OutcomeCache | None = None) -> None:
        self._events = tuple(events)
        self.storages = tuple(dict.fromkeys(event.storage for event in self._events if isinstance(event, Change)))
        numbers = {storage: number for number, storage in enumerate(self.storages)}
        key = tuple([s if isinstance(s, PrivateRun) else s._replace(storage=numbers[s.storage]) for s in self._events])
        self._outcomes = ({} if outcomes is None else outcomes).setdefault(key, {})

    def __iter__(self) -> Iterator[PrivateRun | Change]:
        return iter(self._events)

    def outcome(self, holders: tuple[int, ...]) -> EventOutcome:
        outcome = self._outcomes.get(holders)
        if outcome is None:
            outcome = self._outcomes[holders] = self._simulate(dict(zip(self.storages, holders, strict=True)))
        return outcome

    def _simulate(self, holders: dict[int, int]) -> EventOutcome:
        level = peak = 0
        for event in self._events:
            if isinstance(event, PrivateRun):
                peak = max(peak, level + event.peak)
                level += event.change
                continue
            before = holders[event.storage]
            after = holders[event.storage] = _AFTER[event.kind](before)
            level += event.num_bytes * (_is_alive(after) - _is_alive(before))
            peak = max(peak, level)
        return EventOutcome(peak, level, tuple(holders.values()))


_AFTER = {
    EventKind.BORN: lambda holders: (holders - _UNBORN if holders < _UNBORN // 2 else holders) | _OTHER,
    EventKind.GONE: lambda holders: holders & ~_OTHER,
    EventKind.HELD: lambda holders: holders + _BLOCK,
    EventKind.RELEASED: lambda holders: holders - _BLOCK,
}


def _is_alive(holders: int) -> bool:
    return holders > 0 or bool(holders & _OTHER)


@final
class LiveState:
    """The level of live bytes and the holders of shared storages, which live as long as anything holds them.

    >>> state = LiveState(100, others=[7])
    >>> events = [Change(EventKind.HELD, 7, 30), Change(EventKind.GONE, 7, 30), PrivateRun(peak=8, change=5)]
    >>> state.advance(EventSeq(events))
    >>> state.level, state.peak  # a block still holds it
    (105, 108)
    """

    __slots__ = ("_holders", "level", "peak")

    def __init__(
        self, level: int = 0, others: Iterable[int] = (), holds: Iterable[int] = (), unborn: Iterable[int] = ()
    ) -> None:
        self.level = self.peak = level
        self._holders = {**dict.fromkeys(others, _OTHER), **dict.fromkeys(unborn, _UNBORN)}
        self.hold(holds)

    def hold(self, storages: Iterable[int]) -> None:
        """Adds a block that holds these storages; the level includes them already."""
        for storage in storages:
            self._holders[storage] = self._holders.get(storage, 0) + _BLOCK

    def advance(self, events: EventSeq) -> None:
        holders = self._holders
        peak, change, after = events.outcome(tuple([holders.get(storage, 0) for storage in events.storages]))
        self.peak = max(self.peak, self.level + peak)
        self.level += change
        holders.update(zip(events.storages, after, strict=True))


class IntervalLevel(NamedTuple):
    """Live bytes in one interval of the step under a plan."""

    interval: Interval
    start: int
    peak: int


@final
class MemoryModel:
    """The events of a step: between the blocks, and in each block under each option.

    Args:
        base: the trace of the step with everything kept.
        program_of: returns the program of a call under an option, by the numbers of both.
        ends: where code outside of blocks releases a shared storage, by its number in ``base``.
        is_recomputed: returns whether a call is recomputed under an option, by the numbers of both: then it holds the
            objects among its arguments until its backward.
    """

    def __init__(
        self,
        base: StepLog,
        program_of: Callable[[int, int], BlockProgram],
        ends: Mapping[int, tuple[Interval, int]],
        is_recomputed: Callable[[int, int], bool],
    ) -> None:
        self.base = base
        self.intervals = base.intervals
        self.block_of_call = [call.block for call in base.calls]
        self.ends = ends
        self._ends_in: dict[Interval, list[tuple[int, int]]] = {}
        for storage, (where, number) in ends.items():
            self._ends_in.setdefault(where, []).append((number, storage))
        self._program_of = program_of
        self._is_recomputed = is_recomputed
        calls = range(len(base.calls))
        self._reached = [base.reached_by(call) for call in calls]
        self._storages = [{role: storage for storage, role in base.roles(call).items()} for call in calls]
        self._numbers: dict[tuple[Hashable, ...], int] = {}
        self._outcome_cache: OutcomeCache = {}
        self._events: dict[tuple[Interval, int], EventSeq] = {}

    def events(self, interval: Interval, option: int) -> EventSeq:
        """Returns the events of an interval, with an option on its block, if it is the forward or backward of one."""
        key = interval, option if interval.is_of_block else 0
        if key not in self._events:
            events = self._block_events(*key) if interval.is_of_block else self._outside_events(interval)
            self._events[key] = self.event_seq(events)
        return self._events[key]

    def _block_events(self, interval: Interval, option: int) -> list[PrivateRun | Change]:
        call, sizes, is_forward = interval.call, self.base.sizes, interval.phase is Phase.FORWARD
        program = self._program_of(call, option)
        events: list[PrivateRun | Change] = []
        after_arguments = 0
        for event in program.forward if is_forward else program.backward:
            if isinstance(event, PrivateRun):
                events.append(event)
                continue
            events.append(Change(event.kind, self.storage(call, event.role, option), event.num_bytes))
            if not is_forward and event.kind is EventKind.RELEASED and event.role.kind == "argument":
                after_arguments = len(events)
        if self._is_recomputed(call, option):  # with its arguments it holds what the objects among them reach
            kind = EventKind.HELD if is_forward else EventKind.RELEASED
            at = after_arguments or len(events)
            events[at:at] = [Change(kind, storage, sizes[storage]) for storage in self._reached[call]]
        # What code outside of blocks frees here is freed at the end, if the trace of this option does not show where.
        shown = {e.storage for e in events if isinstance(e, Change) and e.kind is EventKind.GONE}
        late = [storage for _, storage in self._ends_in.get(interval, ()) if storage not in shown]
        return events + [Change(EventKind.GONE, storage, sizes[storage]) for storage in late]

    def _outside_events(self, interval: Interval) -> Iterator[PrivateRun | Change]:
        base = self.base
        ending = sorted(self._ends_in.get(interval, ()))
        for number, entry in base.outside(interval):
            while ending and ending[0][0] <= number:
                storage = ending.pop(0)[1]
                yield Change(EventKind.GONE, storage, base.sizes[storage])
            is_born = entry.kind is EventKind.BORN
            if entry.storage not in base.shared:
                yield PrivateRun(entry.num_bytes, entry.num_bytes) if is_born else PrivateRun(0, -entry.num_bytes)
            elif is_born:  # `ends` say where it is freed
                yield Change(EventKind.BORN, entry.storage, entry.num_bytes)
        yield from (Change(EventKind.GONE, storage, base.sizes[storage]) for _, storage in ending)

    def event_seq(self, events: Iterable[PrivateRun | Change]) -> EventSeq:
        """Returns a sequence of events that shares its cached outcomes with all others of the model."""
        return EventSeq(events, self._outcome_cache)

    def storage(self, call: int, role: Role, option: int) -> int:
        """Returns the number of a storage in ``base``, or a new number if only this option has it."""
        storage = self._storages[call].get(role)
        return self.number_of(call, role, option) if storage is None else storage

    def number_of(self, *key: Hashable) -> int:
        """Returns a number that no storage in ``base`` has. Not a hash: processes must count alike."""
        return self._numbers.setdefault(key, -2 - len(self._numbers))

    def holds(self, call: int, option: int) -> frozenset[int]:
        """Returns the shared storages that a call holds until its backward."""
        own = frozenset(self.storage(call, role, option) for role in self._program_of(call, option).holds)
        return own.union(self._reached[call]) if self._is_recomputed(call, option) else own

    @property
    def static_bytes(self) -> int:
        """Live bytes when the first block begins: weights, optimizer state, inputs, gradients of earlier steps."""
        plain = [0] * (1 + max(self.block_of_call))
        return next(level.start for level in self.levels(plain) if level.interval.is_of_block)

    def levels(
        self, plan: Sequence[int], joined: Mapping[Interval, Sequence[EventSeq]] | None = None
    ) -> Iterator[IntervalLevel]:
        """Yields the levels of a step, interval by interval."""
        state = LiveState(unborn=self.base.reached)
        joined = joined or {}
        for interval in self.intervals:
            option = plan[self.block_of_call[interval.call]] if interval.is_of_block else 0
            start = state.peak = state.level
            for events in joined.get(interval) or [self.events(interval, option)]:
                state.advance(events)
            yield IntervalLevel(interval, start, state.peak)

    def highest(
        self, plan: Sequence[int], joined: Mapping[Interval, Sequence[EventSeq]] | None = None
    ) -> IntervalLevel:
        return max(self.levels(plan, joined), key=lambda level: level.peak)


@final
@dataclass(frozen=True, slots=True)
class StepSample:
    """One run of the step with one option on each block."""

    trace: TraceLog
    peak_bytes: int
    seconds: dict[Interval, float]
    step_seconds: float
    """Seconds of the step without policies, if it was run, or else with these."""
    plain_seconds: dict[Interval, float] | None = None
    """Seconds without policies, timed beside ``seconds``; ``None`` if times are estimated and do not vary."""


@final
@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """The measurements of a step, from which any plan can be predicted."""

    names: tuple[str, ...]
    options: tuple[Option, ...]
    """The options in general; ``options_of`` holds those of each block."""
    options_of: tuple[tuple[Option, ...], ...]
    """The options by block."""
    model: MemoryModel
    forward_seconds: tuple[tuple[float, ...], ...]
    """By block and option: the seconds of all its forwards in a step."""
    backward_seconds: tuple[tuple[float, ...], ...]
    """By block and option: the seconds of all its backwards in a step, with the recomputation."""
    far_bytes: tuple[tuple[int, ...], ...]
    """By block and option: the bytes that are offloaded in a step."""
    step_seconds: float
    """Seconds of the step with everything kept."""
    optimizer_seconds: float
    """Seconds of the optimizer in that step."""
    num_runs: int
    """The number of traced runs."""
    ahead_bytes: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """By call and option: the bytes of an all-gather that begins before the backward of the call."""
    notes: tuple[str, ...] = ()
    """Where the prediction is not exact, and why."""

    def interval_name(self, interval: Interval) -> str:
        """Returns the name of an interval for tables and messages, such as ``"backward of h.1"``."""
        if interval.call < 0 or interval.phase is Phase.OPTIMIZER:
            return interval.phase.value
        block_of_call = self.model.block_of_call
        name = self.names[block_of_call[interval.call]]
        if interval.phase is Phase.AFTER_FORWARD and interval.call == len(block_of_call) - 1:
            return f"the head and the loss, after {name}"
        return f"{interval.phase.value} {name}"


def with_gathers(
    measured: MeasuredStep, plan: Sequence[int], joined: Mapping[Interval, Sequence[EventSeq]]
) -> Mapping[Interval, Sequence[EventSeq]]:
    """Returns the events of some intervals, with the all-gathers that begin one block ahead of their use.

    A step under a plan prefetches the parts of the next block while a block's backward runs::

        backward of   3         2         1      of these 3 and 1 keep parts
        gathered      [ 1's ------------- ]
    """
    model, ahead = measured.model, measured.ahead_bytes
    if not ahead:
        return joined
    events = dict(joined)
    before: Interval | None = None
    for interval in model.intervals:
        if interval.phase is not Phase.BACKWARD or interval.call in model.base.dropped:
            continue
        if num_bytes := ahead.get((interval.call, plan[model.block_of_call[interval.call]]), 0):
            if before is not None:
                for where, change in ((before, num_bytes), (interval, -num_bytes)):
                    own = events.get(where) or [model.events(where, plan[model.block_of_call[where.call]])]
                    events[where] = [model.event_seq([PrivateRun(max(0, change), change)]), *own]
            before = interval
    return events


Runs: TypeAlias = "tuple[tuple[int, int], ...]"
"""The first block of each run, and the one after its last."""

_HOLDS = EventKind.HELD, EventKind.RELEASED
_KEEP = 0  # the first option of a measured step

LENGTHS = (2, 3, 4, 5, 6, 8, 10, 12, 16)
"""Possible lengths of runs. For n blocks, runs of about sqrt(n) take the least memory: these suffice for 250."""


# Note [Joined runs]
# Only the first block of a run saves its input; each later one frees its input, which is the result of the one before::
#
#     backward of a run of 0, 1, 2     of 2:  recompute 0, recompute 1, then 2 as under `full`
#                                      of 1:  as under `keep`, with the results that were recomputed
#                                      of 0:  as under `keep`, with the results that were recomputed


@final
@dataclass(frozen=True, slots=True)
class _JoinedCall:
    """The events of a call in a run. See Note [Joined runs]."""

    holds: frozenset[int]
    """The shared storages that it holds until its backward."""
    forward: EventSeq
    recomputation: EventSeq
    """Keeps what its backward needs, and the input of the next block."""
    backward: EventSeq
    """After its recomputation."""


@final
class JoinedRuns:
    """Which blocks can be joined, and the events of a step in which they are."""

    def __init__(self, measured: MeasuredStep) -> None:
        self._model = model = measured.model
        rules = [option.rule for option in measured.options]
        self.full = next((n for n, rule in enumerate(rules) if rule == Full() and not measured.options[n].is_far), 0)
        """The option that each block of a run has in a plan: ``full`` without offload. 0 if there is none: no runs."""
        self._calls: dict[int, list[int]] = {}
        for call, block in enumerate(model.block_of_call):
            self._calls.setdefault(block, []).append(call)
        every = range(len(model.block_of_call) if self.full else 0)
        self._inputs = {call: storage for call in every if (storage := self._input_of(call)) is not None}
        """By each call that can be joined to the one before it."""
        self.passed_on = frozenset(self._inputs.values())
        self._allocated = {call: frozenset(model.base.allocated(call)) - {self._inputs.get(call + 1)} for call in every}
        self._first = {call: self._joined_call(call, None) for call in every}
        self._later = {call: self._joined_call(call, storage) for call, storage in self._inputs.items()}
        self._last = {call: self._backward_of_last(call, storage) for call, storage in self._inputs.items()}
        blocks = range(len(measured.names))
        self._can_follow = [all(call in self._inputs for call in self._calls.get(block, [-1])) for block in blocks]
        seconds = zip(measured.forward_seconds, measured.backward_seconds, strict=True)
        self.extra_seconds = [max(0.0, fwd[_KEEP] + bwd[_KEEP] - bwd[self.full]) for fwd, bwd in seconds]
        """By block: the extra seconds if others are joined to it, since all of it is recomputed then; the
        recomputation of ``full`` stops at the last tensor that backward needs."""

    def seconds(self, runs: Runs) -> float:
        return fsum(self.extra_seconds[block] for first, end in runs for block in range(first, end - 1))

    def lengths(self, block: int) -> Sequence[int]:
        followers = takewhile(bool, self._can_follow[block + 1 : block + LENGTHS[-1]])
        return LENGTHS[: bisect_right(LENGTHS, 1 + sum(followers))]

    def events_of(self, runs: Runs) -> dict[Interval, Sequence[EventSeq]]:
        """Returns the events of the blocks of some runs, by interval, in all passes of a step."""
        return {
            interval: events
            for first, end in runs
            for call in self._calls[first]
            for interval, events in self.events(range(call, call + end - first))
        }

    def events(self, calls: range) -> Iterator[tuple[Interval, Sequence[EventSeq]]]:
        run = [(call, self._first[call] if call == calls[0] else self._later[call]) for call in calls]
        for call, joined in run:
            yield Interval(Phase.FORWARD, call), (joined.forward,)
        if calls[0] in self._model.base.dropped:  # nothing is recomputed
            yield from ((Interval(Phase.BACKWARD, call), (joined.backward,)) for call, joined in run)
            return
        *others, (last, _) = run
        recomputations = [joined.recomputation for _, joined in others]
        yield Interval(Phase.BACKWARD, last), (*recomputations, self._last[last])
        yield from ((Interval(Phase.BACKWARD, call), (joined.backward,)) for call, joined in reversed(others))

    def inputs(self, calls: range) -> frozenset[int]:
        return frozenset(self._inputs[call] for call in calls[1:])

    def holds(self, calls: range) -> frozenset[int]:
        """Returns the shared storages that the calls of a run hold until their backward."""
        return self._first[calls[0]].holds.union(*(self._later[call].holds for call in calls[1:]))

    def _joined_call(self, call: int, passed_on: int | None) -> _JoinedCall:
        """Returns the events of the first call of a run, or of one whose input is ``passed_on``."""
        model = self._model
        holds = model.holds(call, self.full) - {passed_on}
        free = [] if passed_on is None else [self._change(EventKind.GONE, passed_on)]
        is_saved = passed_on in model.holds(call, _KEEP)  # by an op
        return _JoinedCall(
            holds,
            forward=model.event_seq([*self._under_full(Phase.FORWARD, call, passed_on), *free]),
            recomputation=model.event_seq([*self._recomputation(call), *(() if is_saved else free)]),
            backward=model.event_seq([*self._backward(call, holds, passed_on), *free]),
        )

    def _backward(self, call: int, holds: frozenset[int], passed_on: int | None) -> Iterator[PrivateRun | Change]:
        if call in self._model.base.dropped:
            yield from self._under_full(Phase.BACKWARD, call, passed_on)
            return
        for event in self._model.events(Interval(Phase.BACKWARD, call), _KEEP):
            yield self._recomputed(call, event) if isinstance(event, Change) and event.kind in _HOLDS else event
        yield from (self._change(EventKind.RELEASED, storage) for storage in sorted(holds))
        # Twice: what forward has saved, and what the recomputation has restored from it.
        yield from (PrivateRun(0, -2 * private.change) for private in self._private(call))

    def _under_full(self, phase: Phase, call: int, passed_on: int | None) -> Iterator[PrivateRun | Change]:
        """Yields the events under ``full``, without the hold of the storage ``passed_on``."""
        for event in self._model.events(Interval(phase, call), self.full):
            if isinstance(event, PrivateRun) or event.storage != passed_on or event.kind not in _HOLDS:
                yield event

    def _recomputation(self, call: int) -> list[PrivateRun | Change]:
        """It is recomputed as under ``keep``; of what leaves the block, only the input of the next one stays."""
        events = self._model.events(Interval(Phase.FORWARD, call), _KEEP)
        forward = [self._recomputed(call, event) if isinstance(event, Change) else event for event in events]
        born = [event for event in forward if isinstance(event, Change) and event.kind is EventKind.BORN]
        frees = [event._replace(kind=EventKind.GONE) for event in born if event.storage != self._inputs.get(call + 1)]
        return [*self._private(call), *forward, *frees]

    def _recomputed(self, call: int, event: Change) -> Change:
        """Returns the event for what the recomputation allocates in place of a storage of the original forward."""
        if event.storage not in self._allocated[call]:
            return event
        return event._replace(storage=self._model.number_of(call, event.storage))

    def _backward_of_last(self, call: int, passed_on: int) -> EventSeq:
        events = self._model.events(Interval(Phase.BACKWARD, call), self.full)
        hold, free = (self._change(kind, passed_on) for kind in (EventKind.HELD, EventKind.GONE))
        return self._model.event_seq([hold, *events, free])

    def _private(self, call: int) -> list[PrivateRun]:
        """Returns what a call saves beside its inputs, such as copies of buffers; restoring them takes as much."""
        events = self._model.events(Interval(Phase.FORWARD, call), self.full)
        num_bytes = sum(event.change for event in events if isinstance(event, PrivateRun))
        return [PrivateRun(num_bytes, num_bytes)] if num_bytes > 0 else []

    def _change(self, kind: EventKind, storage: int) -> Change:
        return Change(kind, storage, self._model.base.sizes.get(storage, 0))

    def _input_of(self, call: int) -> int | None:
        """Returns the argument that the call of the block before it has created, if nothing else uses or holds it."""
        base = self._model.base
        if call == 0 or any(Interval(Phase.BACKWARD, c) not in base.intervals for c in (call - 1, call)):
            return None
        before, here = base.calls[call - 1], base.calls[call]
        if before.block != here.block - 1 or (call in base.dropped) != (call - 1 in base.dropped):
            return None
        inputs = {s for s in here.arguments if s in before.outputs and s not in before.arguments}
        if len(inputs) != 1 or not inputs.issubset(here.returned_before):
            return None
        (storage,) = inputs
        users = [c for c in range(len(base.calls)) if storage in base.roles(c)]
        end = self._model.ends.get(storage)
        is_freed = end is not None and end[0] in (Interval(Phase.FORWARD, call), Interval(Phase.AFTER_FORWARD, call))
        return storage if is_freed and users == [call - 1, call] else None
