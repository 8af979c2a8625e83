"""A measured step as a chain of blocks, in which each option depends on what earlier blocks hold."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from math import fsum
from typing import final

from graphckpt.planning.frontier import COVERED, Move
from graphckpt.planning.memory_model import LENGTHS, Change, EventSeq, JoinedRuns, LiveState, MeasuredStep, Runs
from graphckpt.planning.program import EventKind, Interval, Phase, PrivateRun

Held = frozenset[int]


@final
@dataclass(frozen=True, slots=True)
class _Span:
    steps: Sequence[Sequence[EventSeq]]
    """By interval, with the events before the next interval of a block."""
    holds: Held
    inputs: Held
    """What the blocks of a run pass to one another."""
    storages: Held
    """All shared storages of the events."""
    after: Interval
    """Begins when its forward has ended."""


@final
class StepChain:
    """The last forward and backward of a step as a chain of blocks: backward goes through them in reverse order.

    The level before the forward of a block is what is constant there under any plan, plus what the blocks before it
    hold; the level before its backward is the same sum. So the effect of an option depends on earlier options only.

    Args:
        measured: the step.
        fixed: the option of some blocks, by number, that must not be changed.
        banned: blocks and options that are not allowed.
        joined_runs: the events of joined blocks; ``None`` joins none.
    """

    def __init__(
        self,
        measured: MeasuredStep,
        fixed: Mapping[int, int] | None = None,
        banned: Collection[tuple[int, int]] = (),
        joined_runs: JoinedRuns | None = None,
    ) -> None:
        self._model = model = measured.model
        self._joined_runs = joined_runs
        self._seconds = [
            [one + other for one, other in zip(*pair, strict=True)]
            for pair in zip(measured.forward_seconds, measured.backward_seconds, strict=True)
        ]
        self._fixed = dict(fixed or {})
        self._banned = frozenset(banned)
        self._calls = last_pass(model.intervals)
        self.blocks = [model.block_of_call[call] for call in self._calls]
        self.num_blocks = len(self._calls)
        self.start: Held = frozenset()
        self.base = 0
        self._constants, self._others, self._unborn = self._simulate_constants()
        self._stretches: dict[EventSeq, EventSeq] = {}
        self._spans: dict[tuple[int, int], _Span] = {}
        self._moves: dict[tuple[int, int, Hashable], Move | None] = {}
        self._effects: dict[tuple[int, int, Held], tuple[int, int, int]] = {}
        self._passed_on = frozenset[int]() if joined_runs is None else joined_runs.passed_on
        self._order = {interval: number for number, interval in enumerate(model.intervals)}
        self._events_of = self._events_by_storage(range(len(measured.options)))
        self._alike: dict[int, dict[int, list[int]]] = {}
        """By block: the storages that are equivalent after it, by each of them."""
        first = self._order[Interval(Phase.FORWARD, self._calls[0])]
        last = Interval(Phase.BACKWARD, self._calls[0])
        after = self._order[last] if last in self._order else len(model.intervals) - 1
        outside = [*model.intervals[:first], *model.intervals[after + 2 :]]
        self.fixed_peak = max((self._constant_peak(interval) for interval in outside), default=0)

    def options(self, block: int) -> Sequence[float]:
        """Returns the seconds of each option of a block; a module that is called several times counts once.

        They are followed by those of runs of two blocks, three, and so on.
        """
        number = self.blocks[block]
        if number in self.blocks[:block]:
            return [0.0] * len(self._seconds[number])
        if self._joined_runs is None:
            return self._seconds[number]
        joined = self._joined_runs
        runs = [(number, number + length) for length in joined.lengths(number)]
        return self._seconds[number] + [
            fsum([joined.seconds((run,)), *(self._seconds[n][joined.full] for n in range(*run))]) for run in runs
        ]

    def plan(self, choices: Sequence[int]) -> tuple[int, ...]:
        plan = [0] * len(self._seconds)
        for first, end, choice in self._decided(choices):
            for block in range(first, end):
                plan[self.blocks[block]] = choice if end - first == 1 else self._full
        return tuple(plan)

    def runs(self, choices: Sequence[int]) -> Runs:
        return tuple(
            (self.blocks[first], self.blocks[first] + end - first)
            for first, end, _ in self._decided(choices)
            if end - first > 1
        )

    def move(self, block: int, option: int, state: Hashable) -> Move | None:
        key = block, option, state
        if key not in self._moves:
            self._moves[key] = self._move(block, option, state)
        return self._moves[key]

    def _move(self, block: int, option: int, state: Hashable) -> Move | None:
        assert isinstance(state, frozenset)
        length = self._length(block, option)
        chosen = option if length == 1 else self._full
        numbers = self.blocks[block : block + length]
        if any(self._fixed.get(n, chosen) != chosen or (n, chosen) in self._banned for n in numbers):
            return None
        calls = range(self._calls[block], self._calls[block] + length)
        span = self._spans.get((block, option)) or self._spans.setdefault((block, option), self._span(calls, chosen))
        local = state & span.storages  # equal blocks after equal ones differ in the rest of the state alone
        key = block, option, local
        effect = self._effects.get(key) or self._effects.setdefault(key, self._effect(calls, span, local))
        forward_peak, change, backward_peak = effect
        if len(span.steps) > length:
            backward_peak += self._released_bytes(state, span.after, calls[-1])
            backward_peak -= self._released_bytes(local, span.after, calls[-1])
        still = self._still_of_use(state | span.holds, block + length - 1, span.after)
        return Move(forward_peak, change, backward_peak, still, length=length)

    def _span(self, calls: range, option: int) -> _Span:
        if len(calls) == 1:
            own, inputs = self._model.holds(calls[0], option), frozenset[int]()
            intervals = (Interval(phase, calls[0]) for phase in (Phase.FORWARD, Phase.BACKWARD))
            steps: list[tuple[Interval, Sequence[EventSeq]]] = [
                (interval, (self._model.events(interval, option),)) for interval in intervals if interval in self._order
            ]
        else:
            assert self._joined_runs is not None
            own, inputs = self._joined_runs.holds(calls), self._joined_runs.inputs(calls)  # freed, and recomputed
            steps = list(self._joined_runs.events(calls))
        with_next = [self._with_next(interval, parts) for interval, parts in steps]
        storages = frozenset(storage for parts in with_next for part in parts for storage in part.storages)
        last = self._order[self._until_next(Interval(Phase.FORWARD, calls[-1]))[-1]]
        after = self._model.intervals[min(last + 1, len(self._model.intervals) - 1)]
        return _Span(with_next, own, inputs, storages | own, after)

    def _effect(self, calls: range, span: _Span, holds: Held) -> tuple[int, int, int]:
        first, after = Interval(Phase.FORWARD, calls[0]), span.after
        forward = LiveState(self._constants[first], self._others[first], holds, self._unborn[first])
        for part in chain.from_iterable(span.steps[: len(calls)]):
            forward.advance(part)
        peak = 0
        if span.steps[len(calls) :]:
            backward = Interval(Phase.BACKWARD, calls[-1])
            all_holds = holds | span.holds
            level = self._constants[backward] + self._unseen(all_holds, backward) - self._unseen(all_holds, after)
            backward_state = LiveState(level, self._others[backward] - span.inputs, holds)
            backward_state.hold(span.holds)
            for part in chain.from_iterable(span.steps[len(calls) :]):
                backward_state.advance(part)
            peak = backward_state.peak
        return forward.peak, forward.level - self._constants[after], peak

    def _with_next(self, interval: Interval, parts: Sequence[EventSeq]) -> Sequence[EventSeq]:
        """Returns the events of an interval of a block with those of the intervals before the next block."""
        *recomputations, own = parts
        stretch = self._stretches.get(own)
        if stretch is None:
            others = (self._model.events(each, 0) for each in self._until_next(interval)[1:])
            stretch = self._stretches[own] = self._model.event_seq(step for each in (own, *others) for step in each)
        return (*recomputations, stretch)

    def _released_bytes(self, holds: Held, after: Interval, call: int) -> int:
        """Returns the bytes that only blocks hold when the backward of a call begins, and other code held ``after``."""
        released = self._others[after] - self._others[Interval(Phase.BACKWARD, call)]
        return sum(self._model.base.sizes.get(storage, 0) for storage in holds & released)

    @property
    def _full(self) -> int:
        return 0 if self._joined_runs is None else self._joined_runs.full

    def _length(self, block: int, option: int) -> int:
        number = option - len(self._seconds[self.blocks[block]])
        return 1 if number < 0 else LENGTHS[number]

    def _decided(self, choices: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        for block, choice in enumerate(choices):
            if choice != COVERED:
                yield block, block + self._length(block, choice), choice

    def head_peak(self, state: Hashable) -> int:
        del state
        return 0  # the interval between the last forward and the first backward counts for the last block

    def _until_next(self, interval: Interval) -> Sequence[Interval]:
        """Returns an interval of a block and those after it, up to the next one of a block."""
        intervals, start = self._model.intervals, self._order[interval]
        later = range(start + 1, len(intervals))
        ends = (n for n in later if intervals[n].is_of_block or intervals[n].phase in (Phase.OPTIMIZER, Phase.BEFORE))
        return intervals[start : next(ends, len(intervals))]

    def _unseen(self, holds: Iterable[int], at: Interval) -> int:
        """Returns the bytes that are held by blocks only at the start of an interval."""
        not_only = self._others[at] | self._unborn[at]
        return sum(self._model.base.sizes.get(storage, 0) for storage in holds if storage not in not_only)

    def _still_of_use(self, holds: Held, block: int, after: Interval) -> Held:
        """Returns the storages that matter to later blocks; of equivalent ones the number does, so the first ones."""
        if block not in self._alike:
            groups: dict[Hashable, list[int]] = {}
            for storage in sorted(self._events_of):
                if (kind := self._kind(storage, block, after)) is not None:
                    groups.setdefault(kind, []).append(storage)
            self._alike[block] = {storage: group for group in groups.values() for storage in group}
        alike = self._alike[block]
        counts = Counter(alike[storage][0] for storage in holds if storage in alike)
        return frozenset(storage for first, count in counts.items() for storage in alike[first][:count])

    def _kind(self, storage: int, block: int, after: Interval) -> Hashable:
        """Returns a key that is equal for storages of which it does not matter which one earlier blocks hold.

        Other code holds both or neither of them, and the same happens to them until the backward of the block; what
        happens later is the matter of earlier states. If nothing happens, it is ``None``: they count as private.
        """
        events, end = self._events_of[storage], Interval(Phase.BACKWARD, self._calls[block])
        last = bisect_left(events, (self._order[end], 0)) if end in self._order else len(events)
        later = tuple(events[bisect_left(events, (self._order[after], 0)) : last])
        if later and storage in self._passed_on:
            return storage
        return (storage in self._others[after], later) if later else None

    def _events_by_storage(self, options: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
        """Returns, by storage, the intervals with events of it, and a number for these events: equal for equal ones.

        Releases are equal if nothing is allocated between them.
        """
        numbers: dict[Hashable, int] = {}
        events_of: dict[int, list[tuple[int, int]]] = {}
        for interval, at in self._order.items():
            own: dict[int, list[Hashable]] = {}
            for option in options if interval.is_of_block else options[:1]:
                for place, (_, group) in enumerate(groupby(self._model.events(interval, option), _allocates)):
                    for event in group:
                        if isinstance(event, Change):
                            own.setdefault(event.storage, []).append((option, place, event.kind, event.num_bytes))
            for storage, events in own.items():
                number = numbers.setdefault(tuple(events), len(numbers))
                events_of.setdefault(storage, []).append((at, number))
        return events_of

    def _simulate_constants(self) -> tuple[dict[Interval, int], dict[Interval, Held], dict[Interval, Held]]:
        """Returns, for the start of each interval, the bytes alive under any plan, and the shared storages in them.

        The last value has those that are not allocated yet, although blocks may hold them.
        """
        constants: dict[Interval, int] = {}
        others: dict[Interval, Held] = {}
        unborn: dict[Interval, Held] = {}
        sizes = self._model.base.sizes
        alive: set[int] = set()
        waiting = set(self._model.base.reached)
        outside = 0
        for interval in self._model.intervals:
            constants[interval] = outside + sum(sizes.get(storage, 0) for storage in alive)
            others[interval] = frozenset(alive)
            unborn[interval] = frozenset(waiting)
            for step in self._model.events(interval, 0):
                if isinstance(step, Change):
                    if step.kind is EventKind.BORN:
                        alive.add(step.storage)
                        waiting.discard(step.storage)
                    elif step.kind is EventKind.GONE:
                        alive.discard(step.storage)
                elif not interval.is_of_block:
                    outside += step.change
        return constants, others, unborn

    def _constant_peak(self, interval: Interval) -> int:
        state = LiveState(self._constants[interval], self._others[interval])
        state.advance(self._model.events(interval, 0))
        return state.peak


def _allocates(event: PrivateRun | Change) -> bool:
    return event.peak > 0 if isinstance(event, PrivateRun) else event.kind in (EventKind.BORN, EventKind.HELD)


def last_pass(intervals: Sequence[Interval]) -> list[int]:
    """Returns the calls of the last forwards without a backward between them: of the last batch of a step.

    >>> forwards = [Interval(Phase.FORWARD, call) for call in range(4)]
    >>> backwards = [Interval(Phase.BACKWARD, call) for call in range(4)]
    >>> last_pass([*forwards[:2], backwards[1], backwards[0], *forwards[2:], backwards[3], backwards[2]])
    [2, 3]
    """
    calls: list[int] = []
    is_over = False
    for phase, call in intervals:
        if phase is Phase.BACKWARD:
            is_over = True
        elif phase is Phase.FORWARD:
            calls = [call] if is_over else [*calls, call]
            is_over = False
    return calls
