"""Measures a step under each option of each block, in as few runs as possible."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, final

from graphckpt.errors import PlanError
from graphckpt.planning.candidates import KEEP, Option
from graphckpt.planning.memory_model import MeasuredStep, MemoryModel, StepSample
from graphckpt.planning.op_levels import with_levels
from graphckpt.planning.plan_group import PlanGroup
from graphckpt.planning.program import BlockProgram, Interval, Phase, StepLog, StorageEnd, TraceLog, with_holds
from graphckpt.planning.steps import FakeStep, RealStep
from graphckpt.planning.trace import Blocks, PathError
from graphckpt.rules.basic import Keep
from graphckpt.rules.selective import Selective

_MOST_TIMED = 16
"""Of equal blocks, so many have their ops timed one by one: the fastest of each op counts."""


def measure(
    step: RealStep | FakeStep,
    blocks: Blocks,
    options: Sequence[Option],
    progress: Callable[[int, int], None] | None = None,
    group: PlanGroup | None = None,
) -> MeasuredStep:
    """Measures every option on every block. Equal blocks share the options, so that each option runs on one of them.

    All processes of ``group`` measure the step, and use the traces of one of them.
    """
    assert options[0] is KEEP
    group = group or PlanGroup()
    every = range(len(blocks.names))

    def shared(own: StepSample) -> StepSample:
        group.elect_leader(own.peak_bytes)
        if group.size == 1:
            return own
        message = group.from_leader(own.trace.to_message() if group.rank == group.leader else None)
        return replace(own, trace=TraceLog.from_message(message))

    own_run, option = step.base(blocks, options)
    run = shared(own_run)
    base = StepLog(run.trace)
    if not base.calls:
        raise PlanError("no block ran with gradients enabled · fix: run forward and backward of this model in step_fn")
    if not base.has_backward:
        raise PlanError("no backward went through the blocks · fix: call loss.backward() in step_fn")
    classes = _classes(base, blocks)

    def measure_options(numbers: Sequence[int], *, is_shorter: bool) -> MeasuredStep:
        collector = TraceCollector(base, classes)
        collector.add(run, every, [option] * len(every), is_whole=True)
        part = Blocks([(blocks.names[number], blocks.modules[number]) for number in numbers])
        kinds = [classes[number] for number in numbers]
        timed = _excerpt(kinds, _MOST_TIMED)
        few = Blocks([(part.names[number], part.modules[number]) for number in timed])
        some, own = with_levels(options, [kinds[n] for n in timed], lambda: step.ops(few), group.from_leader)
        turns = list(_turns(kinds, len(some), is_shorter=is_shorter))
        if option != 0:
            turns.insert(0, [0] * len(kinds))
        for done, turn in enumerate(turns, start=1):
            if progress is not None:
                progress(done, len(turns) + 1)
            sample = shared(step.sample(part, [own[kind][o] for kind, o in zip(kinds, turn, strict=True)]))
            collector.add(sample, numbers, turn, is_whole=option == 0 and len(numbers) == len(every))
        if progress is not None:
            progress(len(turns) + 1, len(turns) + 1)
        return collector.measured(blocks, some, own, run, option, len(turns) + 1)

    enough = _excerpt(classes, len(options))  # to measure each option in a short run
    with step.restricted_to(blocks, enough) as is_shorter:
        if is_shorter:
            try:
                return measure_options(enough, is_shorter=True)
            except Exception:
                if not isinstance(step, FakeStep):
                    raise  # a fake step may need all of its blocks
    return measure_options(every, is_shorter=False)


def _excerpt(classes: Sequence[int], limit: int) -> list[int]:
    """Returns the first blocks of each class, at most ``limit``."""
    return [number for number, kind in enumerate(classes) if classes[:number].count(kind) < limit]


def _classes(base: StepLog, blocks: Blocks) -> list[int]:
    """Returns the class of each block: blocks of one class did the same, byte by byte, and policies do so on them.

    Policies copy buffers, of which a step without them shows nothing.
    """
    base.name_roles([base.leaving(call) for call in range(len(base.calls))])
    classes: dict[Any, int] = {}
    marks: list[list[Any]] = [[] for _ in blocks.names]
    for number, call in enumerate(base.calls):
        border = sorted((role, base.sizes.get(storage, 0)) for storage, role in base.roles(number).items())
        marks[call.block].append((base.program(number), tuple(border)))
    keys = [
        (type(module), module.training, tuple((b.dtype, b.numel()) for b in module.buffers()), tuple(mark))
        for module, mark in zip(blocks.modules, marks, strict=True)
    ]
    return [classes.setdefault(key, len(classes)) for key in keys]


def _turns(classes: Sequence[int], num_options: int, *, is_shorter: bool) -> Iterator[list[int]]:
    """Yields the option of each block in each run, until every class has had each option but the first.

    In a shorter run one block of each class with enough blocks keeps all, to compare it with the whole run.
    """
    if num_options < 2:
        return
    others = num_options - 1
    sizes = [classes.count(kind) for kind in range(max(classes) + 1)]
    for run in range(-(-others // min(size for size in sizes if size))):
        places = [0] * len(sizes)
        turn = []
        for kind in classes:
            place = places[kind] + run * sizes[kind]
            is_spare = is_shorter and sizes[kind] == num_options and places[kind] == others
            turn.append(0 if is_spare else 1 + place % others)
            places[kind] += 1
        yield turn


@final
@dataclass(frozen=True, slots=True)
class _LoggedRun:
    log: StepLog
    options: dict[int, int]
    calls: dict[int, list[int]]
    is_whole: bool


@final
class TraceCollector:
    def __init__(self, base: StepLog, classes: Sequence[int]) -> None:
        self.classes = classes
        self.notes: dict[str, None] = {}
        self._base = base
        self._calls = _calls_by_block(base, range(len(classes)))
        self._place = {call: n for calls in self._calls.values() for n, call in enumerate(calls)}
        self._runs: list[_LoggedRun] = []
        self._seconds: dict[tuple[int, int, Phase], list[float]] = {}
        """Seconds by class, option and phase."""
        self._extra: dict[tuple[int, int, Phase], list[float]] = {}
        """The same, minus the seconds of the block without a policy in a run beside that one."""
        self._far_bytes: dict[tuple[int, int], int] = {}
        self._ahead: dict[tuple[int, int], list[int]] = {}

    def add(self, sample: StepSample, numbers: Sequence[int], turn: Sequence[int], *, is_whole: bool) -> None:
        """Adds one run, in which block ``numbers[n]`` had option ``turn[n]``, or a part of one."""
        log = StepLog(sample.trace) if self._runs else self._base
        calls = _calls_by_block(log, numbers)
        orders = [[call.block for call in each.calls] for each in (log, self._base)]
        if any(len(calls[n]) != len(self._calls[n]) for n in numbers) or (is_whole and orders[0] != orders[1]):
            raise PathError(orders)
        self._runs.append(_LoggedRun(log, dict(zip(numbers, turn, strict=True)), calls, is_whole))
        for block, option in zip(numbers, turn, strict=True):
            key = self.classes[block], option
            for phase in (Phase.FORWARD, Phase.BACKWARD):
                intervals = [Interval(phase, call) for call in calls[block]]
                took = sum(sample.seconds.get(interval, 0.0) for interval in intervals)
                if sample.plain_seconds is None:
                    self._seconds.setdefault((*key, phase), []).append(took)
                    continue
                plain = sum(sample.plain_seconds.get(interval, 0.0) for interval in intervals)
                self._seconds.setdefault((self.classes[block], 0, phase), []).append(plain)
                self._extra.setdefault((*key, phase), []).append(took - plain)
            self._ahead.setdefault(key, [sample.trace.ahead_bytes[call] for call in calls[block]])
            self._far_bytes.setdefault(key, sum(sample.trace.far_bytes[call] for call in calls[block]))

    def measured(
        self,
        blocks: Blocks,
        options: Sequence[Option],
        own: Mapping[int, Sequence[Option]],
        base_run: StepSample,
        base_option: int,
        num_runs: int,
    ) -> MeasuredStep:
        base, block_of = self._base, [call.block for call in self._base.calls]
        self._name_roles()
        ends = self._ends()
        programs = self._programs(ends)

        def program_of(call: int, option: int) -> BlockProgram:
            return programs[self.classes[block_of[call]], option][self._place[call]]

        for call, block in enumerate(block_of):
            for number in range(len(options)):
                if program_of(call, number).left != program_of(call, 0).left:
                    text = "leaves other tensors behind than under keep; the peak is an estimate there"
                    self.notes.setdefault(
                        f"{blocks.names[block]}: its backward under {own[self.classes[block]][number].name} {text}"
                    )
        if any(len(call.backwards) > 1 for call in base.calls):
            self.notes = {_REPEATED: None}
        every = range(len(options))
        backward_seconds = self._by_block(Phase.BACKWARD, own, programs)
        recompute_seconds = sum(seconds[max(0, base_option)] - seconds[0] for seconds in backward_seconds)
        optimizer = (s for interval, s in base_run.seconds.items() if interval.phase is Phase.OPTIMIZER)
        return MeasuredStep(
            names=tuple(blocks.names),
            options=tuple(options),
            options_of=tuple(tuple(own[kind]) for kind in self.classes),
            model=MemoryModel(
                base, program_of, ends, lambda call, o: not isinstance(own[self.classes[block_of[call]]][o].rule, Keep)
            ),
            forward_seconds=self._by_block(Phase.FORWARD, own, programs),
            backward_seconds=backward_seconds,
            far_bytes=tuple(tuple(self._far_bytes[kind, o] for o in every) for kind in self.classes),
            ahead_bytes={
                (call, option): num_bytes
                for call, block in enumerate(block_of)
                for option in every
                if (num_bytes := self._ahead[self.classes[block], option][self._place[call]])
            },
            step_seconds=base_run.step_seconds - recompute_seconds,
            optimizer_seconds=sum(optimizer),
            num_runs=num_runs,
            notes=tuple(self.notes),
        )

    def _by_block(
        self, phase: Phase, own: Mapping[int, Sequence[Option]], programs: dict[tuple[int, int], list[BlockProgram]]
    ) -> tuple[tuple[float, ...], ...]:
        """Returns the median over all blocks of a class that had an option, or one that does the same to the byte."""
        by_class: dict[int, tuple[float, ...]] = {}
        for kind in set(self.classes):
            keep = median(self._seconds[kind, 0, phase])
            pools: dict[Any, list[float]] = {}
            others = range(1, len(own[kind]))
            for option in others:
                seconds = self._extra.get((kind, option, phase))
                if seconds is None:
                    seconds = [took - keep for took in self._seconds[kind, option, phase]]
                pools.setdefault(self._doing(kind, option, programs), []).extend(seconds)
            extra = {option: median(pools[self._doing(kind, option, programs)]) for option in others}
            if all((kind, option, phase) in self._extra for option in others):
                extra |= _smoothed(own[kind], extra, phase)
            by_class[kind] = (keep, *(keep + max(0.0, extra[option]) for option in others))  # less than that is noise
        return tuple(by_class[kind] for kind in self.classes)

    def _doing(self, kind: int, option: int, programs: dict[tuple[int, int], list[BlockProgram]]) -> Any:
        """Returns a key that is equal for options with equal programs and equal offloaded bytes; ``keep`` is apart."""
        return option == 0, tuple(programs[kind, option]), self._far_bytes[kind, option]

    def _name_roles(self) -> None:
        leaving: dict[tuple[int, int], set[int]] = {}
        for run in self._runs:
            for block, calls in run.calls.items():
                for place, call in enumerate(calls):
                    leaving.setdefault((self.classes[block], place), set()).update(run.log.leaving(call))
        for run in self._runs:
            by_call: list[set[int]] = [set() for _ in run.log.calls]
            for block, calls in run.calls.items():
                for place, call in enumerate(calls):
                    by_call[call] = leaving[self.classes[block], place]
            run.log.name_roles(by_call)

    def _ends(self) -> dict[int, StorageEnd]:
        """Returns where shared storages are freed, in the numbers of the base run: as early as in any run.

        A block may hold one until its own backward. One that is freed even later in some run is held by something
        other than a store or an object among the arguments: then as late as in any run.
        """
        base = self._base
        order = {interval: number for number, interval in enumerate(base.intervals)}
        ends_of: dict[int, dict[StorageEnd, None]] = {}
        of_backward = base.of_backward()
        for log in (run.log for run in self._runs if run.is_whole):
            for storage, number in self._in_base(log).items():
                end = log.ends.get(storage)
                if number in of_backward and log is not base:
                    continue  # no block holds a gradient from forward on: one run suffices
                if end is not None and end.interval in order:
                    ends_of.setdefault(number, {})[end] = None
        for storage, end in self._ends_in_short_runs():
            ends_of.setdefault(storage, {end: None})
        ends: dict[int, StorageEnd] = {}
        for storage, candidates in ends_of.items():
            if storage in base.reached:
                continue
            in_order = sorted(candidates, key=lambda end: (order[end.interval], end.number))
            first, last = in_order[0], in_order[-1]
            own = {Interval(Phase.BACKWARD, c) for c in range(len(base.calls)) if storage in base.roles(c)}
            strange = [end for end in in_order if end.interval != first.interval and end.interval not in own]
            ends[storage] = last if strange else first
            if strange:
                self.notes.setdefault(_STRANGE)
        ends.update(self._ends_of_reached())
        for storage in base.shared:
            users = [c for c in range(len(base.calls)) if storage in base.roles(c)]
            if users and storage not in ends and base.is_gone(storage):  # some block has held it in every run
                ends[storage] = StorageEnd(Interval(Phase.AFTER_FORWARD, max(users)), 1 << 60)
        return ends

    def _ends_of_reached(self) -> Iterator[tuple[int, StorageEnd]]:
        """Yields where code outside of blocks frees what objects among the arguments reach, mostly with the object.

        The run with everything kept shows it, since no block holds its arguments there.
        """
        base = self._base
        order = {interval: number for number, interval in enumerate(base.intervals)}
        for storage in filter(base.is_gone, base.reached):
            objects = [each.storage for each in base.objects if storage in each.reached]
            owners = [storage] if storage in base.ends else objects
            candidates = [base.ends[owner] for owner in owners if owner in base.ends]
            if candidates:
                yield storage, max(candidates, key=lambda end: (order[end.interval], end.number))

    def _ends_in_short_runs(self) -> Iterator[tuple[int, StorageEnd]]:
        """Yields what is freed between forward and backward, as autocast frees its copies of weights, by class."""
        heads, numbers = _heads(self._base), {}
        for run in self._runs:
            own = {} if run.is_whole else _heads(run.log)
            for block, calls in run.calls.items():
                for place, call in enumerate(calls):
                    for storage, role in run.log.roles(call).items():
                        end = run.log.ends.get(storage)
                        if call in own and end is not None and end.interval == own[call] != (Phase.AFTER_FORWARD, call):
                            numbers[self.classes[block], place, role] = end.number
        for call in heads if numbers else ():
            for storage, role in self._base.roles(call).items():
                number = numbers.get((self.classes[self._base.calls[call].block], self._place[call], role))
                if number is not None:
                    yield storage, StorageEnd(heads[call], number)

    def _in_base(self, log: StepLog) -> dict[int, int]:
        """Returns the numbers in the base run of the shared storages of a whole run."""
        numbers: dict[int, int] = {}
        for call in range(len(log.calls)):
            in_base = {role: storage for storage, role in self._base.roles(call).items()}
            for storage, role in log.roles(call).items():
                if role in in_base:
                    numbers.setdefault(storage, in_base[role])
        return numbers

    def _programs(self, ends: dict[int, StorageEnd]) -> dict[tuple[int, int], list[BlockProgram]]:
        programs: dict[tuple[int, int], list[BlockProgram]] = {}
        for run in self._runs:
            for block, option in run.options.items():
                key = self.classes[block], option
                if key in programs and run.is_whole:
                    continue
                of_calls = []
                for call, call_in_run in zip(self._calls[block], run.calls[block], strict=True):
                    own = Interval(Phase.BACKWARD, call)
                    early = [
                        role for s, role in self._base.roles(call).items() if s in ends and ends[s].interval != own
                    ]
                    of_calls.append(with_holds(run.log.program(call_in_run), early))
                if programs.setdefault(key, of_calls) != of_calls:
                    self.notes.setdefault(_SHORTER)
        return programs


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


def _heads(log: StepLog) -> dict[int, Interval]:
    heads: dict[int, Interval] = {}
    batch: list[int] = []
    before = Interval(Phase.BEFORE)
    for phase, call in log.intervals:
        if phase is Phase.FORWARD:
            batch.append(call)
        elif phase is not Phase.BACKWARD:
            before = Interval(phase, call)
        elif call not in log.dropped:
            heads.update(dict.fromkeys(batch, before))
            batch.clear()
    return heads


def _calls_by_block(log: StepLog, numbers: Sequence[int]) -> dict[int, list[int]]:
    calls: dict[int, list[int]] = {number: [] for number in numbers}
    for number, call in enumerate(log.calls):
        calls[numbers[call.block]].append(number)
    return calls


_SHORTER = "a layer behaves differently in a part of the step than in the whole one; the peak is an estimate"
_REPEATED = (
    "the step runs backward through the same calls of blocks more than once (create_graph=True or retain_graph=True), "
    "which the planner counts as one; the peak is an estimate"
)
_STRANGE = "some tensors that blocks return live longer under some policies; the peak is an estimate"
