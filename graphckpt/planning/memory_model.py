"""Predicts the peak of any plan, to the byte, from the traces of each block under each option."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, final

from graphckpt.planning.program import (
    BlockProgram,
    EventKind,
    EventProgram,
    Interval,
    Phase,
    PrivateRun,
    Role,
    SharedEvent,
    StepLog,
    TraceLog,
)
from graphckpt.rules.basic import Full

if TYPE_CHECKING:
    from graphckpt.planning.candidates import Option

_OTHER = 1  # of a storage's holders: any code outside of blocks, counted once
_BLOCK = 2  # of a storage's holders: each block counts
_UNBORN = -(1 << 40)  # of a storage's holders: blocks hold an object that will reach it


class Change(NamedTuple):
    kind: EventKind
    storage: int
    num_bytes: int


class EventOutcome(NamedTuple):
    """The outcome of an interval: peak and change above the level at the start, and the holders at the end."""

    peak: int
    change: int
    holders: tuple[int, ...]


OutcomeCache: TypeAlias = "dict[tuple[PrivateRun | Change, ...], dict[tuple[int, ...], EventOutcome]]"
"""By events, with storages numbered in their order: the outcomes by the holders at the start."""


@final
class EventSeq:
    """The events of an interval, in order, compared by identity."""

    __slots__ = ("_outcomes", "_steps", "storages")

    def __init__(self, steps: Iterable[PrivateRun | Change], outcomes: OutcomeCache | None = None) -> None:
        self._steps = tuple(steps)
        self.storages = tuple(dict.fromkeys(step.storage for step in self._steps if isinstance(step, Change)))
        """The shared storages of the events."""
        self._outcomes = ({} if outcomes is None else outcomes).setdefault(self._renumbered(), {})

    def __iter__(self) -> Iterator[PrivateRun | Change]:
        return iter(self._steps)

    def outcome(self, holders: tuple[int, ...]) -> EventOutcome:
        outcome = self._outcomes.get(holders)
        if outcome is None:
            outcome = self._outcomes[holders] = self._simulate(dict(zip(self.storages, holders, strict=True)))
        return outcome

    def _renumbered(self) -> tuple[PrivateRun | Change, ...]:
        numbers = {storage: number for number, storage in enumerate(self.storages)}
        return tuple(
            [s if isinstance(s, PrivateRun) else Change(s.kind, numbers[s.storage], s.num_bytes) for s in self._steps]
        )

    def _simulate(self, holders: dict[int, int]) -> EventOutcome:
        level = peak = 0
        for step in self._steps:
            if isinstance(step, PrivateRun):
                peak = max(peak, level + step.peak)
                level += step.change
                continue
            before = holders[step.storage]
            after = holders[step.storage] = _AFTER[step.kind](before)
            level += step.num_bytes * (_is_alive(after) - _is_alive(before))
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

    def advance(self, steps: EventSeq) -> None:
        holders = self._holders
        peak, change, after = steps.outcome(tuple([holders.get(storage, 0) for storage in steps.storages]))
        self.peak = max(self.peak, self.level + peak)
        self.level += change
        holders.update(zip(steps.storages, after, strict=True))


@final
@dataclass(frozen=True, slots=True)
class IntervalLevel:
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
        self._is_recomputed = is_recomputed
        self._reached = [base.reached_by(call) for call in range(len(base.calls))]
        self.block_of_call = [call.block for call in base.calls]
        self.intervals = base.intervals
        self.ends = ends
        self._program_of = program_of
        self._storages = [{role: storage for storage, role in base.roles(c).items()} for c in range(len(base.calls))]
        self._late: dict[Interval, list[int]] = {}
        self._numbers: dict[tuple[Hashable, ...], int] = {}
        self._outcome_cache: OutcomeCache = {}
        self._outside = {i: self.steps_of(self._outside_steps(i, ends)) for i in self.intervals if not i.is_of_block}
        for storage, (where, _) in ends.items():
            if where.is_of_block:  # for options without that event: at the end of that interval
                self._late.setdefault(where, []).append(storage)
        self._holds: dict[tuple[int, int], frozenset[int]] = {}
        self._steps: dict[tuple[Interval, int], EventSeq] = {}

    def steps(self, interval: Interval, option: int) -> EventSeq:
        if not interval.is_of_block:
            return self._outside[interval]
        key = interval, option
        if key not in self._steps:
            program = self._program_of(interval.call, option)
            steps = program.forward if interval.phase is Phase.FORWARD else program.backward
            changes = [
                s
                if isinstance(s, PrivateRun)
                else Change(s.kind, self.storage(interval.call, s.role, option), s.num_bytes)
                for s in steps
            ]
            if self._reached[interval.call] and self._is_recomputed(interval.call, option):
                changes = self._with_reached(interval, changes, steps)
            released = {step.storage for step in changes if isinstance(step, Change) and step.kind is EventKind.GONE}
            late = [storage for storage in self._late.get(interval, ()) if storage not in released]
            changes += [Change(EventKind.GONE, storage, self.base.sizes[storage]) for storage in late]
            self._steps[key] = self.steps_of(changes)
        return self._steps[key]

    def _with_reached(
        self, interval: Interval, changes: list[PrivateRun | Change], steps: EventProgram
    ) -> list[PrivateRun | Change]:
        """Adds that a call holds what the objects among its arguments reach, as long as it holds its arguments."""
        is_forward = interval.phase is Phase.FORWARD
        kind = EventKind.HELD if is_forward else EventKind.RELEASED
        at = len(steps)
        while not is_forward and at and not _releases_argument(steps[at - 1]):
            at -= 1
        added = [Change(kind, storage, self.base.sizes[storage]) for storage in self._reached[interval.call]]
        return [*changes[: at or len(steps)], *added, *changes[at or len(steps) :]]

    def steps_of(self, steps: Iterable[PrivateRun | Change]) -> EventSeq:
        """Returns events as a sequence whose outcomes are cached."""
        return EventSeq(steps, self._outcome_cache)

    def storage(self, call: int, role: Role, option: int) -> int:
        """Returns the number of a storage in ``base``, or a new number if only this option has it."""
        storage = self._storages[call].get(role)
        return self.number_of(call, role, option) if storage is None else storage

    def number_of(self, *key: Hashable) -> int:
        """Returns a number that no storage in ``base`` has. Not a hash: processes must count alike."""
        return self._numbers.setdefault(key, -2 - len(self._numbers))

    def holds(self, call: int, option: int) -> frozenset[int]:
        """Returns the shared storages that a call holds until its backward."""
        key = call, option
        if key not in self._holds:
            program = self._program_of(call, option)
            own = {self.storage(call, role, option) for role in program.holds}
            self._holds[key] = frozenset(own).union(self._reached[call] if self._is_recomputed(call, option) else ())
        return self._holds[key]

    @property
    def static_bytes(self) -> int:
        """Live bytes when the first block begins: weights, optimizer state, inputs, gradients of earlier steps."""
        state = LiveState(unborn=self.base.reached)
        for interval in self.intervals:
            if interval.is_of_block:
                break
            state.advance(self.steps(interval, 0))
        return state.level

    def levels(
        self, plan: Sequence[int], joined: Mapping[Interval, Sequence[EventSeq]] | None = None
    ) -> Iterator[IntervalLevel]:
        """Yields the levels of a step, interval by interval."""
        state = LiveState(unborn=self.base.reached)
        joined = joined or {}
        for interval in self.intervals:
            option = plan[self.block_of_call[interval.call]] if interval.is_of_block else 0
            start = state.peak = state.level
            for steps in joined.get(interval) or [self.steps(interval, option)]:
                state.advance(steps)
            yield IntervalLevel(interval, start, state.peak)

    def highest(
        self, plan: Sequence[int], joined: Mapping[Interval, Sequence[EventSeq]] | None = None
    ) -> IntervalLevel:
        return max(self.levels(plan, joined), key=lambda level: level.peak)

    def _outside_steps(
        self, interval: Interval, ends: Mapping[int, tuple[Interval, int]]
    ) -> Iterator[PrivateRun | Change]:
        base = self.base
        due = sorted((number, storage) for storage, (where, number) in ends.items() if where == interval)
        for number, entry in base.outside(interval):
            while due and due[0][0] <= number:
                yield Change(EventKind.GONE, due[0][1], base.sizes[due.pop(0)[1]])
            if entry.storage in base.shared:
                if entry.kind is EventKind.BORN:
                    yield Change(EventKind.BORN, entry.storage, entry.num_bytes)
            else:  # private storages of a block are freed elsewhere
                is_born = entry.kind is EventKind.BORN
                yield PrivateRun(entry.num_bytes if is_born else 0, entry.num_bytes if is_born else -entry.num_bytes)
        yield from (Change(EventKind.GONE, storage, base.sizes[storage]) for _, storage in due)


def _releases_argument(step: PrivateRun | SharedEvent) -> bool:
    return isinstance(step, SharedEvent) and step.kind is EventKind.RELEASED and step.role.kind == "argument"


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
        option = plan[model.block_of_call[interval.call]]
        num_bytes = ahead.get((interval.call, option), 0)
        if not num_bytes:
            continue
        if before is not None:
            own = events.get(before) or [model.steps(before, plan[model.block_of_call[before.call]])]
            events[before] = [model.steps_of([PrivateRun(num_bytes, num_bytes)]), *own]
            own = events.get(interval) or [model.steps(interval, option)]
            events[interval] = [model.steps_of([PrivateRun(0, -num_bytes)]), *own]
        before = interval
    return events


Runs: TypeAlias = "tuple[tuple[int, int], ...]"
"""The first block of each run, and the one after its last."""

_HOLDS = EventKind.HELD, EventKind.RELEASED
_KEEP = 0  # the first option of a measured step

LENGTHS = (2, 3, 4, 5, 6, 8, 10, 12, 16)
"""Possible lengths of runs. For n blocks, runs of about sqrt(n) take the least memory: these suffice for 250."""


@final
@dataclass(frozen=True, slots=True)
class _JoinedCall:
    """The events of a call in a run: as its first block, which saves its input, or as a later one."""

    holds: frozenset[int]
    """The shared storages that it holds until its backward."""
    forward: EventSeq
    backward: EventSeq
    """After all results have been recomputed."""


@final
class JoinedRuns:
    """Which blocks can be joined, and the events of a step in which they are."""

    def __init__(self, measured: MeasuredStep) -> None:
        self._model = model = measured.model
        rules = [option.rule for option in measured.options]
        self.full = next((n for n, rule in enumerate(rules) if rule == Full() and not measured.options[n].is_far), 0)
        """The option that each block of a run has in a plan."""
        self._calls: dict[int, list[int]] = {}
        for call, block in enumerate(model.block_of_call):
            self._calls.setdefault(block, []).append(call)
        every = range(len(model.block_of_call) if self.full else 0)
        self._inputs = {call: storage for call in every for storage in self._input_of(call)}
        self._allocated = {call: frozenset(model.base.allocated(call)) - {self._inputs.get(call + 1)} for call in every}
        self._first = {call: self._as_first(call) for call in every}
        self._behind = {call: self._as_behind(call) for call in self._inputs}
        self._recomputed = {call: self._model.steps_of(self._recomputation(call)) for call in every}
        self._recomputed_behind = {call: self._recomputation_behind(call) for call in self._inputs}
        self._last = {call: self._backward_of_last(call) for call in self._inputs}
        self._follows = [
            all(call in self._inputs for call in self._calls.get(block, [-1])) for block in range(len(measured.names))
        ]
        self.extra_seconds = [self._extra_seconds(measured, block) for block in range(len(measured.names))]
        """By block: the extra seconds if others are joined to it, since all of it is recomputed then; the
        recomputation of ``full`` stops at the last tensor that backward needs."""

    def seconds(self, runs: Runs) -> float:
        return fsum(self.extra_seconds[block] for first, end in runs for block in range(first, end - 1))

    def lengths(self, block: int) -> Sequence[int]:
        longest = 1
        while longest < LENGTHS[-1] and block + longest < len(self._follows) and self._follows[block + longest]:
            longest += 1
        return LENGTHS[: bisect_right(LENGTHS, longest)]

    def steps_of(self, runs: Runs) -> dict[Interval, Sequence[EventSeq]]:
        """Returns the events of the blocks of some runs, by interval, in all passes of a step."""
        return {
            interval: steps
            for first, end in runs
            for call in self._calls[first]
            for interval, steps in self.steps(range(call, call + end - first))
        }

    def steps(self, calls: range) -> Iterator[tuple[Interval, Sequence[EventSeq]]]:
        first, last = calls[0], calls[-1]
        each = [(call, self._first[call] if call == first else self._behind[call]) for call in calls]
        for call, does in each:
            yield Interval(Phase.FORWARD, call), (does.forward,)
        if first in self._model.base.dropped:  # nothing is recomputed
            yield from ((Interval(Phase.BACKWARD, call), (does.backward,)) for call, does in each)
            return
        recomputed = [self._recomputed[first], *(self._recomputed_behind[call] for call in calls[1:-1])]
        yield Interval(Phase.BACKWARD, last), (*recomputed, self._last[last])
        for call, does in reversed(each[:-1]):
            yield Interval(Phase.BACKWARD, call), (does.backward,)

    def inputs(self, calls: range) -> frozenset[int]:
        return frozenset(self._inputs[call] for call in calls[1:])

    def holds(self, calls: range) -> frozenset[int]:
        """Returns the shared storages that the calls of a run hold until their backward."""
        return self._first[calls[0]].holds.union(*(self._behind[call].holds for call in calls[1:]))

    def _extra_seconds(self, measured: MeasuredStep, block: int) -> float:
        forward, backward = measured.forward_seconds[block][_KEEP], measured.backward_seconds[block]
        return max(0.0, forward + backward[_KEEP] - backward[self.full])

    def _as_first(self, call: int) -> _JoinedCall:
        holds = self._model.holds(call, self.full)
        forward = self._model.steps(Interval(Phase.FORWARD, call), self.full)
        return _JoinedCall(holds, forward, self._model.steps_of(self._backward(call, holds)))

    def _as_behind(self, call: int) -> _JoinedCall:
        """The input is not held, and is freed after its use."""
        passed_on = self._inputs[call]
        holds = self._model.holds(call, self.full) - {passed_on}
        forward = self._under_full(Phase.FORWARD, call, passed_on)
        free = self._change(EventKind.GONE, passed_on)
        backward = [*self._backward(call, holds, passed_on), free]
        return _JoinedCall(holds, self._model.steps_of([*forward, free]), self._model.steps_of(backward))

    def _backward(
        self, call: int, holds: frozenset[int], passed_on: int | None = None
    ) -> Iterator[PrivateRun | Change]:
        if call in self._model.base.dropped:
            yield from self._under_full(Phase.BACKWARD, call, passed_on)
            return
        for step in self._model.steps(Interval(Phase.BACKWARD, call), _KEEP):
            yield self._recomputed_one(call, step) if isinstance(step, Change) and step.kind in _HOLDS else step
        yield from (self._change(EventKind.RELEASED, storage) for storage in sorted(holds))
        yield from (PrivateRun(0, -2 * private.change) for private in self._private(call))

    def _under_full(self, phase: Phase, call: int, passed_on: int | None) -> Iterator[PrivateRun | Change]:
        """Yields the events under ``full``, without the hold of the storage ``passed_on``."""
        for step in self._model.steps(Interval(phase, call), self.full):
            if isinstance(step, PrivateRun) or step.storage != passed_on or step.kind not in _HOLDS:
                yield step

    def _recomputation(self, call: int) -> list[PrivateRun | Change]:
        """It is recomputed as under ``keep``; of what leaves the block, only the input of the next one stays."""
        forward = [
            self._recomputed_one(call, step) if isinstance(step, Change) else step
            for step in self._model.steps(Interval(Phase.FORWARD, call), _KEEP)
        ]
        born = [step for step in forward if isinstance(step, Change) and step.kind is EventKind.BORN]
        frees = [step._replace(kind=EventKind.GONE) for step in born if step.storage != self._inputs.get(call + 1)]
        return [*self._private(call), *forward, *frees]

    def _recomputation_behind(self, call: int) -> EventSeq:
        """The input is freed at the end, unless an op saves it."""
        passed_on = self._inputs[call]
        is_saved = passed_on in self._model.holds(call, _KEEP)
        frees = [] if is_saved else [self._change(EventKind.GONE, passed_on)]
        return self._model.steps_of([*self._recomputation(call), *frees])

    def _recomputed_one(self, call: int, step: Change) -> Change:
        """Returns the event for what the recomputation allocates in place of a storage of the original forward."""
        if step.storage not in self._allocated[call]:
            return step
        return step._replace(storage=self._model.number_of(call, step.storage))

    def _backward_of_last(self, call: int) -> EventSeq:
        steps = self._model.steps(Interval(Phase.BACKWARD, call), self.full)
        passed_on = self._inputs[call]
        return self._model.steps_of(
            [self._change(EventKind.HELD, passed_on), *steps, self._change(EventKind.GONE, passed_on)]
        )

    def _private(self, call: int) -> list[PrivateRun]:
        """Returns what a call saves beside its inputs, such as copies of buffers; restoring them takes as much."""
        steps = self._model.steps(Interval(Phase.FORWARD, call), self.full)
        num_bytes = sum(step.change for step in steps if isinstance(step, PrivateRun))
        return [PrivateRun(num_bytes, num_bytes)] if num_bytes > 0 else []

    def _change(self, kind: EventKind, storage: int) -> Change:
        return Change(kind, storage, self._model.base.sizes.get(storage, 0))

    def _input_of(self, call: int) -> list[int]:
        """Returns the argument that the call of the block before it has created, if nothing else uses or holds it."""
        base = self._model.base
        if call == 0 or any(Interval(Phase.BACKWARD, c) not in base.intervals for c in (call - 1, call)):
            return []
        before, here = base.calls[call - 1], base.calls[call]
        if before.block != here.block - 1 or (call in base.dropped) != (call - 1 in base.dropped):
            return []
        inputs = [
            storage for storage in here.arguments if storage in before.outputs and storage not in before.arguments
        ]
        if len(set(inputs)) != 1 or inputs[0] not in here.returned_before:
            return []
        users = [c for c in range(len(base.calls)) if inputs[0] in base.roles(c)]
        end = self._model.ends.get(inputs[0])
        is_freed = end is not None and end[0] in (Interval(Phase.FORWARD, call), Interval(Phase.AFTER_FORWARD, call))
        return inputs[:1] if is_freed and users == [call - 1, call] else []
