"""Plans policies for a memory budget: measures a step under all candidates, chooses among them, and checks the plan."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from functools import cached_property, partial
from math import inf
from typing import Any, final

from torch import nn

from graphckpt._compat_compiler import has_compiled_call
from graphckpt.blocks.apply import apply
from graphckpt.blocks.forward import BlockForward
from graphckpt.blocks.select import Selector, layers, select
from graphckpt.errors import ConfigError, PlanError, did_you_mean, shown
from graphckpt.extras import require
from graphckpt.ledger.table import time_of
from graphckpt.planning import options as budgets
from graphckpt.planning.candidates import (
    JOINED,
    can_join,
    compiled_forwards,
    parse_compile,
    parse_partition_request,
    with_partition,
)
from graphckpt.planning.candidates import options as candidates_of
from graphckpt.planning.fake_device import FakeDevice
from graphckpt.planning.memory_model import MeasuredStep
from graphckpt.planning.options import Budget, DeviceMemory, PlanOptions
from graphckpt.planning.plan import Plan
from graphckpt.planning.plan_group import GroupError, PlanGroup, planning_group
from graphckpt.planning.profile import Device, load_profile
from graphckpt.planning.recorded_step import RecordedStep
from graphckpt.planning.rows import PlanRow, Stage
from graphckpt.planning.search import CopyRates, PolicyChoice, PolicySearch, interval_name
from graphckpt.planning.steps import FakeStep, MakeModel, RealStep, made_step
from graphckpt.planning.sweep import measure
from graphckpt.planning.trace import Blocks, PathError
from graphckpt.progress import Progress
from graphckpt.rules.base import parse_rule
from graphckpt.stores.base import parse_offload
from graphckpt.units import format_bytes


def plan(
    model: nn.Module | MakeModel,
    step_fn: Callable[[], object] | None = None,
    *,
    memory_budget: Budget,
    device: Device = None,
    **options: Any,
) -> Plan:
    """Chooses the policy of each block so that a step is as fast as possible within a memory budget.

    The step runs a few times under different policies. Parameters, buffers, gradients, optimizers and random state
    are restored at the end; whatever else ``step_fn`` changes, such as a scheduler, stays changed.

    Args:
        model: The model on the device on which it will train, without policies; or a function without arguments that
            returns it and ``step_fn``.
        step_fn: Runs forward and backward of ``model`` once, and the optimizer step, if its memory should count.
        memory_budget: The peak of the whole step in bytes, or as ``"12GiB"``; ``"50%"`` is half of the device's memory,
            ``0.6`` is 60 % of the plain step's peak; ``"max"`` is the memory of the device less a headroom, ``"min"``
            the lowest possible peak.
        device: ``None`` runs the step on the device of the model. The name of a device profile such as ``"h200"``, a
            profile file or a profile runs no step: ``model`` has to be a function, which is called where tensors
            allocate no memory, and builds the model there.
        options: Fields of :class:`~graphckpt.planning.PlanOptions`, such as ``offload="cpu"``.

    Returns:
        The plan; :meth:`Plan.apply` sets its policies on the model.

    Raises:
        ConfigError: An argument cannot be used, or no layers were found in the model.
        PlanError: No plan fits, and the message names the lowest possible peak and what sets it; or another process
            has failed.

    >>> import torch
    >>> from torch import nn
    >>> layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)]
    >>> model, x = nn.Sequential(*layers), torch.ones(512, 64)
    >>> found = plan(model, lambda: model(x).sum().backward(), memory_budget=0.6)
    >>> found.predicted_peak_bytes <= found.budget_bytes < found.plain_peak_bytes
    True
    """
    with planning_group(options.get("group") if device is None else False) as group:
        wanted = PlanOptions.of(options, "plan")
        machine = None if device is None else FakeDevice(load_profile(device))
        step, module = made_step(_make_model(model, step_fn, device), machine, "plan.model")
        blocks = find_blocks(module, wanted.blocks)
        return plan_step(step, module, blocks, memory_budget, wanted, group, step.restoring())


def _make_model(model: Any, step_fn: Any, device: Device) -> MakeModel:
    """Returns the function that builds the model, or one that returns it."""
    if step_fn is None and callable(model) and not isinstance(model, nn.Module):
        make: MakeModel = model
        return make
    if device is not None:
        what = f"expected a function that builds it, for device={str(device)!r}, got {shown(model)}"
        fix = "def make_model(): ...; return model, step_fn; then plan(make_model, device=...)"
        raise ConfigError(f"plan.model: {what} · fix: {fix}")
    if not callable(step_fn):
        what = f"expected a function without arguments that runs a step, got {shown(step_fn)}"
        raise ConfigError(f"plan.step_fn: {what} · fix: lambda: model(x).sum().backward()")
    return lambda: (model, step_fn)


def plan_step(
    step: RealStep | FakeStep,
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    memory_budget: Budget,
    options: PlanOptions,
    group: PlanGroup,
    restoring: AbstractContextManager[None],
    *,
    notes: Sequence[str] = (),
    on_measured: Callable[[Planners], None] = lambda _: None,
) -> Plan:
    """Plans a step on all processes of ``group``; ``restoring`` undoes what its runs change."""
    budget = budgets.check_budget(memory_budget)
    group.check_equal(memory_budget=budgets.budget_kind(budget), check=options.check)
    if isinstance(step, FakeStep) and (options.compile or options.partition):
        name = "compile" if options.compile else "partition"
        raise ConfigError(
            f"{name}: its effect is not known on an absent device · fix: leave it out, or plan on the device"
        )
    with restoring, _progress_of(options, group) as progress:
        progress.begin("running the step to measure it")
        planners = measure_all(step, model, blocks, options, group, notes, progress)
        on_measured(planners)
        progress.begin(f"choosing the policies of {len(blocks)} blocks")
        limit, headroom = _limit_of(budget, planners.plain, step, group)
        if isinstance(step, FakeStep):

            def plan_with(planner: Planner) -> Plan:
                return planner.plan(planner.floor.peak if limit is None else limit)

        else:
            plan_with = partial(plan_and_check, model=model, step=step, limit=limit, group=group, check=options.check)
        return replace(planners.best_of(plan_with, is_least=limit is None), headroom_bytes=headroom)


def _progress_of(options: PlanOptions, group: PlanGroup) -> Progress:
    return Progress(is_shown=False if callable(options.progress) or group.rank else options.progress)


def plan_recorded(
    step: RecordedStep,
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    memory_budget: Budget,
    options: PlanOptions,
    group: PlanGroup,
    *,
    extra_bytes: int = 0,
    or_lowest: bool = False,
    notes: Sequence[str] = (),
) -> Plan:
    """Plans a step that the training loop has run, on all processes of ``group``; the step does not run again.

    ``extra_bytes`` is what an earlier plan took beyond its prediction. If no plan fits, ``or_lowest`` returns the plan
    with the lowest peak, with a warning.
    """
    budget = budgets.check_budget(memory_budget)
    group.check_equal(memory_budget=budgets.budget_kind(budget))
    with step.standing_alone(), _progress_of(options, group) as progress:
        progress.begin("measuring the layers")
        planners = measure_all(step, model, blocks, options, group, notes, progress)
    limit, headroom = _limit_of(budget, planners.plain, step, group)

    def plan_with(planner: Planner) -> Plan:
        option = step.option_of(planner.measured.options)
        predicted = planner.search.evaluate([option] * len(blocks)).peak if option >= 0 else step.peak_bytes
        surplus = group.max(max(0, step.peak_bytes - predicted)) + extra_bytes
        bound = planner.floor.peak + surplus if limit is None else limit
        try:
            return planner.plan(bound, surplus)
        except PlanError as error:
            if not or_lowest:
                raise
            warnings.warn(f"graphckpt: {error} · using the plan with the lowest peak for now", stacklevel=2)
            return planner.to_plan(planner.floor, bound, surplus)

    return replace(planners.best_of(plan_with), headroom_bytes=headroom)


def find_blocks(model: nn.Module, selectors: Selector | Iterable[Selector] | None) -> list[tuple[str, nn.Module]]:
    """Returns the blocks to plan, none inside of another.

    Raises:
        ConfigError: A selector matches nothing, no layers were found, or a module has a policy, is compiled as a whole,
            or has its own gradient checkpointing enabled.
    """
    if selectors is None:
        names = layers(model)
        if not names:
            raise ConfigError(
                f"{type(model).__name__}: no list of layers was found · fix: blocks='name.of.layers.*', or their class"
            )
    else:
        listed = [selectors] if isinstance(selectors, str) or not isinstance(selectors, Iterable) else list(selectors)
        wanted = {name for selector in listed for name, _ in select(model, selector)}
        order = [name for name, _ in model.named_modules()]
        names = [n for n in order if n in wanted and not any(n != w and n.startswith(f"{w}.") for w in wanted if w)]
    found = [(name, model.get_submodule(name)) for name in names]
    for name, module in found:
        if any(isinstance(part.forward, BlockForward) for part in module.modules()):
            raise ConfigError(
                f"{name}: expected a block without a policy · fix: graphckpt.remove(model) before planning"
            )
    for name, part in model.named_modules():
        if has_compiled_call(part) and any(f"{block}.".startswith(f"{name}." if name else "") for block in names):
            raise ConfigError(
                f"{name or type(model).__name__}: expected a module that is not compiled as a whole · "
                "fix: plan with compile=True, which compiles each layer inside of its policy"
            )
        if getattr(part, "gradient_checkpointing", False) is True:
            raise ConfigError(
                f"{name or type(model).__name__}: expected its own gradient checkpointing to be off · "
                "fix: model.gradient_checkpointing_disable()"
            )
    return found


def _limit_of(
    budget: Budget, planner: Planner, step: RealStep | FakeStep | RecordedStep, group: PlanGroup
) -> tuple[int | None, int]:
    """Returns the bytes that a step of any process may take, ``None`` for the lowest possible peak, and the headroom.

    With a share of the plain step it is the leader's limit, otherwise the smallest of all processes.
    """
    if budget == "min":
        return None, 0
    num_sharing = 1
    if not isinstance(step, FakeStep):
        memory_id = budgets.memory_id(step.device)
        num_sharing = group.all_gather(memory_id).count(memory_id)
    memory = step.memory(planner.measured.model.static_bytes, num_sharing)
    headroom = memory.headroom if budget == "max" else 0
    limits = group.all_gather([planner.bytes_of(budget, memory), headroom])
    limit, headroom = limits[group.leader] if isinstance(budget, float) else min(limits)
    return int(limit), int(headroom)


def measure_all(
    step: RealStep | FakeStep | RecordedStep,
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    options: PlanOptions,
    group: PlanGroup,
    notes: Sequence[str] = (),
    progress: Progress | None = None,
) -> Planners:
    """Measures every candidate on every block, once for each way in which the head may run.

    Raises:
        ConfigError: an option cannot be used.
        MissingPackageError: the extra ``plan`` is not installed.
        PlanError: the step cannot be measured, or another process has failed.
    """
    require("plan", "numpy", "networkx")  # before minutes of measuring

    def on_run(done: int, total: int) -> None:
        if callable(options.progress):
            options.progress(done, total)
        elif progress is not None:
            progress.begin(f"run {done} of {total} is done")

    modules = [module for _, module in blocks]
    ranks, found = parse_partition_request(options.partition, group.size)
    found = [*notes, *found]
    code = parse_compile(options.compile, options.candidates)
    candidates = candidates_of(options.offload, options.candidates, code=code)
    if ranks is not None:
        candidates = with_partition(candidates, ranks)
    heads = head_rows(model, options.head, blocks)
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
            try:
                measured = measure(step, Blocks(blocks), candidates, on_run, group)
            except PathError as error:
                if group.size > 1 or not step.repeat_longest(Blocks(blocks), error.orders):
                    raise
                found.append(_ALL_BLOCKS)
                measured = measure(step, Blocks(blocks), candidates, on_run)
            measured = group.times(measured)
        planners.append(
            Planner(
                measured,
                model=model,
                device=step.device_name,
                is_simulated=step.is_simulated,
                rates=rates,
                host_budget=options.host_bytes,
                # without the first layer of a run, the others join the run before it, and exceed the peak
                joins=can_join(modules, options.candidates) and _ALL_BLOCKS not in found,
                notes=(*found, *group.notes),
                extra_rows=rows,
                compiled={} if code.field is None else {"compile": code.field},
                has_slabs=options.contiguous,
            )
        )
    return Planners(planners)


_ALL_BLOCKS = (
    "the step calls other blocks each time, as LayerDrop does; it is planned for a step that calls all of them, so the "
    "peak is an upper bound"
)


def _slowest(rates: Sequence[Sequence[float] | None]) -> CopyRates | None:
    rows = [each for each in rates if each is not None]
    return CopyRates(*map(min, zip(*rows, strict=True))) if len(rows) == len(rates) else None


def head_rows(
    model: nn.Module, head: Mapping[str, Any] | None, blocks: Sequence[tuple[str, nn.Module]]
) -> list[tuple[PlanRow, ...]]:
    """Returns the alternatives for the head: no policy, or one of the rules that are given for it."""
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
            settings = {each.name: getattr(rule, each.name) for each in fields(rule)}
            plain = {"activation_checkpointing": {"rule": rule.name, **settings}}
            alternatives.append((PlanRow(block=name, option=rule.describe(), fields=plain),))
    return alternatives


@final
@dataclass(eq=False)
class Planner:
    measured: MeasuredStep
    _: KW_ONLY
    model: nn.Module | None = None
    device: str = "cpu"
    is_simulated: bool = False
    rates: CopyRates | None = None
    host_budget: int | None = None
    joins: bool = True
    notes: tuple[str, ...] = ()
    extra_rows: tuple[PlanRow, ...] = ()
    """The rows of plans for other blocks, active when the step was measured."""
    compiled: Mapping[str, Any] = field(default_factory=dict)
    """The fields of all layers beside their options."""
    has_slabs: bool = False

    def __post_init__(self) -> None:
        self.search = PolicySearch(self.measured, self.rates, self.host_budget, joins=self.joins)
        self.plain = self.search.evaluate((0,) * len(self.measured.names))

    @cached_property
    def floor(self) -> PolicyChoice:
        return self.search.floor()

    def bytes_of(self, budget: Budget, memory: DeviceMemory) -> int:
        floor = self.floor.peak if budget == "min" else 0
        return budgets.budget_bytes(budget, memory, plain_peak=self.plain.peak, floor=floor)

    def plan(self, budget: int, correction: int = 0) -> Plan:
        """Returns the fastest plan whose peak is at most ``budget`` bytes.

        ``correction`` is the measured peak of a step minus the prediction, in bytes.

        Raises:
            PlanError: There is none.
        """
        choice = self.search.fastest(budget - correction)
        if choice is None:
            raise PlanError(self.infeasible(budget, self.floor.peak + correction))
        return self.to_plan(choice, budget, correction)

    def front(self, correction: int = 0) -> list[Plan]:
        return [self.to_plan(choice, choice.peak + correction, correction) for choice in self.search.pareto()]

    def uniform(self) -> dict[str, Plan]:
        """Returns the plan with one option for all blocks, for each option by its name."""
        options = zip(self.measured.options, self.search.uniform(), strict=True)
        return {option.name: self.to_plan(choice, choice.peak) for option, choice in options}

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
        if self.has_slabs:
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
            device=self.device,
            is_simulated=self.is_simulated,
            stages=tuple(
                Stage(
                    name=interval_name(level.interval, names, known.model.block_of_call),
                    start_bytes=level.start,
                    peak_bytes=level.peak,
                )
                for level in self.search.levels(choice.plan, choice.runs)
            ),
            notes=(*known.notes, *self.notes),
            model=None if self.is_simulated else self.model,
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
            f"{format_bytes(lowest)}{' without offloading' if self.rates is not None else ''}, "
            f"reached {time_of(where)}; {format_bytes(static)} of it are weights, optimizer state and inputs · "
            f"fix: {fix}"
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
    """Plans of one step that was measured in several ways: with its loss computed at once, and in slices."""

    def __init__(self, planners: Sequence[Planner]) -> None:
        self._planners = planners
        self.plain = planners[0]
        """Of the step as it is."""

    def floor_bytes(self) -> int:
        return min(planner.floor.peak for planner in self._planners)

    def bytes_of(self, budget: Budget, memory: DeviceMemory) -> int:
        return self.floor_bytes() if budget == "min" else self.plain.bytes_of(budget, memory)

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
        is_least: bool = False,
    ) -> Plan:
        """Returns the fastest plan of all planners; with ``is_least`` the one with the lowest peak.

        Raises:
            PlanError: no planner has a plan; the error is that of the planner with the lowest floor.
        """
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
        return replace(best, front=lambda: self.front(max(0, best.correction_bytes)))

    def front(self, correction: int = 0) -> list[Plan]:
        """Returns the Pareto-optimal plans, lowest peak first.

        ``correction`` is the measured peak of a step minus the prediction, in bytes.
        """
        plans = [plan for planner in self._planners for plan in planner.front(correction)]
        plans.sort(key=lambda plan: (plan.predicted_peak_bytes, plan.predicted_step_seconds))
        seconds = [plan.predicted_step_seconds for plan in plans]
        return [plan for number, plan in enumerate(plans) if seconds[number] < min(seconds[:number], default=inf)]


_TOLERANCE = 0.01  # of the predicted peak; larger differences are corrected
_MOST_CHECKS = 3  # another plan may run other ops at its peak


def plan_and_check(
    planner: Planner,
    model: nn.Module,
    step: RealStep,
    limit: int | None,
    group: PlanGroup,
    *,
    check: bool = True,
) -> Plan:
    """Returns the plan of ``group``, with peaks of at most ``limit`` bytes; ``None`` is the lowest possible.

    With ``check`` the step of each process runs under the plan, and the largest peak counts. If it exceeds the budget
    or is over 1 % off, it replans. ``model`` is that of ``step``, which may be another one than was measured.
    """

    def fastest(correction: int = 0) -> Plan:
        """Returns the plan for the budget; where none is predicted to fit, the one that is predicted to take least."""
        bound = planner.floor.peak if limit is None else limit
        choice = planner.search.fastest(max(bound - correction, planner.floor.peak)) if check else None
        plan = planner.plan(bound) if choice is None else planner.to_plan(choice, bound, correction)
        return replace(plan, model=model)

    peaks: dict[tuple[str, ...], int] = {}  # by the options of a plan
    fitting: list[Plan] = []
    candidate = fastest()
    is_lowest = False
    while check:
        options = tuple(row.option for row in candidate.rows)
        if options in peaks:
            if fitting or is_lowest:
                break
            candidate = replace(planner.to_plan(planner.floor, limit or 0), model=model)
            is_lowest = True
            continue
        group.check_equal(policies=list(options))
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
            candidate = fastest(candidate.correction_bytes)
    if fitting:
        return min(fitting, key=lambda plan: plan.predicted_step_seconds)
    if check:
        raise PlanError(planner.infeasible(limit or 0, min(peaks.values())))
    return candidate


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
