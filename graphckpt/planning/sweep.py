"""Measures a step under each option of each block, in as few runs as possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import median
from typing import NamedTuple, final

from graphckpt.errors import PlanError
from graphckpt.planning.candidates import FULL, KEEP, Option
from graphckpt.planning.intervals import Interval, Phase, StepReadings
from graphckpt.planning.level_meter import block_classes
from graphckpt.planning.levels import IntervalLevel, LevelTable, SampledRun
from graphckpt.planning.measured_step import MeasuredStep, StepSample
from graphckpt.planning.op_levels import with_levels
from graphckpt.planning.plan_group import PlanGroup
from graphckpt.planning.step_clock import Blocks, PathError
from graphckpt.planning.steps import FakeStep, RealStep
from graphckpt.rules.basic import Full
from graphckpt.rules.selective import Selective

_OF_BLOCKS = Phase.FORWARD, Phase.BACKWARD
_MOST_TIMED = 16
"""The number of equal blocks whose ops are timed one by one: the fastest of each op counts."""
_ADDITIVE = 0.01  # of the peak: what rows may be off by, without runs that show why


def measure(
    step: RealStep | FakeStep,
    blocks: Blocks,
    options: Sequence[Option],
    progress: Callable[[int, int], None] | None = None,
    group: PlanGroup | None = None,
) -> MeasuredStep:
    """Measures every option on every block. Equal blocks share the options, so that each option runs on one of them.

    All processes of ``group`` measure the step, and use the levels of one of them.
    """
    assert options[0] is KEEP
    group = group or PlanGroup()
    every = range(len(blocks.names))

    def shared(sample: StepSample) -> StepSample:
        group.elect_leader(sample.peak_bytes)
        if group.size == 1:
            return sample
        message = group.from_leader(sample.levels.to_message() if group.rank == group.leader else None)
        return replace(sample, levels=StepReadings.from_message(message), peak_bytes=group.max(sample.peak_bytes))

    run = shared(step.sample(blocks, [KEEP] * len(every)))
    # First with everything kept, which shows which blocks are equal, and so how few runs show all options. Then the
    # base of the table, with every block recomputed: where `full` is not an option, it is number -1, which no plan has.
    _check_calls(run.levels)
    classes = block_classes(blocks, run.levels, by_bytes=True)
    recomputed = next((o for o in options if o.rule == Full() and not (o.is_far or o.is_partitioned)), FULL)
    base_option = next((number for number, o in enumerate(options) if o is recomputed), -1)
    base = shared(step.sample(blocks, [recomputed] * len(every)))

    def measure_options(numbers: Sequence[int], *, is_shorter: bool) -> MeasuredStep:
        collector = SampleCollector(classes, base_option)  # of this try: options of another may have other numbers
        collector.add(run, every, [0] * len(every))
        collector.add(base, every, [base_option] * len(every))
        subset = Blocks([(blocks.names[number], blocks.modules[number]) for number in numbers])
        kinds = [classes[number] for number in numbers]
        timed = _excerpt(kinds, _MOST_TIMED)
        few = Blocks([(subset.names[number], subset.modules[number]) for number in timed])
        # `some` has an option for each number; `of_class` has them by class, with its levels of `selective`.
        some, of_class = with_levels(options, [kinds[n] for n in timed], lambda: step.ops(few), group.from_leader)
        others = [number for number in range(1, len(some)) if number != base_option]
        plain, alternating = list(_turns(kinds, others, base_option)), list(_turns(kinds, [0, *others], base_option, 2))
        if is_shorter and plain:  # to compare them with
            plain.insert(0, [base_option] * len(kinds))

        def adds_up() -> bool:
            return base_option < 0 or is_shorter or collector.table().adds_up(_ADDITIVE)

        # Where rows do not add up, a block depends on those next to it: every second one is recomputed then.
        rounds = [plain, alternating] if adds_up() else [alternating]
        done, total = 0, len(rounds[0]) + 1
        for number, turns in enumerate(rounds):
            if number:
                if adds_up():
                    break
                total += len(turns)
            for turn in turns:
                done += 1
                if progress is not None:
                    progress(done, total)
                chosen = [
                    recomputed if o == base_option else of_class[kind][o] for kind, o in zip(kinds, turn, strict=True)
                ]
                collector.add(shared(step.sample(subset, chosen)), numbers, turn, is_shorter=is_shorter)
        if progress is not None:
            progress(total, total)
        return collector.measured(blocks, some, of_class, run)

    if isinstance(step, FakeStep):  # the times of a real step are measured on many blocks
        enough = _excerpt(classes, len(options))  # to measure each option in a short run
        with step.restricted_to(blocks, enough) as is_shorter, suppress(Exception):  # it may need all of its blocks
            if is_shorter:
                return measure_options(enough, is_shorter=True)
    return measure_options(every, is_shorter=False)


def _check_calls(levels: StepReadings) -> None:
    if not levels.block_of_call:
        raise PlanError("no block ran with gradients enabled · fix: run forward and backward of this model in step_fn")
    if not levels.has_backward:
        raise PlanError("no backward went through the blocks · fix: call loss.backward() in step_fn")


def _excerpt(classes: Sequence[int], limit: int) -> list[int]:
    """Returns the first blocks of each class, at most ``limit``."""
    return [number for number, kind in enumerate(classes) if classes[:number].count(kind) < limit]


def _turns(classes: Sequence[int], others: Sequence[int], base_option: int, stride: int = 1) -> Iterator[list[int]]:
    """Yields the option of each block in each run, until every class has had each of ``others``.

    With a ``stride`` of 2 each second block is recomputed: in the first run the second block, in the next the first.
    """
    # Five equal blocks and options 1 to 3 take one run: 1, 2, 3, 1, 2. A class with one block needs a run for each
    # option: the smallest class sets the number of runs.
    places: Counter[int] = Counter()
    run = 0
    while min(places[kind] for kind in classes) < len(others) or 0 < run < stride:
        turn = [base_option] * len(classes)
        for number in range(run % stride, len(classes), stride):
            turn[number] = others[places[classes[number]] % len(others)]
            places[classes[number]] += 1
        yield turn
        run += 1


class _Effect(NamedTuple):
    """The effect of an option on a block."""

    added: tuple[int, ...]
    """By call: the bytes by which the level rises in forward."""
    allocated: tuple[tuple[int, ...], ...]
    """By phase and call: the bytes that it allocates; not every allocator counts them."""
    far_bytes: int
    ahead_bytes: tuple[int, ...]
    """By call."""


@final
class SampleCollector:
    """Collects the levels and seconds of sampled runs; the first one is that to which others are compared."""

    def __init__(self, classes: Sequence[int], base_option: int) -> None:
        self.classes = classes
        self._base_option = base_option
        self._runs: list[SampledRun] = []
        self._peaks: list[int] = []
        """Of these runs."""
        self._shorter_runs: list[SampledRun] = []
        self._shorter_classes: list[int] = []
        self._seconds: dict[tuple[int, int, Phase], list[float]] = {}
        """Seconds by class, option and phase."""
        self._extra: dict[tuple[int, int, Phase], list[float]] = {}
        """The same, minus the seconds of the block without a policy in a run next to that one."""
        self._effects: dict[tuple[int, int], _Effect] = {}
        """By class and option."""

    def add(
        self,
        sample: StepSample,
        numbers: Sequence[int],
        turn: Sequence[int],
        *,
        is_shorter: bool = False,
    ) -> None:
        """Adds a run in which block ``numbers[n]`` had option ``turn[n]``; with ``is_shorter`` no other blocks ran."""
        levels = sample.levels
        order = [numbers[block] for block in levels.block_of_call]
        calls: dict[int, list[int]] = {number: [] for number in numbers}
        for call, block in enumerate(order):
            calls[block].append(call)
        full_order = self._runs[0][0].block_of_call if self._runs else order
        if order != [block for block in full_order if block in calls]:
            raise PathError([order, full_order])
        (self._shorter_runs if is_shorter else self._runs).append((levels, turn))
        if is_shorter:
            self._shorter_classes = [self.classes[number] for number in numbers]
        else:
            self._peaks.append(sample.peak_bytes)
        for block, option in zip(numbers, turn, strict=True):
            key = self.classes[block], option
            allocated = []
            for phase in _OF_BLOCKS:
                intervals = [Interval(phase, call) for call in calls[block]]
                allocated.append(tuple(levels.allocated.get(interval, 0) for interval in intervals))
                took = sum(sample.seconds.get(interval, 0.0) for interval in intervals)
                if sample.plain_seconds is None:
                    self._seconds.setdefault((*key, phase), []).append(took)
                    continue
                plain = sum(sample.plain_seconds.get(interval, 0.0) for interval in intervals)
                self._seconds.setdefault((self.classes[block], 0, phase), []).append(plain)
                self._extra.setdefault((*key, phase), []).append(took - plain)
            forwards = (levels.spans[Interval(Phase.FORWARD, call)] for call in calls[block])
            added = tuple(span.end - span.start for span in forwards)
            far_bytes = sum(levels.far_bytes.get(call, 0) for call in calls[block])
            ahead_bytes = tuple(levels.ahead_bytes.get(call, 0) for call in calls[block])
            self._effects.setdefault(key, _Effect(added, tuple(allocated), far_bytes, ahead_bytes))

    def table(self) -> LevelTable:
        table = LevelTable.of_runs(self._runs, self._base_option, self.classes)
        if self._shorter_runs:
            table.read_part(self._shorter_runs, self._shorter_classes)
        for (step, turn), peak in zip(self._runs, self._peaks, strict=True):
            levels = [IntervalLevel(interval, span.start, span.peak) for interval, span in step.levels.items()]
            highest = max(level.peak for level in levels)
            table.add_run([level.raised(peak - highest) for level in levels], turn, is_sample=True)
        return table

    def measured(
        self, blocks: Blocks, options: Sequence[Option], of_class: Mapping[int, Sequence[Option]], run: StepSample
    ) -> MeasuredStep:
        table, every = self.table(), range(len(options))
        forward_seconds, backward_seconds = (self._by_block(phase, of_class) for phase in _OF_BLOCKS)
        optimizer = (s for interval, s in run.seconds.items() if interval.phase is Phase.OPTIMIZER)
        ahead_bytes = {
            (call, option): num_bytes
            for call, (kind, place) in enumerate(table.calls.kinds)
            for option in every
            if (num_bytes := self._effects[kind, option].ahead_bytes[place])
        }
        # A store or a partition is only noted in such a run, and takes other bytes under a plan.
        exact = {number for number in every if not (options[number].is_far or options[number].is_partitioned)}
        runs = [tuple(turn) for _, turn in self._runs if exact.issuperset(turn)]
        return MeasuredStep(
            names=tuple(blocks.names),
            options=tuple(options),
            options_of=tuple(tuple(of_class[kind]) for kind in self.classes),
            model=table,
            forward_seconds=forward_seconds,
            backward_seconds=backward_seconds,
            far_bytes=tuple(tuple(self._effects[kind, o].far_bytes for o in every) for kind in self.classes),
            ahead_bytes=ahead_bytes,
            joinable=frozenset.intersection(*(step.joinable for step, _ in self._runs)),
            step_seconds=run.step_seconds,
            optimizer_seconds=sum(optimizer),
            num_runs=len(self._runs) + len(self._shorter_runs),
            runs=tuple(runs),
            notes=(_REPEATED,) if self._runs[0][0].is_repeated else (),
        )

    def _by_block(self, phase: Phase, of_class: Mapping[int, Sequence[Option]]) -> tuple[tuple[float, ...], ...]:
        """Returns the median over all blocks of a class that had an option, or one that does the same to the byte."""
        by_class: dict[int, tuple[float, ...]] = {}
        for kind in set(self.classes):
            keep = median(self._seconds[kind, 0, phase])
            others = range(1, len(of_class[kind]))
            # Options that do the same to the byte, such as `full` and a level that keeps nothing, share their times:
            # noise would otherwise make one of them seem faster.
            pools: dict[_Effect, list[float]] = {}
            for option in others:
                seconds = self._extra.get((kind, option, phase))
                if seconds is None:
                    seconds = [took - keep for took in self._seconds[kind, option, phase]]
                pools.setdefault(self._effects[kind, option], []).extend(seconds)
            extra = {option: median(pools[self._effects[kind, option]]) for option in others}
            # Times of an absent device are computed: they have no noise to smooth.
            if all((kind, option, phase) in self._extra for option in others):
                extra |= _smoothed(of_class[kind], extra, phase)
            by_class[kind] = (keep, *(keep + max(0.0, extra[option]) for option in others))  # less than that is noise
        return tuple(by_class[kind] for kind in self.classes)


def _smoothed(options: Sequence[Option], extra: Mapping[int, float], phase: Phase) -> dict[int, float]:
    """Returns the seconds that options take beyond ``keep``, for options whose ops have been timed one by one.

    The time of an op is the minimum of many runs, while whole blocks are timed a few times. What a level takes beyond
    its ops is the overhead of intercepting them, equal for all levels; ``full`` has no such overhead.
    """
    ops = {
        number: option.recompute_seconds * (phase is Phase.BACKWARD)
        for number, option in enumerate(options)
        if option.recompute_seconds is not None
    }
    levels = [number for number in ops if isinstance(options[number].rule, Selective)]
    if not levels:
        return {}
    beyond = max(0.0, median(extra[number] - ops[number] for number in levels))
    return {
        number: seconds + (beyond if number in levels else min(beyond, max(0.0, extra[number] - seconds)))
        for number, seconds in ops.items()
    }


_REPEATED = (
    "the step runs backward through the same calls of blocks more than once (create_graph=True or retain_graph=True), "
    "which the planner counts as one; the peak is an estimate"
)
