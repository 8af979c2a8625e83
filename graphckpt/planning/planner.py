"""Measures a step under all candidates, plans it for any budget, and checks the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import cached_property, partial
from typing import Any, NoReturn, final

from torch import nn

from graphckpt.blocks.apply import apply
from graphckpt.errors import ConfigError, did_you_mean
from graphckpt.extras import require
from graphckpt.planning import budget as budgets
from graphckpt.planning.candidates import (
    JOINED,
    can_join,
    compiled_forwards,
    parse_compile,
    parse_partition_request,
    with_partition,
)
from graphckpt.planning.candidates import options as candidates_of
from graphckpt.planning.errors import GroupError, PathError, PlanError
from graphckpt.planning.measure.instrument import Blocks
from graphckpt.planning.measure.real_step import RealStep
from graphckpt.planning.measure.sweep import MeasurableStep, measure
from graphckpt.planning.model.memory_model import MeasuredStep
from graphckpt.planning.options import PlanOptions
from graphckpt.planning.plan import Plan
from graphckpt.planning.plan_group import PlanGroup
from graphckpt.planning.rows import PlanRow, Stage
from graphckpt.planning.solve.search import CopyRates, PolicyChoice, PolicySearch, interval_name
from graphckpt.rules.base import parse_rule
from graphckpt.stores.base import parse_offload
from graphckpt.units import format_bytes


def measure_all(
    step: MeasurableStep,
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    options: PlanOptions,
    group: PlanGroup,
    notes: Sequence[str] = (),
) -> Planners:
    """Measures every candidate on every block, once for each way in which the head may run.

    Args:
        step: the step, real or fake.
        model: the model that the step trains.
        blocks: the blocks to plan, by name.
        options: what the planner may use.
        group: the processes that plan together.
        notes: what plans should mention.

    Raises:
        ConfigError: an option cannot be used.
        MissingPackageError: the extra ``plan`` is not installed.
        PlanError: the step cannot be measured, or another process has failed.
    """
    require("plan", "numpy", "networkx")  # before minutes of measuring
    modules = [module for _, module in blocks]
    ranks, found = parse_partition_request(options.partition, group.size)
    found = [*notes, *found]
    code = parse_compile(options.compile, options.candidates)
    candidates = candidates_of(options.offload, options.candidates, code=code)
    if ranks is not None:
        candidates = with_partition(candidates, ranks)
    heads = head_rows(model, options.head, blocks)
    known = [option.fields for option in candidates] + [row.fields for rows in heads for row in rows]
    group.check_equal(
        compile=repr(options.compile),
        blocks=[name for name, _ in blocks],
        options=[option.name for option in candidates],
        head=[[row.block, row.option] for rows in heads for row in rows],
    )
    rates = None
    if any(option.is_far for option in candidates):
        target = parse_offload(options.offload)
        assert target is not None
        rates = _slowest(group.all_gather(step.copy_rates(target)))
        if rates is None:
            candidates = tuple(option for option in candidates if not option.is_far)
            found.append(step.no_copies)
    planners: list[Planner] = []
    for rows in heads:
        on_head = apply(model, {row.block: row.fields for row in rows}) if rows else nullcontext()
        with on_head, compiled_forwards(modules, code.options):
            progress = options.progress
            try:
                measured = measure(step, Blocks(blocks), candidates, progress, group.classes, group.broadcast)
            except PathError as error:
                if group.size > 1 or not step.repeat_longest(Blocks(blocks), error.orders):
                    raise
                found.append(_ALL_BLOCKS)
                measured = measure(step, Blocks(blocks), candidates, progress)
            measured = group.times(measured)
        if not planners:
            found += group.elect_leader(measured.model.highest([0] * len(blocks)).peak)
        planners.append(
            Planner(
                measured,
                model=model,
                device=step.device_name,
                rates=rates,
                host_budget=options.host_bytes,
                # without the first layer of a run, the others join the run before it, and exceed the peak
                joins=can_join(modules, options.candidates) and _ALL_BLOCKS not in found,
                notes=found,
                extra_rows=rows,
                compiles=code.field,
                has_slabs=options.contiguous,
            )
        )
    return Planners(planners, [*known, {"compile": code.field}])


_ALL_BLOCKS = (
    "the step calls other blocks each time, as LayerDrop does; it is planned for a step that calls all of them, so the "
    "peak is an upper bound"
)


def _slowest(rates: Sequence[Sequence[float] | None]) -> CopyRates | None:
    """Returns the slowest rates of all processes; ``None`` if one of them cannot copy."""
    known = [each for each in rates if each is not None]
    if len(known) < len(rates):
        return None
    out, back = zip(*known, strict=True)
    return CopyRates(min(out), min(back))


def head_rows(
    model: nn.Module, head: Mapping[str, Any] | None, blocks: Sequence[tuple[str, nn.Module]]
) -> list[tuple[PlanRow, ...]]:
    """Returns the alternatives for the head: no policy, or one of the rules that are given for it.

    Raises:
        ConfigError: there is no such block, it is a layer or contains one, or a value is not a rule.
    """
    alternatives: list[tuple[PlanRow, ...]] = [()]
    for name, value in (head or {}).items():
        if name not in dict(model.named_modules()):
            raise ConfigError(
                f"head: there is no block {name!r}{did_you_mean(name, [n for n, _ in model.named_children()])} · "
                "fix: name the module that computes the loss"
            )
        around = next((block for block, _ in blocks if f"{block}.".startswith(f"{name}." if name else "")), None)
        if around is not None:
            raise ConfigError(f"head: {name!r} contains the layer {around!r} · fix: name the module after the layers")
        for one in value if isinstance(value, (list, tuple)) else [value]:
            rule = parse_rule(one)
            if rule is None:
                raise ConfigError(f"head: expected a rule, got {one!r} · fix: Tiles(8, reduce='sum')")
            settings = {field.name: getattr(rule, field.name) for field in fields(rule)}
            plain = {"activation_checkpointing": {"rule": rule.name, **settings}}
            alternatives.append((PlanRow(block=name, option=rule.describe(), fields=plain),))
    return alternatives


@final
class Planner:
    """Plans one measured step for any budget."""

    def __init__(
        self,
        measured: MeasuredStep,
        *,
        model: nn.Module | None = None,
        device: str = "cpu",
        rates: CopyRates | None = None,
        host_budget: int | None = None,
        joins: bool = True,
        notes: Iterable[str] = (),
        extra_rows: tuple[PlanRow, ...] = (),
        compiles: bool | dict[str, Any] | None = None,
        has_slabs: bool = False,
    ) -> None:
        self.measured = measured
        self.search = PolicySearch(measured, rates, host_budget, joins=joins)
        self.plain = self.search.evaluate((0,) * len(measured.names))
        self.model = model
        self.extra_rows = extra_rows
        """The rows of plans for other blocks, active when the step was measured."""
        self.compiled: dict[str, Any] = {} if compiles is None else {"compile": compiles}
        """The fields of all layers beside their options."""
        self._has_slabs = has_slabs
        self._device = device
        self._notes = tuple(notes)
        self._without = " without offloading" if rates is not None else ""

    @cached_property
    def floor(self) -> PolicyChoice:
        return self.search.floor()

    def least(self) -> int:
        return self.floor.peak

    def bytes_of(self, budget: int | str, available: int) -> int:
        """Returns a budget in bytes; ``available`` is the memory of the device."""
        return budgets.budget_bytes(
            budget,
            floor=self.floor.peak if budget == "min" else 0,
            static=self.measured.model.static_bytes,
            plain_peak=self.plain.peak,
            available=available,
        )

    def plan(self, budget: int, correction: int = 0) -> Plan:
        """Returns the fastest plan whose peak is at most ``budget`` bytes.

        Args:
            budget: of the whole step.
            correction: the measured peak of a step minus the prediction, in bytes.

        Raises:
            PlanError: There is none.
        """
        choice = self.search.fastest(budget - correction)
        if choice is None:
            raise PlanError(self.infeasible(budget, self.floor.peak + correction))
        return self.to_plan(choice, budget, correction)

    def front(self, correction: int = 0) -> list[tuple[int, float, Plan]]:
        """Returns peak in bytes, seconds of a step and plan, for all Pareto-optimal plans, lowest peak first."""
        plans = [self.to_plan(choice, choice.peak + correction, correction) for choice in self.search.pareto()]
        return [(p.predicted_peak_bytes, p.predicted_step_seconds, p) for p in plans]

    def uniform(self) -> list[tuple[str, int, float]]:
        """Returns name, peak in bytes and seconds of a step for each uniform policy."""
        found = ((o, self.to_plan(choice, choice.peak)) for o, choice in self.search.uniform())
        return [(self.measured.options[o].name, p.predicted_peak_bytes, p.predicted_step_seconds) for o, p in found]

    def to_plan(self, choice: PolicyChoice, budget: int, correction: int = 0) -> Plan:
        known, names = self.measured, self.measured.names
        joined = {block for first, end in choice.runs for block in range(first + 1, end)}
        extra = self.search.extra_seconds(choice)
        chosen = [
            JOINED if block in joined else known.options_of[block][option] for block, option in enumerate(choice.plan)
        ]
        rows = tuple(
            PlanRow(
                block=names[block],
                option=f"{chosen[block].name}, compiled" if self.compiled else chosen[block].name,
                fields={**self.compiled, **chosen[block].fields},
                extra_seconds=extra[block],
                moved_bytes=known.far_bytes[block][option],
            )
            for block, option in enumerate(choice.plan)
        )
        if self._has_slabs:
            rows = tuple(map(_with_slab, rows))
        return Plan(
            rows=rows + self.extra_rows,
            predicted_peak_bytes=choice.peak + correction,
            predicted_step_seconds=known.step_seconds + choice.seconds - self.plain.seconds,
            binding=self._name(choice),
            floor_bytes=min(self.floor.peak + max(0, correction), choice.peak + correction),
            budget_bytes=budget,
            plain_peak_bytes=self.plain.peak + correction,
            plain_step_seconds=known.step_seconds,
            correction_bytes=correction,
            device=self._device,
            stages=tuple(
                Stage(
                    name=interval_name(level.interval, names, known.model.block_of_call),
                    start_bytes=level.start,
                    peak_bytes=level.peak,
                )
                for level in self.search.levels(choice.plan, choice.runs)
            ),
            notes=(*known.notes, *self._notes),
            model=self.model,
        )

    def _name(self, choice: PolicyChoice) -> str:
        return interval_name(choice.interval, self.measured.names, self.measured.model.block_of_call)

    def infeasible(self, budget: int, lowest: int) -> str:
        """Returns the message of a budget that no plan fits, and what helps; ``lowest`` is the lowest peak in bytes."""
        where, correction = self._name(self.floor), lowest - self.floor.peak
        static = self.measured.model.static_bytes
        fix = "a smaller batch, or a larger budget"
        container = self._sequential()
        if container is not None and max(static, self.floor.peak - self._input_bytes()) + correction <= budget:
            where_to = repr(container) if container else f"the {type(self.model).__name__}"
            fix = f"segments='log' on {where_to} (less memory, more time), {fix}"
        if "head" in where:
            fix = f"compute the loss in slices (set `head` to its block and `Tiles`), {fix}"
        return (
            f"memory_budget {format_bytes(budget)}: no plan fits · the lowest possible peak is "
            f"{format_bytes(lowest)}{self._without}, set by {where}; "
            f"{format_bytes(static)} of it are weights, optimizer state and inputs · fix: {fix}"
        )

    def _input_bytes(self) -> int:
        """Returns what the blocks hold at the lowest peak, which segments of segments hold in part."""
        model, options = self.measured.model, self.floor.plan
        held = {s for call, block in enumerate(model.block_of_call) for s in model.holds(call, options[block])}
        return sum(model.base.sizes.get(storage, 0) for storage in held)

    def _sequential(self) -> str | None:
        """Returns the name of the ``nn.Sequential`` whose children are planned, if there is one."""
        parent, *others = {name.rpartition(".")[0] for name in self.measured.names}
        if self.model is None or others:
            return None
        return parent if isinstance(self.model.get_submodule(parent), nn.Sequential) else None


def _with_slab(row: PlanRow) -> PlanRow:
    """Returns a row whose layer keeps in a slab what it keeps on the device."""
    if JOINED.fields.items() <= row.fields.items() or "offload" in row.fields:
        return row
    return replace(row, option=f"{row.option} + slab", fields={**row.fields, "contiguous": True})


@final
class Planners:
    """Plans of one step that was measured in several ways: with its loss computed at once, and in slices.

    Args:
        planners: the first one is of the step as it is.
        policy_fields: the fields of policies that all processes have.
    """

    def __init__(self, planners: Sequence[Planner], policy_fields: Sequence[Mapping[str, Any]] = ()) -> None:
        self._planners = planners
        self.policy_fields = policy_fields

    @property
    def plain(self) -> Planner:
        return self._planners[0]

    def bytes_of(self, budget: int | str, available: int) -> int:
        """Returns a budget in bytes; ``available`` is the memory of the device."""
        if budget == "min":
            return min(planner.least() for planner in self._planners)
        return self.plain.bytes_of(budget, available)

    def plan(self, budget: int) -> Plan:
        """Returns the fastest plan whose peak is at most ``budget`` bytes.

        Raises:
            PlanError: There is none.
        """
        return self.best_of(lambda planner: planner.plan(budget))

    def best_of(
        self,
        plan_with: Callable[[Planner], Plan],
        *,
        floor_of: Callable[[Planner], int] = Planner.least,
        is_least: bool = False,
    ) -> Plan:
        """Returns the fastest plan of all planners.

        Args:
            plan_with: returns the plan of a planner.
            floor_of: returns the lowest peak of any plan of a planner; called for those without a plan.
            is_least: return the plan with the lowest peak instead.

        Raises:
            PlanError: no planner has a plan; the error is that of the planner with the lowest peak.
        """
        found: list[Plan] = []
        faults: list[tuple[int, PlanError]] = []
        for planner in self._planners:
            try:
                found.append(plan_with(planner))
            except GroupError:
                raise
            except PlanError as fault:
                faults.append((floor_of(planner), fault))
        if not found:
            raise min(faults, key=lambda row: row[0])[1]
        best = min(found, key=lambda plan: plan.predicted_peak_bytes if is_least else plan.predicted_step_seconds)
        return replace(best, front=lambda: [plan for _, _, plan in self.front(max(0, best.correction_bytes))])

    def front(self, correction: int = 0) -> list[tuple[int, float, Plan]]:
        """Returns peak in bytes, seconds of a step and plan, for all Pareto-optimal plans, lowest peak first.

        ``correction`` is the measured peak of a step minus the prediction, in bytes.
        """
        planners = self._planners
        rows = sorted((row for planner in planners for row in planner.front(correction)), key=lambda row: row[:2])
        return [row for number, row in enumerate(rows) if all(row[1] < other[1] for other in rows[:number])]

    def uniform(self) -> list[tuple[str, int, float]]:
        """Returns name, peak in bytes and seconds of a step for each uniform policy, with the loss computed at once."""
        return self.plain.uniform()


_TOLERANCE = 0.01  # of the predicted peak; larger differences are corrected
_MOST_CHECKS = 3  # another plan may run other ops at its peak


def plan_and_check(
    planner: Planner,
    model: nn.Module,
    step: RealStep,
    limit: int | None,
    group: PlanGroup,
    policy_fields: Sequence[Mapping[str, Any]],
    *,
    check: bool = True,
) -> Plan:
    """Returns the plan of ``group``; with ``check``, one under which the step has kept the budget.

    Args:
        planner: Used on the leader.
        model: The model of ``step``, which may be another one than that which was measured.
        step: Run on all processes; the largest difference counts.
        limit: The largest peak in bytes; ``None`` is the lowest possible.
        group: The processes that plan together.
        policy_fields: Fields of policies that all of them have.
        check: Run the step under the plan, and replan if its peak exceeds the budget or is over 1 % off.

    Raises:
        PlanError: No plan fits.
    """

    def fastest(correction: int = 0) -> Plan:
        """Returns the plan for the budget; where none is predicted to fit, the one that is predicted to take least."""
        bound = planner.floor.peak if limit is None else limit
        choice = planner.search.fastest(max(bound - correction, planner.floor.peak)) if check else None
        plan = planner.plan(bound) if choice is None else planner.to_plan(choice, bound, correction)
        return replace(plan, model=model)

    def lowest() -> Plan:
        return replace(planner.to_plan(planner.floor, limit or 0), model=model)

    def refuse() -> NoReturn:
        raise PlanError(planner.infeasible(limit or 0, min(peaks.values())))

    peaks: dict[tuple[str, ...], int] = {}  # by the options of a plan
    fitting: list[Plan] = []
    candidate = group.plan(fastest, policy_fields, model)
    is_lowest = False
    while check:
        options = tuple(row.option for row in candidate.rows)
        if options in peaks:
            if fitting or is_lowest:
                break
            candidate, is_lowest = group.plan(lowest, policy_fields, model), True
            continue
        with candidate.apply():
            peak = peaks[options] = group.max(_peak(step, group, candidate))
        surprise = peak - candidate.predicted_peak_bytes
        if peak <= candidate.budget_bytes and abs(surprise) <= _TOLERANCE * candidate.predicted_peak_bytes:
            return candidate
        candidate = _corrected(candidate, surprise)
        if limit is None:
            return replace(candidate, budget_bytes=peak)
        if peak <= limit:
            fitting.append(candidate)
        if len(peaks) < _MOST_CHECKS:
            candidate = group.plan(partial(fastest, candidate.correction_bytes), policy_fields, model)
    if fitting:
        return min(fitting, key=lambda plan: plan.predicted_step_seconds)
    return group.from_leader(refuse) if check else candidate


def _corrected(plan: Plan, surprise: int) -> Plan:
    """Returns a plan with its peak as measured, which is ``surprise`` above the predicted one."""
    measured = plan.predicted_peak_bytes + surprise
    return replace(
        plan,
        predicted_peak_bytes=measured,
        floor_bytes=min(plan.floor_bytes + max(0, surprise), measured),
        plain_peak_bytes=plan.plain_peak_bytes + surprise,
        correction_bytes=plan.correction_bytes + surprise,
    )


def _peak(step: RealStep, group: PlanGroup, plan: Plan) -> int:
    """Returns the peak of a step under a plan.

    The thread of gloo sometimes frees the tensors of a collective late, so the lower of two peaks counts. If tensors
    are offloaded, the higher one counts: threads copy them, which may be early now and late another time. For the same
    reason a peak below the prediction proves nothing.
    """
    if step.device.type != "cpu":
        return step.peak()
    if any(row.moved_bytes for row in plan.rows):
        return max(plan.predicted_peak_bytes - plan.correction_bytes, step.peak(), step.peak())
    return min(step.peak() for _ in range(1 + (group.size > 1)))
