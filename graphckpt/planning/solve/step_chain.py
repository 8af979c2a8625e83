"""A measured step as a chain of blocks, in which each option depends on what earlier blocks hold."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from math import fsum
from typing import TYPE_CHECKING, final

from graphckpt.planning.model.events import EventKind, Interval, Phase
from graphckpt.planning.model.joined_runs import LENGTHS
from graphckpt.planning.model.simulate import Change, EventSeq, LiveState
from graphckpt.planning.solve.chain import COVERED, Move

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence

    from graphckpt.planning.model.joined_runs import JoinedRuns, Runs
    from graphckpt.planning.model.measured_step import MeasuredStep

Held = frozenset[int]

_Release = int | tuple[int, int, int] | None
"""Where a storage is released: the interval, the place in it, and the bytes; itself if unknown; ``None``: too late."""


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
        self._constants, self._others = self._simulate_constants()
        self._until: dict[Interval, Sequence[Interval]] = {}
        self._stretches: dict[EventSeq, EventSeq] = {}
        self._order = {interval: number for number, interval in enumerate(model.intervals)}
        self._last_use = self._last_uses(len(measured.options))
        self._release_of = self._releases()
        self._released: dict[_Release, list[int]] = {}
        for storage, release in self._release_of.items():
            self._released.setdefault(release, []).append(storage)
        first = self._order[Interval(Phase.FORWARD, self._calls[0])]
        last = Interval(Phase.BACKWARD, self._calls[0])
        after = self._order[last] if last in self._order else len(model.intervals) - 1
        around = [*model.intervals[:first], *model.intervals[after + 2 :]]
        self.fixed_peak = max((self._constant_peak(interval) for interval in around), default=0)

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
        """Returns the option of each block of the model, in its order."""
        plan = [0] * len(self._seconds)
        for first, end, choice in self._decided(choices):
            for block in range(first, end):
                plan[self.blocks[block]] = choice if end - first == 1 else self._full
        return tuple(plan)

    def runs(self, choices: Sequence[int]) -> Runs:
        """Returns which blocks of the model are joined."""
        return tuple(
            (self.blocks[first], self.blocks[first] + end - first)
            for first, end, _ in self._decided(choices)
            if end - first > 1
        )

    def move(self, block: int, option: int, held: Hashable) -> Move | None:
        """Returns the effect of an option if earlier blocks hold ``held``; a run of blocks is one long block."""
        assert isinstance(held, frozenset)
        length = self._length(block, option)
        chosen = option if length == 1 else self._full
        numbers = self.blocks[block : block + length]
        if any(self._fixed.get(n, chosen) != chosen or (n, chosen) in self._banned for n in numbers):
            return None
        calls = range(self._calls[block], self._calls[block] + length)
        steps: list[tuple[Interval, Sequence[EventSeq]]]
        if length == 1:
            own, handed = self._model.holds(calls[0], chosen), frozenset[int]()
            steps = [(i, (self._model.steps(i, chosen),)) for i in _intervals(calls[0]) if i in self._order]
        else:
            assert self._joined_runs is not None
            own, handed = (
                self._joined_runs.holds(calls),
                self._joined_runs.inputs(calls),
            )  # freed, and recomputed
            steps = list(self._joined_runs.steps(calls))
        first = Interval(Phase.FORWARD, calls[0])
        state = LiveState(self._constants[first], self._others[first], held)
        for interval, parts in steps[:length]:
            self._simulate(state, interval, parts)
        after, now_held = self._next_start(Interval(Phase.FORWARD, calls[-1])), held | own
        peak = 0
        if steps[length:]:
            backward = Interval(Phase.BACKWARD, calls[-1])
            level = self._constants[backward] + self._unseen(now_held, backward) - self._unseen(now_held, after)
            state_back = LiveState(level, self._others[backward] - handed, held)
            state_back.hold(own)
            for interval, parts in steps[length:]:
                self._simulate(state_back, interval, parts)
            peak = state_back.peak
        kept = state.level - self._constants[after]
        still = self._still_of_use(now_held, block + length - 1, after)
        return Move(state.peak, kept, peak, still, length=length)

    def _simulate(self, state: LiveState, interval: Interval, parts: Sequence[EventSeq]) -> None:
        """Simulates an interval of a block, and those before the next block."""
        *again, own = parts
        for steps in again:
            state.advance(steps)
        stretch = self._stretches.get(own)
        if stretch is None:
            others = (self._model.steps(each, 0) for each in self._until_next(interval)[1:])
            stretch = self._stretches[own] = self._model.steps_of(step for each in (own, *others) for step in each)
        state.advance(stretch)

    @property
    def _full(self) -> int:
        return 0 if self._joined_runs is None else self._joined_runs.full

    def _length(self, block: int, option: int) -> int:
        """Returns the number of blocks that an option includes."""
        number = option - len(self._seconds[self.blocks[block]])
        return 1 if number < 0 else LENGTHS[number]

    def _decided(self, choices: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Yields the first block of each choice, the block after its last, and the choice."""
        for block, choice in enumerate(choices):
            if choice != COVERED:
                yield block, block + self._length(block, choice), choice

    def head_peak(self, held: Hashable) -> int:
        """Returns 0: the interval between the last forward and the first backward counts for the last block."""
        del held
        return 0

    def _until_next(self, interval: Interval) -> Sequence[Interval]:
        """Returns an interval of a block and those after it, up to the next one of a block."""
        found = self._until.get(interval)
        if found is None:
            number = self._order[interval]
            end = number + 1
            intervals = self._model.intervals
            while end < len(intervals) and not (
                intervals[end].is_of_block or intervals[end].phase in (Phase.OPTIMIZER, Phase.BEFORE)
            ):
                end += 1
            found = self._until[interval] = intervals[number:end]
        return found

    def _next_start(self, interval: Interval) -> Interval:
        *_, last = self._until_next(interval)
        number = self._order[last] + 1
        return self._model.intervals[number] if number < len(self._model.intervals) else last

    def _unseen(self, held: Iterable[int], at: Interval) -> int:
        """Returns the bytes that are held by blocks only at the start of an interval."""
        others = self._others[at]
        return sum(self._model.base.sizes.get(storage, 0) for storage in held if storage not in others)

    def _still_of_use(self, held: Held, block: int, after: Interval) -> Held:
        """Drops storages that later blocks do not use and only blocks hold: they count as private from here on.

        What later blocks do not use and other code holds as well matters only where that code releases it. Of such
        storages with equal bytes that are released at one place, the number matters, and the first ones stand for them.
        """
        others = self._others[after]
        used = {s for s in held if self._last_use.get(s, -1) > block}
        releases = Counter(self._release_of.get(s, s) for s in held - used if s in others)
        unused = (s for release, count in releases.items() for s in self._first_unused(release, count, block, others))
        return frozenset(used.union(unused))

    def _first_unused(self, release: _Release, count: int, block: int, others: Held) -> Iterator[int]:
        """Yields ``count`` storages of a release which code outside of blocks holds and no later block uses."""
        if release is None:
            return iter(())
        alike = self._released.get(release, (release,))
        return islice((s for s in alike if s in others and self._last_use.get(s, -1) <= block), count)

    def _releases(self) -> dict[int, _Release]:
        """Returns where code outside of blocks releases each storage: the interval, the place there, and the bytes.

        Releases have one place if nothing is allocated between them. After the backward of the first block the place
        does not matter.
        """
        model = self._model
        end = self._order.get(Interval(Phase.BACKWARD, self._calls[0]), len(model.intervals))
        releases: dict[int, _Release] = dict.fromkeys(s for s in model.base.shared if not model.base.is_gone(s))
        for number, interval in enumerate(model.intervals):
            allocations = 0
            for step in () if interval.is_of_block else model.steps(interval, 0):
                if isinstance(step, Change) and step.kind is EventKind.GONE:
                    releases[step.storage] = (number, allocations, step.num_bytes) if number < end else None
                else:
                    allocations += isinstance(step, Change) or step.peak > 0
        return releases

    def _last_uses(self, num_options: int) -> dict[int, int]:
        uses: dict[int, int] = {}
        for block, call in enumerate(self._calls):
            for option in range(num_options):
                for storage in self._model.holds(call, option):
                    uses[storage] = block
        return uses

    def _simulate_constants(self) -> tuple[dict[Interval, int], dict[Interval, frozenset[int]]]:
        """Returns, for the start of each interval, the bytes alive under any plan, and the shared storages in them."""
        constants: dict[Interval, int] = {}
        others: dict[Interval, frozenset[int]] = {}
        sizes = self._model.base.sizes
        alive: set[int] = set()
        outside = 0
        for interval in self._model.intervals:
            constants[interval] = outside + sum(sizes.get(storage, 0) for storage in alive)
            others[interval] = frozenset(alive)
            for step in self._model.steps(interval, 0):
                if isinstance(step, Change):
                    if step.kind is EventKind.BORN:
                        alive.add(step.storage)
                    elif step.kind is EventKind.GONE:
                        alive.discard(step.storage)
                elif not interval.is_of_block:
                    outside += step.change
        return constants, others

    def _constant_peak(self, interval: Interval) -> int:
        state = LiveState(self._constants[interval], self._others[interval])
        state.advance(self._model.steps(interval, 0))
        return state.peak


def _intervals(call: int) -> tuple[Interval, Interval]:
    return Interval(Phase.FORWARD, call), Interval(Phase.BACKWARD, call)


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
