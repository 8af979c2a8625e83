"""Runs a step under each option of each block, as few times as it takes, and learns what a plan will do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol, final

from graphckpt.errors import GraphckptError
from graphckpt.plan.predict import Model
from graphckpt.plan.program import BlockProgram, End, Log, with_holds
from graphckpt.plan.run import KEEP, Blocks, Option
from graphckpt.plan.trace import Interval, Phase

if TYPE_CHECKING:
    from graphckpt.plan.trace import Trace


@final
class PlanError(GraphckptError, RuntimeError):
    """A step cannot be planned, or no plan fits."""


@final
@dataclass(frozen=True, slots=True)
class Sample:
    """One run of the step with one option on each block."""

    trace: Trace
    far_bytes: dict[int, int]
    """By the number of a call: what it has sent away from the device."""
    seconds: dict[Interval, float]
    step_seconds: float


class Step(Protocol):
    """A training step that can be run with one option on each block."""

    def sample(self, blocks: Blocks, options: Sequence[Option]) -> Sample:
        """Runs it once, logged."""


@final
@dataclass(frozen=True, slots=True)
class Measured:
    """What is known of a step: enough to foretell any plan."""

    names: tuple[str, ...]
    options: tuple[Option, ...]
    model: Model
    forward_seconds: tuple[tuple[float, ...], ...]
    """By block and option: of all its forwards in a step."""
    backward_seconds: tuple[tuple[float, ...], ...]
    """By block and option: of all its backwards in a step, with what runs again."""
    far_bytes: tuple[tuple[int, ...], ...]
    """By block and option: bytes that leave the device in a step."""
    step_seconds: float
    """Of the step with everything kept."""
    num_runs: int
    """Times that the step ran to be logged."""
    notes: tuple[str, ...] = ()
    """Where the prediction is not exact, and why."""


def measure(
    step: Step, blocks: Blocks, options: Sequence[Option], progress: Callable[[int, int], None] | None = None
) -> Measured:
    """Measures every option on every block. Equal blocks take turns, so that each option runs on one of them.

    Args:
        step: what to run.
        blocks: what a plan decides about.
        options: the first one must be ``keep``.
        progress: called with the runs done, and the runs in all.

    Raises:
        PlanError: no block runs with gradients.
    """
    assert options[0] is KEEP
    samples = [step.sample(blocks, [KEEP] * len(blocks.names))]
    base = Log(samples[0].trace)
    if not base.calls:
        raise PlanError("no block ran with gradients on · fix: let step_fn run forward and backward of this model")
    classes = _classes(base, blocks)
    turns = [[0] * len(blocks.names), *_turns(classes, len(options))]
    for number, turn in enumerate(turns):
        if number:
            samples.append(step.sample(blocks, [options[option] for option in turn]))
        if progress is not None:
            progress(1 + number, len(turns))
    found = _Found(base, classes)
    for sample, turn in zip(samples, turns, strict=True):
        found.add(sample, turn)
    return found.measured(blocks, options, samples[0].step_seconds, len(turns))


def _classes(base: Log, blocks: Blocks) -> list[int]:
    """Returns the class of each block: blocks of one class are of one kind and did the same, byte by byte."""
    base.name_roles([base.leaving(call) for call in range(len(base.calls))])
    seen: dict[Any, int] = {}
    marks: list[list[Any]] = [[] for _ in blocks.names]
    for number, call in enumerate(base.calls):
        border = sorted((role, base.sizes.get(storage, 0)) for storage, role in base.roles(number).items())
        marks[call.block].append((base.program(number), tuple(border)))
    return [
        seen.setdefault((type(module), module.training, tuple(mark)), len(seen))
        for module, mark in zip(blocks.modules, marks, strict=True)
    ]


def _turns(classes: Sequence[int], num_options: int) -> Iterator[list[int]]:
    """Yields the option of each block in each run, until every class has had each option but the first."""
    if num_options < 2:
        return
    sizes = [classes.count(kind) for kind in range(max(classes) + 1)]
    others = num_options - 1
    for run in range(-(-others // min(sizes))):
        places = [0] * len(sizes)
        turn = []
        for kind in classes:
            turn.append(1 + (places[kind] + run * sizes[kind]) % others)
            places[kind] += 1
        yield turn


@final
class _Found:
    """Gathers what the runs show."""

    def __init__(self, base: Log, classes: Sequence[int]) -> None:
        self._base = base
        self._classes = classes
        self._calls: list[list[int]] = [[] for _ in classes]
        for number, call in enumerate(base.calls):
            self._calls[call.block].append(number)
        self._place = {call: n for calls in self._calls for n, call in enumerate(calls)}
        self._runs: list[tuple[Log, Sequence[int]]] = []
        self._seconds: dict[tuple[int, int, Phase], list[float]] = {}
        self._far: dict[tuple[int, int], int] = {}
        self.notes: dict[str, None] = {}

    def add(self, sample: Sample, turn: Sequence[int]) -> None:
        """Takes in one run.

        Raises:
            PlanError: The blocks were called in another order than before.
        """
        log = Log(sample.trace) if self._runs else self._base
        if [call.block for call in log.calls] != [call.block for call in self._base.calls]:
            raise PlanError(
                "the step calls its blocks in another order each time · fix: plan with one batch, and with a model "
                "that takes the same path each time"
            )
        self._runs.append((log, turn))
        for block, option in enumerate(turn):
            key = self._classes[block], option
            for phase in (Phase.FORWARD, Phase.BACKWARD):
                took = [sample.seconds.get(Interval(phase, call), 0.0) for call in self._calls[block]]
                self._seconds.setdefault((*key, phase), []).append(sum(took))
            self._far.setdefault(key, sum(sample.far_bytes.get(call, 0) for call in self._calls[block]))

    def measured(self, blocks: Blocks, options: Sequence[Option], step_seconds: float, num_runs: int) -> Measured:
        """Returns all that was found."""
        base, block_of = self._base, [call.block for call in self._base.calls]
        self._name_roles()
        ends = self._ends()
        programs = self._programs(ends)

        def program_of(call: int, option: int) -> BlockProgram:
            return programs[self._classes[block_of[call]], option][self._place[call]]

        for call, block in enumerate(block_of):
            for number, option in enumerate(options):
                if program_of(call, number).left != program_of(call, 0).left:
                    text = "leaves other tensors behind than when all is kept; the peak is an estimate there"
                    self.notes.setdefault(f"{blocks.names[block]}: its backward under {option.name} {text}")
        every = range(len(options))
        return Measured(
            names=tuple(blocks.names),
            options=tuple(options),
            model=Model(base, program_of, ends),
            forward_seconds=self._by_block(Phase.FORWARD, len(options), programs),
            backward_seconds=self._by_block(Phase.BACKWARD, len(options), programs),
            far_bytes=tuple(tuple(self._far[kind, o] for o in every) for kind in self._classes),
            step_seconds=step_seconds,
            num_runs=num_runs,
            notes=tuple(self.notes),
        )

    def _by_block(
        self, phase: Phase, num_options: int, programs: dict[tuple[int, int], list[BlockProgram]]
    ) -> tuple[tuple[float, ...], ...]:
        """Returns the median of all blocks of a class that had an option, or one that does the same to the byte."""
        by_class: dict[int, tuple[float, ...]] = {}
        for kind in set(self._classes):
            pools: dict[Any, list[float]] = {}
            for option in range(num_options):
                pools.setdefault(self._doing(kind, option, programs), []).extend(self._seconds[kind, option, phase])
            by_class[kind] = tuple(median(pools[self._doing(kind, o, programs)]) for o in range(num_options))
        return tuple(by_class[kind] for kind in self._classes)

    def _doing(self, kind: int, option: int, programs: dict[tuple[int, int], list[BlockProgram]]) -> Any:
        """Returns what tells an option from others: its programs, and what it sends away; keeping all is no other."""
        return option == 0, tuple(programs[kind, option]), self._far[kind, option]

    def _name_roles(self) -> None:
        """What any run shows to leave a block is shared in all of them."""
        leaving: dict[tuple[int, int], set[int]] = {}
        for log, _ in self._runs:
            for call, border in enumerate(log.calls):
                key = self._classes[border.block], self._place[call]
                leaving.setdefault(key, set()).update(log.leaving(call))
        for log, _ in self._runs:
            log.name_roles([leaving[self._classes[b.block], self._place[c]] for c, b in enumerate(log.calls)])

    def _ends(self) -> dict[int, End]:
        """Returns where shared storages end, in the numbers of the base run: as early as any run shows.

        A block may hold one to its own backward. One that ends later still in some run is held in a way that no store
        tells of, as a Transformers cache holds the keys of all layers: then as late as any run shows.
        """
        base = self._base
        order = {interval: number for number, interval in enumerate(base.intervals)}
        found: dict[int, dict[End, None]] = {}
        of_backward = base.of_backward()
        for log, _ in self._runs:
            for storage, number in self._in_base(log).items():
                end = log.ends.get(storage)
                if number in of_backward and log is not base:
                    continue  # no block holds a gradient from forward on: one run tells all
                if end is not None and end.interval in order:
                    found.setdefault(number, {})[end] = None
        ends: dict[int, End] = {}
        for storage, seen in found.items():
            in_order = sorted(seen, key=lambda end: (order[end.interval], end.number))
            first, last = in_order[0], in_order[-1]
            own = {Interval(Phase.BACKWARD, c) for c in range(len(base.calls)) if storage in base.roles(c)}
            strange = [end for end in in_order if end.interval != first.interval and end.interval not in own]
            ends[storage] = last if strange else first
            if strange:
                self.notes.setdefault(_STRANGE)
        for storage in base.shared:
            if storage not in ends and base.is_gone(storage):  # some block has held it in every run
                users = [c for c in range(len(base.calls)) if storage in base.roles(c)]
                ends[storage] = End(Interval(Phase.AFTER_FORWARD, max(users)), 1 << 60)
        return ends

    def _in_base(self, log: Log) -> dict[int, int]:
        names: dict[int, int] = {}
        for call in range(len(log.calls)):
            in_base = {role: storage for storage, role in self._base.roles(call).items()}
            for storage, role in log.roles(call).items():
                if role in in_base:
                    names.setdefault(storage, in_base[role])
        return names

    def _programs(self, ends: dict[int, End]) -> dict[tuple[int, int], list[BlockProgram]]:
        programs: dict[tuple[int, int], list[BlockProgram]] = {}
        for log, turn in self._runs:
            for block, option in enumerate(turn):
                key = self._classes[block], option
                if key not in programs:
                    programs[key] = [self._program(log, call, ends) for call in self._calls[block]]
        return programs

    def _program(self, log: Log, call: int, ends: dict[int, End]) -> BlockProgram:
        own = Interval(Phase.BACKWARD, call)
        early = [r for s, r in self._base.roles(call).items() if s in ends and ends[s].interval != own]
        return with_holds(log.program(call), early)


_STRANGE = (
    "some tensors that blocks hand on live longer under some policies, as an object among the arguments holds them; "
    "the peak is an upper estimate · fix for a Transformers model: config.use_cache = False"
)
