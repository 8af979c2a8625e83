"""Predicts the peak of any plan, to the byte, from the traces of each block under each option."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from graphckpt.planning.model.events import EventKind, Interval, Phase
from graphckpt.planning.model.program import BlockProgram, EventProgram, PrivateRun, Role, SharedEvent, StepLog
from graphckpt.planning.model.simulate import Change, EventSeq, LiveState, OutcomeCache

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphckpt.planning.candidates import Option
    from graphckpt.planning.model.events import Interval, TraceLog


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
        self._outcome_cache: OutcomeCache = {}
        self._outside = {i: self.steps_of(self._outside_steps(i, ends)) for i in self.intervals if not i.is_of_block}
        for storage, (where, _) in ends.items():
            if where.is_of_block:  # for options without that event: at the end of that interval
                self._late.setdefault(where, []).append(storage)
        self._holds: dict[tuple[int, int], frozenset[int]] = {}
        self._steps: dict[tuple[Interval, int], EventSeq] = {}

    def steps(self, interval: Interval, option: int) -> EventSeq:
        """Returns the events of an interval; ``option`` is that of its block."""
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
            gone = {step.storage for step in changes if isinstance(step, Change) and step.kind is EventKind.GONE}
            late = [storage for storage in self._late.get(interval, ()) if storage not in gone]
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
        known = self._storages[call].get(role)
        return known if known is not None else -2 - (hash((call, role, option)) & 0xFFFFFFFFFFFF)

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
        """Yields the levels of a step, interval by interval.

        Args:
            plan: the option of each block.
            joined: the events that replace those of some intervals.
        """
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
        """Returns the interval with the highest level; of equal ones the first."""
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
    far_bytes: dict[int, int]
    """The offloaded bytes of each call, by its number."""
    seconds: dict[Interval, float]
    step_seconds: float
    """Seconds of the step without policies, if it was run, or else with these."""
    plain_seconds: dict[Interval, float] | None = None
    """Seconds without policies, timed beside ``seconds``; ``None`` if times are estimated and do not vary."""
    ahead_bytes: dict[int, int] = field(default_factory=dict)
    """The bytes that an all-gather of a call's parts takes until they are used, by the number of the call."""


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


def with_gathers(
    measured: MeasuredStep, plan: Sequence[int], joined: Mapping[Interval, Sequence[EventSeq]]
) -> Mapping[Interval, Sequence[EventSeq]]:
    """Returns the events of some intervals, with the all-gathers that begin one block ahead of their use.

    A step under a plan prefetches the parts of the next block while a block's backward runs::

        backward of   3         2         1      of these 3 and 1 keep parts
        gathered      [ 1's ------------- ]

    Args:
        measured: the step.
        plan: the option of each block.
        joined: the events of those intervals without them.
    """
    model, ahead = measured.model, measured.ahead_bytes
    if not ahead:
        return joined
    found = dict(joined)
    before: Interval | None = None
    for interval in model.intervals:
        if interval.phase is not Phase.BACKWARD or interval.call in model.base.dropped:
            continue
        option = plan[model.block_of_call[interval.call]]
        num_bytes = ahead.get((interval.call, option), 0)
        if not num_bytes:
            continue
        if before is not None:
            own = found.get(before) or [model.steps(before, plan[model.block_of_call[before.call]])]
            found[before] = [model.steps_of([PrivateRun(num_bytes, num_bytes)]), *own]
            own = found.get(interval) or [model.steps(interval, option)]
            found[interval] = [model.steps_of([PrivateRun(0, -num_bytes)]), *own]
        before = interval
    return found
