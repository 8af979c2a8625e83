"""Predicts the peak of any plan, to the byte, from the traces of each block under each option."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from graphckpt.planning.model.events import EventKind, Interval, Phase
from graphckpt.planning.model.program import BlockProgram, PrivateRun, Role, StepLog
from graphckpt.planning.model.simulate import Change, EventSeq, LiveState, OutcomeCache


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
    """

    def __init__(
        self, base: StepLog, program_of: Callable[[int, int], BlockProgram], ends: Mapping[int, tuple[Interval, int]]
    ) -> None:
        self.base = base
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
            found = [
                s
                if isinstance(s, PrivateRun)
                else Change(s.kind, self.storage(interval.call, s.role, option), s.num_bytes)
                for s in steps
            ]
            gone = {step.storage for step in found if isinstance(step, Change) and step.kind is EventKind.GONE}
            late = [storage for storage in self._late.get(interval, ()) if storage not in gone]
            found += [Change(EventKind.GONE, storage, self.base.sizes[storage]) for storage in late]
            self._steps[key] = self.steps_of(found)
        return self._steps[key]

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
            self._holds[key] = frozenset(self.storage(call, role, option) for role in program.holds)
        return self._holds[key]

    @property
    def static_bytes(self) -> int:
        """Live bytes when the first block begins: weights, optimizer state, inputs, gradients of earlier steps."""
        state = LiveState()
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
        state = LiveState()
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
