"""Predicts the level of live bytes under any plan, from one row for each kind of equal calls and each option.

A row says what the call *retains* from its forward to its backward, relative to the *base*, the step in which every
block is recomputed, and its *rise* in forward and in backward::

    level under a plan   =  level of the base + what the open calls retain      + what near runs were off by
    peak of an interval  =  level at its start + rise                           + what near runs were off by

So the effect of an option does not depend on other blocks, and a plan is a choice of one row for each block. What
depends on them, such as a cache that lives for as long as one recomputed block holds it, shows when a plan runs: the
levels of a plan that has run are those of the run, and others count in what runs near to them were off by.

Levels are all that is read: no storages, and no holders. So they may come from a counter or from an allocator. That
every block of the base is recomputed matters: each then holds its arguments, as it does under every rule but ``keep``.
Joined runs need one more number, the bytes of the tensor that a block passes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeAlias, TypeVar, final

from graphckpt.extras import LazyPackage
from graphckpt.planning.intervals import Interval, LevelLog, LevelSpan, Phase, StepReadings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
else:
    np = LazyPackage("numpy", "plan")

_Value = TypeVar("_Value")
KEEP_NUMBER = 0
"""The number of the option that keeps everything."""

Runs: TypeAlias = "tuple[tuple[int, int], ...]"
"""The first block of each joined run, and the one after its last."""


class IntervalLevel(NamedTuple):
    """Live bytes in one interval of the step under a plan."""

    interval: Interval
    start: int
    peak: int

    def raised(self, num_bytes: int) -> IntervalLevel:
        return IntervalLevel(self.interval, self.start + num_bytes, self.peak + num_bytes)


class Rise(NamedTuple):
    """The highest level during a call, above the level at its start, in bytes."""

    forward: int
    backward: int


SampledRun: TypeAlias = "tuple[StepReadings, Sequence[int]]"
"""The levels of a step, and the option of each of its blocks."""


@final
class Calls:
    """The calls of a base, in the order of their forwards.

    Args:
        base: The levels of the step with every block recomputed.
        block_of_call: The number of the block of each call.
        classes: The class of each block.
        dropped: The calls whose graph is freed without a backward.
    """

    def __init__(
        self, base: LevelLog, block_of_call: Sequence[int], classes: Sequence[int], dropped: Collection[int]
    ) -> None:
        self.base = base
        self.dropped = dropped
        self.block_of_call = block_of_call
        places: Counter[int] = Counter()
        self.kinds: list[tuple[int, int]] = []
        """By call: the class of its block, and how many calls of the block came before."""
        for block in block_of_call:
            self.kinds.append((classes[block], places[block]))
            places[block] += 1
        of_blocks = [interval for interval in self.base if interval.is_of_block]
        self.before = {
            later.call: earlier.call
            for earlier, later in pairwise(of_blocks)
            if earlier.phase is later.phase is Phase.FORWARD
        }
        """By call: the one whose forward came before, if no backward lies between."""
        self.followed = frozenset(self.before.values())
        self.passes: list[list[int]] = []
        """The calls of forwards without a backward between them: of one batch of a step, or of one of its losses."""
        for call in range(len(block_of_call)):
            if call not in self.before:
                self.passes.append([])
            self.passes[-1].append(call)
        self.heads: dict[Interval, None] = {}
        """The intervals of the code between the forwards and the backwards of a batch."""
        is_forward, before = False, Interval(Phase.BEFORE)
        for interval in self.base:
            if interval.phase is Phase.BACKWARD and interval.call not in dropped:
                if is_forward and not before.is_of_block:
                    self.heads[before] = None
                is_forward = False
            is_forward, before = is_forward or interval.phase is Phase.FORWARD, interval
        self.dropped_with: dict[Interval, list[int]] = {}
        """By the backward of a call whose graph is dropped: all calls that are dropped with it."""
        group: list[int] = []
        for interval in self.base:
            if interval.phase is Phase.BACKWARD and interval.call in dropped:
                group.append(interval.call)
                self.dropped_with[interval] = group
            else:
                group = []
        self.base_added = self.added(self.base)

    def added(self, spans: LevelLog) -> list[int]:
        """Returns, by call, how much the level rises from its forward to that of the next block.

        That of the last one of a batch ends before the head.
        """
        forwards = [spans[Interval(Phase.FORWARD, call)] for call in range(len(self.kinds))]
        ends = {earlier: forwards[later].start for later, earlier in self.before.items()}
        return [ends.get(call, span.end) - span.start for call, span in enumerate(forwards)]


@final
class _Readings(Generic[_Value]):
    """Values by call and option. A call without a reading has the one of an equal call."""

    def __init__(self, calls: Calls, default: _Value) -> None:
        self._kinds = calls.kinds
        self._default = default
        self._of_call: dict[Any, tuple[int, _Value]] = {}
        self.of_kind: dict[Any, tuple[int, _Value]] = {}

    def add(self, call: int, option: Hashable, value: _Value, quality: int = 0) -> None:
        """Adds a reading, unless there is one that is as good."""
        better = quality, value
        for readings, key in ((self._of_call, call), (self.of_kind, self._kinds[call])):
            before = readings.get((key, option))
            readings[key, option] = better if before is None or quality > before[0] else before

    def find(self, call: int, option: Hashable) -> _Value | None:
        value = self._of_call.get((call, option)) or self.of_kind.get((self._kinds[call], option))
        return None if value is None else value[1]

    def get(self, call: int, option: Hashable) -> _Value:
        value = self.find(call, option)
        return self._default if value is None else value


def _base_of(runs: Iterable[SampledRun], base_option: int, classes: Sequence[int]) -> tuple[StepReadings, Calls]:
    """Returns the run with every block recomputed, and its calls."""
    step = next(step for step, plan in runs if set(plan) == {base_option})
    return step, Calls(step.levels, step.block_of_call, classes, step.dropped)


@final
class LevelTable:
    """The levels of a step under any plan.

    Args:
        calls: The calls of the step.
        base_option: The number of the option that each block has in the base.
    """

    def __init__(self, calls: Calls, base_option: int) -> None:
        self.calls = calls
        self.base_option = base_option
        self.block_of_call = calls.block_of_call
        self.passed_on: Sequence[int] = [0] * len(calls.kinds)
        """By call: the bytes of its arguments that the call before has returned, which hooks see."""
        self.of_blocks: Mapping[Interval, int] = {}
        """Those of the base: see :class:`~graphckpt.planning.level_meter.StepReadings`."""
        self.rises = _Readings(calls, Rise(0, 0))
        self.retained = _Readings(calls, 0)
        self.of_pairs = _Readings(calls, 0)
        """What a call retains after one that is not recomputed: by the class of that one, its option, and the own."""
        self.late = _Readings(calls, 0)
        """What a call retains more from the head on, the code between the forwards and the backwards of a batch."""
        self.output = _Readings(calls, 0)
        """What a call retains more in its own backward, as a block that saves its output: the next one, which holds the
        same as its argument, releases it before."""
        self._after = {earlier: later for later, earlier in calls.before.items()}
        self.head_shares: dict[Interval, float] = {}
        """By head: the share of what is late that is there at its peak; by default all."""
        self._sampled: Sequence[SampledRun] = ()
        self._levels_of: dict[_Marks, Sequence[IntervalLevel]] = {}
        """The levels of the runs under plans."""
        self._rests: dict[_Marks, NDArray[np.int64]] = {}
        """What the sum of rows was off by in these runs: start and peak, by interval of the base."""
        self._proposed: dict[_Marks, None] = {}
        """The plans that were proposed, not sampled."""

    @classmethod
    def of_runs(cls, runs: Sequence[SampledRun], base_option: int, classes: Sequence[int]) -> Self:
        """Reads a table from sampled runs.

        Args:
            runs: the step with every block recomputed, and with any other options. Each option of each class is in one
                of these runs, or of those of :meth:`read_part`.
            base_option: the number of the option that each block has in the base.
            classes: the class of each block; blocks of one class are equal.
        """
        base, calls = _base_of(runs, base_option, classes)
        table = cls(calls, base_option)
        table.passed_on, table.of_blocks = base.passed_on or table.passed_on, base.of_blocks
        table._read(runs)
        return table

    def read_part(self, runs: Sequence[SampledRun], classes: Sequence[int]) -> None:
        """Reads runs of some of the blocks, one of them with each of these recomputed."""
        shorter = LevelTable(_base_of(runs, self.base_option, classes)[1], self.base_option)
        shorter.rises.of_kind, shorter.retained.of_kind = self.rises.of_kind, self.retained.of_kind
        shorter.of_pairs.of_kind, shorter.late.of_kind = self.of_pairs.of_kind, self.late.of_kind
        shorter.output.of_kind = self.output.of_kind
        shorter._read(runs)
        self._read_heads()

    def _read(self, runs: Sequence[SampledRun]) -> None:
        calls = self.calls
        for step, plan in runs:
            added = zip(calls.added(step.levels), calls.base_added, strict=True)
            for call, (num_bytes, base_bytes) in enumerate(added):
                self._add_retained(call, plan, num_bytes - base_bytes)
        # What is freed or released later than at the next border shows in backward, as a difference from these sums.
        # All differences are read before the first one changes the sums.
        excesses = [
            {
                row.interval.call: step.levels[row.interval].start - row.start
                for row in self._sums(plan, ())
                if row.interval.phase is Phase.BACKWARD and row.interval in step.levels
            }
            for step, plan in runs
        ]
        for (step, plan), excess in zip(runs, excesses, strict=True):
            for call in range(len(self.block_of_call)):
                self._read_backward(step.levels, call, plan, excess)
        self._sampled = runs
        self._read_heads()

    def _read_heads(self) -> None:
        """Reads which share of what is late is there at the peaks of heads, as far as it is known what is late."""
        self.head_shares.clear()
        for step, plan in self._sampled:
            without = {row.interval: row.peak for row in self._sums(plan, (), head_share=0.0)}
            for row in self._sums(plan, (), head_share=1.0):
                late = row.peak - without[row.interval]
                if row.interval in self.calls.heads and row.interval in step.levels and late:
                    share = (step.levels[row.interval].peak - without[row.interval]) / late
                    self.head_shares.setdefault(row.interval, min(1.0, max(0.0, share)))

    def _read_backward(self, spans: LevelLog, call: int, plan: Sequence[int], excess: Mapping[int, int]) -> None:
        options, before, after = self._options(plan), self.calls.before.get(call), self._after.get(call)
        option, forward = options[call], spans[Interval(Phase.FORWARD, call)]
        backward = spans.get(Interval(Phase.BACKWARD, call), LevelSpan(0, 0, 0))
        is_alone = after is None or options[after] == self.base_option
        if call in excess and (before is None or before in excess) and (after is None or after in excess):
            own = excess[call if after is None else after] - (0 if before is None else excess[before])
            if is_alone and (before is None or options[before] == self.base_option):
                self.late.add(call, option, own, after is not None)
            if is_alone:  # of the last call, all is late
                output = 0 if after is None else max(0, excess[call] - excess[after])
                self.output.add(call, option, output, after is not None)
        rise = Rise(forward.peak - forward.start, backward.peak - backward.start)
        self.rises.add(call, option, rise, 2 * is_alone + (after is not None))

    def _add_retained(self, call: int, plan: Sequence[int], num_bytes: int) -> None:
        options, is_followed = self._options(plan), call in self._after
        before = self._before(options, call)
        # What a block before frees late, or holds of what this one would free, is in the readings of this one: best is
        # one after a recomputed block.
        is_alone = before in (None, self.base_option)
        self.retained.add(call, options[call], num_bytes, 2 * is_alone + is_followed)
        if not is_alone:
            kind = self.calls.kinds[self.calls.before[call]][0]
            self.of_pairs.add(call, (kind, before, options[call]), num_bytes, is_followed)

    def _before(self, options: Sequence[int], call: int) -> int | None:
        before = self.calls.before.get(call)
        return None if before is None else options[before]

    def add_run(
        self, levels: Iterable[IntervalLevel], plan: Sequence[int], runs: Runs = (), *, is_sample: bool = False
    ) -> None:
        """Adds the levels of the step as it ran under a plan, which are the levels of that plan from now on."""
        marks, rows = _marks(plan, runs), list(levels)
        by_interval = {level.interval: level for level in rows}
        pairs = ((by_interval.get(row.interval, row), row) for row in self._sums(plan, runs))
        self._rests[marks] = np.array([(run.start - row.start, run.peak - row.peak) for run, row in pairs], np.int64)
        self._levels_of[marks] = rows
        if not is_sample:
            self._proposed[marks] = None

    def add_rest(self, table: LevelTable, plan: Sequence[int], scale: float) -> None:
        """Adds what a run of a step with another batch exceeded its rows by, for a plan that has not run in this step.

        Args:
            table: That of the other step, which has the same calls.
            plan: The options of its blocks.
            scale: How much more a call of this step retains.
        """
        marks, others = _marks(plan, ()), dict(zip(table.calls.base, table.rest(plan), strict=True))
        if marks not in self._rests:
            rests = [np.maximum(0, others[interval]) if interval in others else [0, 0] for interval in self.calls.base]
            self._rests[marks] = np.ceil(scale * np.array(rests)).astype(np.int64)
            self._proposed[marks] = None
            # Plans between that one and the base, which is off by nothing, have a share of it.
            base = _marks([self.base_option] * len(plan), ())
            self._rests.setdefault(base, np.zeros_like(self._rests[marks]))
            self._proposed[base] = None

    def rest(self, plan: Sequence[int], runs: Runs = ()) -> NDArray[np.int64]:
        """Returns what runs near to a plan were off by: bytes at the start and at the peak of each interval.

        A run under a proposed plan weighs as much as the square of the number of blocks that differ is small. What the
        sampled runs were off by is theirs alone: all blocks keep everything in one of them, or none does.
        """
        marks = _marks(plan, runs)
        proposed = [marks] if marks in self._rests else [*self._proposed]
        if not proposed:
            return np.zeros((len(self.calls.base), 2), np.int64)
        distances = np.maximum(0.01, (np.array(proposed) != np.array(marks)).sum(1))
        rests = np.array([self._rests[each] for each in proposed])
        return np.rint(np.average(rests, axis=0, weights=1.0 / distances**2)).astype(np.int64)

    def adds_up(self, tolerance: float) -> bool:
        """Whether rows alone explain all runs: to a share of their peaks, and alike for equal calls beside others."""
        peaks = {marks: max(level.peak for level in levels) for marks, levels in self._levels_of.items()}
        alone, pairs = self.retained.of_kind, self.of_pairs.of_kind.items()
        differences = [abs(value - alone[kind, option][1]) for (kind, (_, _, option)), (_, value) in pairs]
        return max(differences, default=0) <= tolerance * min(peaks.values()) and all(
            np.abs(rest).max() <= tolerance * peaks[marks] for marks, rest in self._rests.items()
        )

    def lowest_rest(self) -> NDArray[np.int64]:
        """Returns, by interval, the least that any run was off by."""
        return (
            np.array([*self._rests.values()]).min(0) if self._rests else np.zeros((len(self.calls.base), 2), np.int64)
        )

    def peak(self, plan: Sequence[int], runs: Runs = ()) -> int:
        """Returns the most live bytes, for the number of the option of each block; see :meth:`levels`."""
        return max(level.peak for level in self.levels(plan, runs))

    @property
    def static_bytes(self) -> int:
        """Live bytes when the first block begins: weights, optimizer state, inputs, gradients of earlier steps."""
        return next(span.start for interval, span in self.calls.base.items() if interval.is_of_block)

    def saved_bytes(self, plan: Sequence[int]) -> int:
        """Returns what the blocks save, and what they return to one another, over all calls."""
        added = self.calls.base_added
        return sum(max(0, added[c] + self.retained.get(c, option)) for c, option in enumerate(self._options(plan)))

    def levels(self, plan: Sequence[int], runs: Runs = ()) -> Iterator[IntervalLevel]:
        """Returns the levels of a step, interval by interval.

        The blocks of ``runs`` are recomputed as one; each has the option of the base in ``plan``.
        """
        if (rows := self._levels_of.get(_marks(plan, runs))) is not None:
            yield from rows
            return
        for row, (start, peak) in zip(self._sums(plan, runs), self.rest(plan, runs).tolist(), strict=True):
            yield IntervalLevel(row.interval, row.start + start, row.peak + peak)

    def beyond(self, plan: Sequence[int], runs: Runs = ()) -> NDArray[np.int64]:
        """Returns by how much the peaks under a plan are above those of a chain, by interval of the base.

        In a chain a call retains from its forward on what it does from the head on, if that is more.
        """
        pairs = zip(self._sums(plan, runs), self._sums(plan, runs, is_chain=True), strict=True)
        return self.rest(plan, runs)[:, 1] + np.array([row.peak - other.peak for row, other in pairs], np.int64)

    def _sums(
        self, plan: Sequence[int], runs: Runs, *, is_chain: bool = False, head_share: float | None = None
    ) -> Iterator[IntervalLevel]:
        """Returns the levels that follow from the rows of a plan alone."""
        calls, options = self.calls, self._options(plan)
        run_of = {call: run for run in self._joined_calls(runs) for call in run}
        late = [self._late_after(c, option, self._before(options, c)) for c, option in enumerate(options)]
        behind_head: set[int] = set()
        retained: dict[int, int] = {}
        total = 0  # the sum of `retained`
        is_forward = False
        for interval, base in calls.base.items():
            if interval.phase is Phase.FORWARD:
                is_forward = True
            elif is_forward and interval.phase is Phase.BACKWARD and interval.call not in calls.dropped:
                is_forward = False
                for each in retained.keys() - behind_head:
                    retained[each] += 0 if is_chain else late[each]
                total = sum(retained.values())
                behind_head.update(retained)
            total -= sum(retained.pop(each, 0) for each in calls.dropped_with.get(interval, ()))  # freed by then
            call, level, rise = interval.call, base.start + total, base.peak - base.start
            # Levels are read at the start of an interval: what a call adds or frees in it shows in the next one, and
            # before that in the rise.
            if interval.phase is Phase.FORWARD:
                rise = self.rises.get(call, options[call]).forward
                retained[call] = self.retained_after(call, options[call], self._before(options, call))
                retained[call] += max(0, late[call]) if is_chain else 0
                if call in run_of and call > run_of[call][0]:  # it frees its argument
                    retained[call] -= self.passed_on[call]
                total += retained[call]
            elif interval.phase is Phase.BACKWARD:
                option = options[call]
                rise = self.rises.get(call, option).backward
                # The last call of a joined run recomputes all of it; from then on the others are as kept ones, and only
                # differ in that they hold their arguments.
                if call in run_of and call not in calls.dropped:
                    if call == run_of[call][-1]:
                        rise = self.recompute(run_of[call], retained, rise)
                        total = sum(retained.values())
                    else:
                        option, rise = KEEP_NUMBER, self.rises.get(call, KEEP_NUMBER).backward
                level += self.output.get(call, option)
                total -= retained.pop(call, 0)
            elif interval in calls.heads and not is_chain:
                share = self.head_shares.get(interval, 1.0) if head_share is None else head_share
                rise += round(share * sum(late[each] for each in retained.keys() - behind_head))
            yield IntervalLevel(interval, level, level + rise)

    def retained_after(self, call: int, option: int, before: Hashable) -> int:
        """Returns what a call retains under an option, after a call under the option ``before``."""
        alone, earlier = self.retained.get(call, option), self.calls.before.get(call)
        if earlier is None or before in (None, self.base_option):
            return alone
        kind = self.calls.kinds[earlier][0]
        reading = self.of_pairs.find(call, (kind, before, option))
        if reading is not None:
            return reading
        # No run has shown the two. What the block before has returned and holds, this one does not free; and what is
        # freed of a block that is recomputed while the next one runs, is not freed of that one.
        alone = max(0, alone) if self.output.get(earlier, before) else alone
        return alone + self.of_pairs.get(call, (kind, before, self.base_option))

    def _late_after(self, call: int, option: int, before: int | None) -> int:
        """Returns what a call retains more from the head on, which frees no tensor that the block before holds."""
        late, earlier = self.late.get(call, option), self.calls.before.get(call)
        is_held = earlier is not None and before is not None and self.output.get(earlier, before) > 0
        return max(0, late) if is_held else late

    def recompute(self, run: range, retained: dict[int, int], rise: int) -> int:
        """Recomputes all calls of a joined run but the last: they then retain what kept ones do, and their arguments.

        Returns the rise in the backward of the last one, which is recomputed as alone.
        """
        level = peak = 0
        for call in run[:-1]:
            peak = max(peak, level + self.rises.get(call, KEEP_NUMBER).forward)
            retained[call] = self.retained_after(call, KEEP_NUMBER, KEEP_NUMBER)
            retained[call] += max(0, self.late.get(call, KEEP_NUMBER))  # nothing is freed at a head
            level += retained[call] + self.passed_on[call + 1]
        return max(peak, level + rise)

    def _options(self, plan: Sequence[int]) -> list[int]:
        return [plan[block] for block in self.block_of_call]

    def _joined_calls(self, runs: Runs) -> Iterator[range]:
        for first, end in runs:
            for call, block in enumerate(self.block_of_call):
                if block == first:
                    # The blocks of a run are called one after another, or they could not be joined.
                    yield range(call, call + end - first)


_Marks: TypeAlias = tuple[int, ...]


def _marks(plan: Sequence[int], runs: Runs) -> _Marks:
    joined = {block for first, end in runs for block in range(first + 1, end)}
    return tuple(-1 if block in joined else option for block, option in enumerate(plan))
