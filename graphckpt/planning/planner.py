"""Plans of a measured step for any budget, and the check of a plan by a run of the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any, final

from torch import nn

from graphckpt.budget import Budget
from graphckpt.errors import PlanError
from graphckpt.ledger.table import time_of
from graphckpt.planning.candidates import JOINED, Option, parse_compile
from graphckpt.planning.intervals import LevelLog
from graphckpt.planning.measured_step import MeasuredStep
from graphckpt.planning.options import PlanOptions
from graphckpt.planning.plan import KEEP_ALL, Plan
from graphckpt.planning.plan_group import GroupError, PlanGroup
from graphckpt.planning.rows import PlanRow, Stage
from graphckpt.planning.search import PolicyChoice, PolicyKey, PolicySearch
from graphckpt.planning.step_clock import NO_BLOCKS, Blocks
from graphckpt.planning.steps import FakeStep, RealStep, StepRun, peak_of
from graphckpt.simulation.allocations import AllocationLog, Replay, replay
from graphckpt.simulation.allocator import AllocatorRules
from graphckpt.units import at_least, format_bytes, format_sizes


@final
@dataclass(frozen=True, eq=False)
class Planner:
    """The plans of a step that was measured in one way.

    A ``correction`` is the measured peak of a step minus the predicted one, in bytes.
    """

    search: PolicySearch
    _: KW_ONLY
    options: PlanOptions = field(default_factory=PlanOptions)
    model: nn.Module | None = None
    device: str = "cpu"
    is_simulated: bool = False
    world_size: int = 1
    rank: int = 0
    notes: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    head: tuple[PlanRow, ...] = ()
    """The policy of the head when the step was measured."""
    is_of_training: bool = False
    """Whether a training loop measures its updates; errors then name nothing that a callback does not take."""

    @property
    def measured(self) -> MeasuredStep:
        return self.search.measured

    @cached_property
    def blocks(self) -> Blocks:
        assert self.model is not None
        return Blocks([(name, self.model.get_submodule(name)) for name in self.measured.names])

    @cached_property
    def plain(self) -> PolicyChoice:
        return self.search.evaluate((0,) * len(self.measured.names))

    @property
    def floor(self) -> PolicyChoice:
        return self.search.floor

    @property
    def floor_bytes(self) -> int:
        """The lowest peak of any plan, predicted or measured, in bytes."""
        return self.floor.peak

    def plan(self, budget: int, correction: int = 0) -> Plan:
        """Returns the fastest plan whose peak is at most ``budget`` bytes; raises PlanError if there is none."""
        choice = self.search.fastest(budget - correction)
        if choice is None:
            raise self.infeasible(budget, self.floor_bytes + correction)
        return corrected(self.to_plan(choice, budget), correction)

    def lowest(self, budget: int) -> Plan:
        return self.to_plan(self.floor, budget)

    def front(self) -> list[Plan]:
        return [self.to_plan(choice, choice.peak) for choice in self.search.pareto()]

    def uniform(self) -> dict[str, Plan]:
        options = zip(self.measured.options, self.search.uniform(), strict=True)
        return {option.name: self.to_plan(choice, choice.peak) for option, choice in options}

    def to_plan(self, choice: PolicyChoice, budget: int) -> Plan:
        measured = self.measured
        stages = tuple(
            Stage(name=measured.interval_name(interval), start_bytes=start, peak_bytes=peak)
            for interval, start, peak in self.search.levels(choice.plan, choice.runs)
        )
        return Plan(
            rows=(*self._rows(choice), *self.head),
            predicted_peak_bytes=choice.peak,
            predicted_step_seconds=measured.step_seconds + choice.seconds - self.plain.seconds,
            binding=max(stages, key=lambda stage: stage.peak_bytes).name,
            floor_bytes=min(self.floor.peak, choice.peak),
            budget_bytes=budget,
            plain_peak_bytes=self.plain.peak,
            plain_step_seconds=measured.step_seconds,
            device=self.device,
            is_simulated=self.is_simulated,
            world_size=self.world_size,
            rank=self.rank,
            stages=stages,
            notes=(*measured.notes, *self.notes),
            assumptions=self.assumptions,
            model=None if self.is_simulated else self.model,
        )

    def _rows(self, choice: PolicyChoice) -> list[PlanRow]:
        measured = self.measured
        joined = {block for first, end in choice.runs for block in range(first + 1, end)}
        extra_seconds = self.search.extra_seconds(choice)
        compile_field = parse_compile(self.options.compile, self.options.candidates).field
        rows = []
        for block, number in enumerate(choice.plan):
            option = JOINED if block in joined else measured.options_of[block][number]
            name, fields = policy_with_settings(option, self.options, compile_field)
            rows.append(
                PlanRow(
                    block=measured.names[block],
                    option=name,
                    fields=fields,
                    extra_seconds=extra_seconds[block],
                    moved_bytes=measured.far_bytes[block][number],
                )
            )
        return rows

    def infeasible(self, budget: int, lowest: int, *, of_reserved: bool = False) -> PlanError:
        """Returns the error of a budget that no plan fits, with remedies.

        ``lowest`` is the lowest peak in bytes, with ``of_reserved`` the least memory that the allocator needs.
        """
        where, static = self.lowest(budget).binding, self.measured.model.static_bytes
        fixes = []
        if where.startswith("the head") and not self.is_of_training:
            fixes.append("compute the loss in slices (set `head` to its block and `Tiles`)")
        container = None if self.is_of_training else self._sequential()
        # What the blocks save at the lowest peak, segments of segments save in part.
        input_bytes = self.measured.model.saved_bytes(self.floor.plan)
        without_inputs = max(static, self.floor.peak - input_bytes) + lowest - self.floor.peak
        if container is not None and without_inputs <= budget:
            fixes.append(f"segments='log' on {container} (less memory, more time)")
        # An allocator counts all that the process has on its device; on an absent one nothing else runs.
        others = ", workspaces" if self.is_simulated else ", workspaces, other tensors" * self.device.startswith("cuda")
        content = f"weights, optimizer state, inputs{others} and what runs before"
        limit, peak = format_sizes(budget, lowest)
        if of_reserved and self.floor.peak <= budget < lowest:
            fixes.append("PYTORCH_ALLOC_CONF=expandable_segments:True")
            peak = f"{format_bytes(self.floor.peak)}, for which the allocator has to reserve {peak}"
        return PlanError(
            f"memory_budget {limit}: no plan fits · the lowest possible peak is {peak}"
            f"{' without offloading' if self.search.rates is not None else ''}, reached {time_of(where)}; "
            f"{format_bytes(static)} of it are alive before the first block: {content} it · "
            f"fix: {', '.join([*fixes, 'a smaller batch'])}, or a larger budget: {at_least(lowest)!r}, or 'min'"
        )

    def _sequential(self) -> str | None:
        """Returns how to refer to the ``nn.Sequential`` whose children are planned."""
        parent, *others = {name.rpartition(".")[0] for name in self.measured.names}
        if self.model is None or others or not isinstance(self.model.get_submodule(parent), nn.Sequential):
            return None
        return repr(parent) if parent else f"the {type(self.model).__name__}"


def policy_with_settings(option: Option, options: PlanOptions, compile_field: Any) -> tuple[str, dict[str, Any]]:
    """Returns the name in tables and the fields of a block that has ``option`` in a plan with ``options``.

    ``compile_field`` is what :func:`parse_compile` returns for them.
    """
    name, fields = option.name, dict(option.fields)
    if compile_field is not None:
        name, fields = f"{name}, compiled", {"compile": compile_field, **fields}
    if options.contiguous and not (option is JOINED or option.is_far):
        name, fields = f"{name} + slab", {**fields, "contiguous": True}
    if options.determinism_check is not None and fields != KEEP_ALL:
        fields["determinism_check"] = options.determinism_check
    return name, fields


def corrected(plan: Plan, num_bytes: int) -> Plan:
    """Returns a plan whose predicted peaks are ``num_bytes`` higher."""
    peak = plan.predicted_peak_bytes + num_bytes
    return replace(
        plan,
        predicted_peak_bytes=peak,
        floor_bytes=min(plan.floor_bytes + max(0, num_bytes), peak),
        plain_peak_bytes=plan.plain_peak_bytes + num_bytes,
        correction_bytes=plan.correction_bytes + num_bytes,
    )


@final
class Planners:
    """Plans of one step that was measured in several ways: with its loss computed at once, and in slices."""

    def __init__(self, planners: Sequence[Planner]) -> None:
        self._planners = planners
        self.plain = planners[0]
        """The planner of the step without changes."""

    def floor_bytes(self) -> int:
        return min(planner.floor_bytes for planner in self._planners)

    def plan(self, budget: int) -> Plan:
        return self.best_of(lambda planner: planner.plan(budget))

    def best_of(self, plan_with: Callable[[Planner], Plan], *, is_least: bool = False) -> Plan:
        """Returns the fastest plan of all planners; with ``is_least`` the one with the lowest peak."""
        plans: list[Plan] = []
        faults: list[tuple[int, PlanError]] = []
        for planner in self._planners:
            try:
                plans.append(plan_with(planner))
            except GroupError:
                raise
            except PlanError as fault:
                faults.append((planner.floor.peak, fault))
        if not plans:
            raise min(faults, key=lambda row: row[0])[1]
        best = min(plans, key=lambda plan: plan.predicted_peak_bytes if is_least else plan.predicted_step_seconds)
        return replace(best, front=self.front)

    def front(self) -> list[Plan]:
        """Returns the Pareto-optimal plans, lowest peak first."""
        plans = [plan for planner in self._planners for plan in planner.front()]
        plans.sort(key=lambda plan: (plan.predicted_peak_bytes, plan.predicted_step_seconds))
        seconds = [plan.predicted_step_seconds for plan in plans]
        return [plan for number, plan in enumerate(plans) if seconds[number] < min(seconds[:number], default=inf)]


_MOST_PROPOSALS = 5  # that run, for a budget
_GAIN = 0.005  # of the seconds of blocks, for which another plan is tried after one that has fitted


@final
class Dialogue:
    """Finds the fastest plan for a limit by runs, of a step or in the updates of a training.

    The caller asks for a choice, runs the step under it, and tells the result: each run shows how far the predictions
    for its plan and near ones are off.

    Args:
        planner: What predicts, and learns from each run.
        limit: The bytes that a run may need; ``None`` is the lowest possible peak.
        margin: The bytes of the limit that are left to what has not run.
        is_cautious: Whether only what should fit is proposed: an update that exceeds the limit cannot be taken back.
        gap: What the first run is expected to need beside its peak, such as gaps between blocks of an allocator.
    """

    def __init__(
        self, planner: Planner, limit: int | None, *, margin: int = 0, is_cautious: bool = False, gap: int = 0
    ) -> None:
        self.planner = planner
        self.limit = limit
        self._margin = margin
        self._first_gap = gap
        self._is_cautious = is_cautious
        self._candidates: dict[PolicyKey, PolicyChoice] = {}
        self.runs: dict[PolicyKey, CheckedPlan] = {}
        self._levels: dict[PolicyKey, LevelLog] = {}

    def renewed(self, planner: Planner, *, margin: int) -> Dialogue:
        """Returns this dialogue with a planner that knows more."""
        dialogue = Dialogue(planner, self.limit, margin=margin, is_cautious=self._is_cautious, gap=self._first_gap)
        for key, choice in self._candidates.items():
            dialogue.tell(choice, self.runs[key], self._levels[key])
        return dialogue

    @property
    def best(self) -> PolicyChoice | None:
        """The fastest choice that has run and needs at most the limit; without a limit the one that needs least."""
        if self.limit is None:
            return min(self._candidates.values(), key=lambda c: self.runs[c.key].needed_bytes, default=None)
        fitting = (c for c in self._candidates.values() if self.runs[c.key].needed_bytes <= self.limit)
        return min(fitting, key=lambda c: self.runs[c.key].seconds, default=None)

    def tell(self, choice: PolicyChoice, run: CheckedPlan, levels: LevelLog, *, is_candidate: bool = True) -> None:
        """Takes in a run under a choice, with those levels of it that are the same for all processes."""
        self.runs[choice.key], self._levels[choice.key] = run, levels
        if is_candidate:
            self._candidates[choice.key] = choice
        self.planner.search.add_run(choice, run.needed_bytes - run.gap_bytes, levels)

    def ask(self) -> PolicyChoice | None:
        """Returns what may fit and be faster than the best one, and has not run; ``None`` if nothing may."""
        if len(self.runs) >= _MOST_PROPOSALS:
            return None
        search, best, limit = self.planner.search, self.best, self.limit
        limit_seconds = inf
        proposals: list[Callable[[], PolicyChoice | None]]
        if limit is None:
            # Where a prediction was too low, the next one may be lower; where it was too high, this plan stays the
            # lowest.
            proposals = [lambda: search.floor]
        else:
            gaps = [self._margin + run.gap_bytes for run in self.runs.values()]
            gaps = gaps or [self._margin + self._first_gap]
            limit_seconds = inf if best is None else (1 - _GAIN) * best.seconds
            # From what should fit to what fits only if predictions are too high, each computed where it is needed.
            proposals = [lambda: search.fastest(limit - gaps[-1])]
            if not self._is_cautious:
                proposals.append(lambda: search.hopeful(limit - min(gaps)))
                if best is None:
                    proposals[1:1] = [lambda: search.floor]
                    proposals.append(lambda: search.nearest(limit - gaps[-1]))
        for propose in proposals:
            choice = propose()
            if choice is not None and choice.seconds < limit_seconds and choice.key not in self.runs:
                return choice
        return None


def plan_in_limit(
    planner: Planner, step: RealStep | FakeStep, budget: Budget, limit: int | None, group: PlanGroup, gap: int = 0
) -> Plan:
    """Returns the fastest plan of ``group`` under which no step exceeds ``limit`` bytes, which follow from ``budget``.

    Without a limit it is the plan with the lowest peak. The step of each process runs under what is proposed, and the
    best of the runs is returned. On an absent device with a caching allocator what it has to reserve counts. The gaps
    between its blocks are another share of the peak for each plan, so those of the last run are expected in the next
    one, and ``gap`` bytes in the first.
    """
    of_reserved = limit is not None and isinstance(step, FakeStep) and step.limits_reserved(budget)
    dialogue = Dialogue(planner, limit, gap=gap if of_reserved else 0)
    while (choice := dialogue.ask()) is not None:
        plan = planner.to_plan(choice, choice.peak if limit is None else limit)
        most_reserved = limit if limit is not None and of_reserved else 0
        run = run_under(plan, planner.model, step, group, planner.blocks, most_reserved=most_reserved)
        # Less memory may be enough where all of it is not, as the allocator splits other blocks then.
        waits = run.plan.predicted_reserved_bytes > most_reserved > 0
        dialogue.tell(choice, run, group.levels(run.run.levels), is_candidate=not waits)
    runs = dialogue.runs
    if (best := dialogue.best) is not None:
        plan = runs[best.key].plan
        if limit is None:
            return replace(plan, budget_bytes=max(plan.budget_bytes, plan.predicted_peak_bytes))
        return plan
    assert limit is not None
    # Better a step that waits for the allocator than none.
    waiting = [run for run in runs.values() if of_reserved and 0 < run.plan.predicted_reserved_bytes <= limit]
    if waiting:
        return min(waiting, key=lambda run: run.seconds).plan
    lowest = min(run.needed_bytes for run in runs.values())
    peaks = [choice.peak for choice in planner.search.ran if choice.peak > limit]  # a smaller one is refuted
    raise planner.infeasible(limit, min([lowest, *peaks]), of_reserved=of_reserved)


@final
@dataclass(frozen=True)
class CheckedPlan:
    """A plan under which a step has run."""

    plan: Plan
    """With the peak of that step, unless it is as predicted."""
    run: StepRun
    """The measurements of that step."""
    needed_bytes: int
    """The peak; or the least bytes that the allocator has to be able to reserve."""
    is_steady: bool = True
    """Whether the simulated allocator runs the steps in the memory of the device, and releases nothing after the
    second; also true where no allocator is simulated."""

    @property
    def seconds(self) -> float:
        return self.plan.predicted_step_seconds

    @property
    def gap_bytes(self) -> int:
        """What the allocator has to reserve beside the peak."""
        return self.needed_bytes - self.plan.predicted_peak_bytes


def run_under(
    plan: Plan,
    model: nn.Module | None,
    step: RealStep | FakeStep,
    group: PlanGroup,
    blocks: Blocks = NO_BLOCKS,
    *,
    most_reserved: int = 0,
    is_timed: bool = False,
) -> CheckedPlan:
    """Runs the step under a plan, which is corrected if its prediction is not met.

    The levels of the run are those in the intervals between ``blocks``.

    With ``most_reserved`` the plan needs what the allocator has to be able to reserve, which may be at most this. With
    ``is_timed`` a step on a device that is present is timed too, in place of logging its allocations; a simulated one
    always has both.
    """
    group.check_equal(policies=list(policies_key(plan)))
    with plan.apply(model):
        if isinstance(step, FakeStep):
            run = step.run(blocks)
        elif is_timed:
            run = step.run()
        else:
            run = StepRun(_levels(step, group, plan, blocks), 0.0, step.allocations())
        has_copies = any(row.moved_bytes for row in plan.rows)
        peak = run.peak_bytes
        if has_copies and isinstance(step, RealStep) and step.device.type == "cpu":
            # The threads that copy may be early in one step and late in another: less than predicted proves nothing.
            peak = max(peak, plan.predicted_peak_bytes - plan.correction_bytes)
        peak = group.max(peak)
    # The step with everything kept has run too, and needs no correction.
    plain_peak = peak if plan.keeps_everything else plan.plain_peak_bytes
    plan = replace(corrected(plan, peak - plan.predicted_peak_bytes), plain_peak_bytes=plain_peak)
    if not isinstance(step, FakeStep):
        if run.allocations is not None:
            plan = _with_measured(plan, peak, step.reserved_bytes, run.allocations)
        return CheckedPlan(plan, run, plan.predicted_peak_bytes)
    assert run.allocations is not None
    plan = replace(
        plan,
        peak_parts=run.allocations.parts_at_peak(step.machine.rounded),
        predicted_step_seconds=plan.predicted_step_seconds if has_copies else run.seconds,  # a trace shows no copies
        communication_seconds=run.communication_seconds,
        exposed_seconds=run.exposed_seconds,
        bubble_seconds=run.bubble_seconds,
    )
    needed = step.least_capacity(run.allocations, most_reserved) if most_reserved else peak
    replayed = step.replay(run.allocations)
    if replayed is None:
        return CheckedPlan(plan, run, needed)
    is_steady = replayed.is_steady and replayed.reserved_bytes <= step.capacity_bytes
    return CheckedPlan(with_reserved(plan, replayed, run.allocations, step), run, needed, is_steady)


def _with_measured(plan: Plan, peak: int, reserved: int, log: AllocationLog) -> Plan:
    """Returns a plan with the measurements of a step under it on a device that is present, besides the predictions."""
    rules = AllocatorRules.of_environment()
    return replace(
        plan,
        measured_peak_bytes=peak,
        measured_reserved_bytes=reserved,
        predicted_reserved_bytes=replay(log, rules).reserved_bytes,
        expandable_reserved_bytes=replay(log, replace(rules, expandable_segments=True)).reserved_bytes,
        notes=(*plan.notes, *_ignored_notes(rules)),
    )


def with_reserved(plan: Plan, replayed: Replay, allocations: AllocationLog, step: FakeStep) -> Plan:
    """Returns a plan with the bytes that the allocator of the step's device reserves for the allocations under it."""
    notes = _ignored_notes(step.rules)
    capacity = step.capacity_bytes
    if replayed.reserved_bytes > capacity:
        reserved, present = format_sizes(replayed.reserved_bytes, capacity)
        notes.append(f"the allocator would reserve {reserved} of {present}: the step does not fit on the device")
    elif not replayed.is_steady:
        notes.append(
            "the allocator releases free memory in every step, and waits for the device each time · fix: a smaller "
            "budget, or PYTORCH_ALLOC_CONF=expandable_segments:True"
        )
    return replace(
        plan,
        predicted_reserved_bytes=replayed.reserved_bytes,
        predicted_nvidia_smi_bytes=replayed.reserved_bytes + step.bytes_beside_allocator,
        expandable_reserved_bytes=step.reserved_if_expandable(allocations),
        notes=(*plan.notes, *notes),
    )


def _ignored_notes(rules: AllocatorRules) -> list[str]:
    """Returns the note of a plan about settings of the allocator that are not simulated, if there are any."""
    if not rules.ignored:
        return []
    return [f"PYTORCH_ALLOC_CONF: the simulated allocator ignores {', '.join(rules.ignored)}"]


def policies_key(plan: Plan) -> tuple[str, ...]:
    return tuple(row.option for row in plan.rows)


def _levels(step: RealStep, group: PlanGroup, plan: Plan, blocks: Blocks) -> LevelLog:
    """Returns the levels of a step under a plan.

    The thread of gloo sometimes frees the tensors of a collective late, so the lower of two peaks counts. If tensors
    are offloaded, the higher one counts: the threads that copy them may be early in one step and late in another.
    """
    if step.device.type != "cpu":
        return step.levels(blocks)
    if any(row.moved_bytes for row in plan.rows):
        return max(step.levels(blocks), step.levels(blocks), key=peak_of)
    return min((step.levels(blocks) for _ in range(1 + (group.size > 1))), key=peak_of)
