"""Finds the batch sizes that fit into a memory budget, and the plan of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias, Unpack, final

import torch
import torch.distributed as dist
from torch import nn

from graphckpt.blocks.hooks import add_pre_hook
from graphckpt.budget import Budget, check_budget
from graphckpt.errors import ConfigError, GraphckptError, PlanError
from graphckpt.planning.options import DeviceMemory, FitOptionsDict, PlanOptions, budget_bytes, lists_options
from graphckpt.planning.plan import Plan
from graphckpt.planning.plan_group import PlanGroup
from graphckpt.planning.plan_step import find_blocks, measure_all
from graphckpt.planning.planner import Planners, plan_in_limit, run_under
from graphckpt.planning.rows import assumptions_line
from graphckpt.planning.steps import FakeStep, RealStep, made_step
from graphckpt.search.fit_result import BatchFit, Fit
from graphckpt.search.search import Report, Search, reporting
from graphckpt.search.sizes import SizeSearch, check_any_ran, faults_of, range_or_list, size_of
from graphckpt.simulation.cluster_profile import Cluster
from graphckpt.simulation.fake_cluster import simulated_rank
from graphckpt.simulation.fake_device import FakeDevice
from graphckpt.simulation.profile import Device, load_profile
from graphckpt.training_state import keeping_surroundings
from graphckpt.undo import Undo, scope

MakeStep: TypeAlias = Callable[[int], tuple[nn.Module, Callable[[], object]]]

_FIRST_FAKE = 8  # larger than where kernels change with small batches
_FIRST_REAL = 2  # with one sample some copies are views
_SLACK = 1.1  # of the available memory: a step that is predicted to need more is not run at all


class SizedStep(NamedTuple):
    step: RealStep | FakeStep
    model: nn.Module
    blocks: Sequence[tuple[str, nn.Module]]


MakeSized: TypeAlias = Callable[[int, int], SizedStep]
"""Returns the step of a batch size that accumulates the gradients of a number of batches."""


class _Memory(NamedTuple):
    """The figures of the first measurement of a step that hold for all sizes, in bytes."""

    device: str
    static: int
    gradients: int
    """Bytes of gradients, which exist in every forward but that of the first micro-batch."""
    total: DeviceMemory
    limit: int


# Note [How a row comes about]
#
#     search.result(size)   once for each size; a ValueError of the step is kept as the error of the size
#       _new_row            1. a real step, and a smaller size does not fit: neither does this one, and nothing runs
#                           2. an absent device, or no smaller size that fits was measured: `_measure`
#                           3. a real step that is predicted to fit with everything kept: `_measure`
#                           4. it is not, or memory ran out in 3: `_run_under_plans_of` the next smaller measured size
#
# An error that is not a ValueError is one of the program, and ends the search.


@final
@dataclass(eq=False, kw_only=True)
class SizedSteps:
    """The steps that ``make_sized`` makes, for :meth:`fit`. Each is measured, planned, and runs under its plan."""

    make_sized: MakeSized
    budget: Budget
    options: PlanOptions
    is_real: bool
    """Whether they run, so that they may need more memory than there is."""
    can_accumulate: bool = False
    """Whether they can accumulate gradients."""
    notes: Sequence[str] = ()
    """Notes of the plans."""
    report: Report = field(init=False)
    memory: _Memory = field(init=False)
    """Known as soon as there is a row."""

    def __post_init__(self) -> None:
        self.search: Search[int, BatchFit] = Search(
            self._new_row,
            # Such as that of BatchNorm with one sample.
            skips=lambda error: isinstance(error, ValueError) and not isinstance(error, GraphckptError),
            where=lambda size: f"find_batch_size: raised at batch size {size}",
        )
        self.rows = self.search.results

    @property
    def verb(self) -> str:
        return "measuring" if self.is_real else "simulating"

    def fit(
        self, batch_sizes: Iterable[int] | None, global_batch: int | None, progress: Report | bool | None = None
    ) -> Fit:
        """Finds the batch sizes that fit; see :func:`fit` for the arguments."""
        samples = None if global_batch is None else size_of(global_batch)
        if samples == 0:
            what = f"expected an int of 1 or more, got {global_batch!r}"
            raise ConfigError(f"global_batch: {what} · fix: global_batch=512")
        sizes = None if batch_sizes is None else range_or_list(batch_sizes, samples)
        low, high = (1, None) if sizes is None else (sizes[0], sizes[-1])
        with reporting(progress) as self.report:
            if isinstance(sizes, list):
                listed = sizes
            else:
                first = _FIRST_REAL if self.is_real else _FIRST_FAKE
                search = SizeSearch(self.search, low, high)
                listed = search.run(first, samples, self.excess_with_everything_kept, self.excess_of_floor)
            fit = self._fit_of(listed, samples)
            largest = fit.largest.batch_size  # raises if there is none
            if samples is not None and self.can_accumulate:
                fit = self._with_checked_accumulation(listed, samples)
        # A row of a size that does not fit is a row too: with it, the largest is known to be the largest.
        return replace(fit, is_searched=largest + 1 in self.rows)

    def _fit_of(self, sizes: Iterable[int], global_batch: int | None) -> Fit:
        rows = tuple(row for row in map(self.search.result, sizes) if row is not None)
        check_any_ran(self.search)
        plans = [row.plan for row in rows] + [row.accumulating_plan for row in rows if row.checked_accumulating_bytes]
        notes = dict.fromkeys(note for plan in plans if plan is not None for note in plan.notes)
        notes |= {assumptions_line(row.plan): None for row in rows if row.plan is not None and row.plan.assumptions}
        faults = faults_of(dict(sorted(self.search.errors.items())))
        notes |= {f"left out: the step cannot run at {fault}": None for fault in faults}
        return Fit(
            rows=rows,
            budget_bytes=self.memory.limit,
            device=self.memory.device,
            is_simulated=not self.is_real,
            headroom_bytes=self.memory.total.headroom if self.budget == "max" else 0,
            global_batch=global_batch,
            measured_sizes=tuple(size for size in sorted(self.rows) if self.rows[size].is_measured),
            notes=tuple(notes),
        )

    def excess_of_floor(self, row: BatchFit) -> int:
        """Returns the bytes of the lowest peak above the limit, at least 1 if no plan fits."""
        excess = row.floor_bytes - self.memory.limit
        return excess if row.fits else max(1, excess)

    def excess_with_everything_kept(self, row: BatchFit) -> int:
        """Returns the bytes of the step with everything kept above the limit: of its peak, or those to be reserved.

        Where the latter are limited but not known, they are those of the row's plan, with more between the blocks of
        the allocator as the peak is higher.
        """
        limit, plan, num_bytes = self.memory.limit, row.plan, row.plain_peak_bytes
        if not self.is_real and self.budget == "max" and plan is not None and plan.predicted_reserved_bytes:
            if plan.keeps_everything:
                num_bytes = min(plan.predicted_reserved_bytes, limit)
            else:
                scaled = plan.predicted_reserved_bytes * num_bytes // plan.predicted_peak_bytes
                num_bytes = max(scaled, limit + 1)
        return num_bytes - limit if row.is_measured else max(1, num_bytes - limit)

    def _with_checked_accumulation(self, sizes: Iterable[int], global_batch: int) -> Fit:
        """Returns the fit whose best micro-batch for ``global_batch`` has run with accumulation within the limit."""
        while True:  # a plan that has to change may make another size the fastest
            fit = self._fit_of(sizes, global_batch)
            try:
                row = fit.at_global_batch(global_batch)
            except PlanError:
                return fit
            if row.accumulation == 1 or row.checked_peak_bytes is not None or row.plan is None or _offloads(row.plan):
                return fit
            plan = self._accumulating_plan(row.batch_size, row.plan)
            peak = None if plan is None else plan.predicted_peak_bytes
            self.rows[row.batch_size] = replace(
                self.rows[row.batch_size], accumulating_plan=plan, checked_accumulating_bytes=peak
            )

    def _accumulating_plan(self, size: int, plan: Plan) -> Plan | None:
        """Runs a step of two micro-batches, since any more take as much memory, under its plan.

        If that takes too much, the step itself is planned. Returns the plan with its peak and the seconds of one
        micro-batch; ``None`` if none fits.
        """
        self.report(f"{self.verb} two steps of batch size {size} for one update")
        sized = self.make_sized(size, 2)
        step, group, limit = sized.step, PlanGroup(), self.memory.limit
        is_reserved = isinstance(step, FakeStep) and step.limits_reserved(self.budget)
        run = run_under(plan, sized.model, step, group, most_reserved=limit if is_reserved else 0)
        accumulating, optimizer_seconds = run.plan, self.rows[size].optimizer_seconds
        if run.needed_bytes > limit:
            planners = measure_all(step, sized.model, sized.blocks, self.options, group, self.notes)
            try:
                accumulating = self._plan_in_limit(planners, step)
            except PlanError:
                return None
        # Two micro-batches and an update in 5 s, of which the update takes 1, are (5 - 1) / 2 + 1 = 3 s for one of them
        # with the update: `BatchFit.seconds` takes the update off again, and adds it once for all micro-batches.
        seconds = (accumulating.predicted_step_seconds - optimizer_seconds) / 2 + optimizer_seconds
        return replace(
            accumulating,
            predicted_step_seconds=seconds,
            communication_seconds=accumulating.communication_seconds / 2,
            exposed_seconds=accumulating.exposed_seconds / 2,
        )

    def _plan_in_limit(self, planners: Planners, step: RealStep | FakeStep) -> Plan:
        """Returns the fastest plan under which the step runs in the memory limit; raises PlanError if there is none."""
        limit = self.memory.limit
        return planners.best_of(lambda planner: plan_in_limit(planner, step, self.budget, limit, PlanGroup()))

    def _new_row(self, size: int) -> BatchFit:
        smaller = [self.rows[one] for one in sorted(self.rows) if one < size]
        failed = next((row for row in smaller if not row.fits), None)
        base = next((row for row in reversed(smaller) if row.fits and row.is_measured), None)
        if self.is_real and failed is not None:  # a larger size does not fit either
            return replace(failed, batch_size=size, is_measured=False)
        if not self.is_real or base is None:
            return self._measure(size)
        if self._scaled(base.plain_peak_bytes, base, size) <= self.memory.total.available:
            try:
                return self._measure(size)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
        return self._run_under_plans_of(base, size)

    def _scaled(self, num_bytes: int, base: BatchFit, size: int) -> int:
        """Scales a peak to another size, with its static bytes unchanged."""
        # 10 GiB at batch 4, of which 6 are static (weights and states), are 14 at batch 8. Gradients, which backward
        # makes, count as if they grew as well: it errs upwards, for which `_SLACK` leaves room.
        return self.memory.static + (num_bytes - self.memory.static) * size // base.batch_size

    def _measure(self, size: int) -> BatchFit:
        self.report(f"{self.verb} the step at batch size {size}")
        sized = self.make_sized(size, 1)
        step, model = sized.step, sized.model
        with step.restoring(), _gradients_missing_in_forward(model, sized.blocks[0][1], step.rounded) as missing:
            planners = measure_all(step, model, sized.blocks, self.options, PlanGroup(), self.notes)
            if not self.rows:
                static, gradients = planners.plain.measured.model.static_bytes, missing[-1] if missing else 0
                memory = step.memory(static)
                self.memory = _Memory(step.device_name, static, gradients, memory, budget_bytes(self.budget, memory))
            limit = self.memory.limit
            row = BatchFit(
                batch_size=size,
                plan=None,
                plain_peak_bytes=planners.plain.plain.peak,
                floor_bytes=planners.floor_bytes(),
                is_measured=True,
                optimizer_seconds=planners.plain.measured.optimizer_seconds,
            )
            try:
                plan = self._plan_in_limit(planners, step)
                row = self._run_under_plan(row, sized, plan)
                correction = self.memory.gradients + (0 if row.plan is None else max(0, row.plan.correction_bytes))
                bound = limit
                if not self.can_accumulate and isinstance(step, FakeStep) and step.limits_reserved(self.budget):
                    # No accumulating step can run to say what the allocator reserves for it: about as much more.
                    bound -= max(0, plan.predicted_reserved_bytes - plan.predicted_peak_bytes)
                accumulating_plan = planners.best_of(lambda planner: planner.plan(bound, correction=correction))
                accumulating_plan = replace(accumulating_plan, budget_bytes=limit)
            except PlanError:
                return row
        return replace(row, accumulating_plan=accumulating_plan if row.fits else None)

    def _run_under_plan(self, row: BatchFit, sized: SizedStep, plan: Plan) -> BatchFit:
        """Returns the row with its plan; a step on a device that is present runs under it once more, to be timed."""
        if isinstance(sized.step, FakeStep):
            seconds = plan.predicted_step_seconds
            return replace(row, plan=plan, checked_peak_bytes=plan.predicted_peak_bytes, checked_seconds=seconds)
        run = run_under(plan, sized.model, sized.step, PlanGroup(), is_timed=True).run
        peak, seconds = run.peak_bytes, run.seconds
        if peak > self.memory.limit:
            return replace(row, floor_bytes=max(row.floor_bytes, self.memory.limit + 1))
        factor = seconds / plan.predicted_step_seconds if plan.predicted_step_seconds else 1.0
        return replace(row, plan=plan, time_factor=factor, checked_peak_bytes=peak, checked_seconds=seconds)

    def _run_under_plans_of(self, base: BatchFit, size: int) -> BatchFit:
        """Runs the step of a size at which it does not fit with everything kept, under the plans of a smaller size.

        The fastest that keeps the budget counts.
        """
        assert base.plan is not None
        assert base.plan.front is not None
        limit, plans = self.memory.limit, base.plan.front()  # lowest peak first
        row = BatchFit(
            batch_size=size,
            plan=None,
            plain_peak_bytes=base.plain_peak_bytes,
            floor_bytes=self._scaled(plans[0].predicted_peak_bytes, base, size),
            is_measured=False,
            optimizer_seconds=base.optimizer_seconds,
        )
        if row.floor_bytes > _SLACK * self.memory.total.available:
            return row
        self.report(f"running the step at batch size {size} under plans of batch size {base.batch_size}")
        sized = self.make_sized(size, 1)

        def run(number: int) -> Plan:
            ran = run_under(plans[number], sized.model, sized.step, PlanGroup(), is_timed=True).run
            return replace(
                plans[number],
                predicted_peak_bytes=ran.peak_bytes,
                predicted_step_seconds=ran.seconds,
                budget_bytes=limit,
                model=sized.model,
                stages=(),
                front=None,
            )

        runs: Search[int, Plan] = Search(
            run,
            skips=lambda error: isinstance(error, torch.OutOfMemoryError),
            where=lambda number: f"find_batch_size: raised under plan {number} of batch size {base.batch_size}",
        )

        # Plans of 6, 8 and 11 GiB at this size, as scaled, with a limit of 9: that of 8 runs first, as less memory
        # takes more time, and that of 6 if it takes too much. The lowest runs in any case: scaled peaks err upwards.
        def fastest(most_bytes: int) -> Plan | None:
            peaks = [self._scaled(plan.predicted_peak_bytes, base, size) for plan in plans]
            candidates = [n for n, peak in enumerate(peaks) if peak <= most_bytes or n == 0]
            tried = map(runs.result, reversed(candidates))
            return next((plan for plan in tried if plan is not None and plan.predicted_peak_bytes <= most_bytes), None)

        with sized.step.restoring():
            plan = fastest(limit)
            accumulating_plan = None if plan is None else fastest(limit - self.memory.gradients)
        if plan is None:  # the lowest of all has run, or memory ran out under it
            lowest = runs.results.get(0)
            too_much = max(self.memory.total.available, limit) + 1
            return replace(row, floor_bytes=too_much if lowest is None else lowest.predicted_peak_bytes)
        if accumulating_plan is not None:
            peak = accumulating_plan.predicted_peak_bytes + self.memory.gradients
            accumulating_plan = replace(accumulating_plan, predicted_peak_bytes=peak)
        return replace(
            row,
            plan=plan,
            accumulating_plan=accumulating_plan,
            floor_bytes=min(row.floor_bytes, plan.predicted_peak_bytes),
            checked_peak_bytes=plan.predicted_peak_bytes,
            checked_seconds=plan.predicted_step_seconds,
        )


def _offloads(plan: Plan) -> bool:
    return any(row.moved_bytes for row in plan.rows)


@scope
def _gradients_missing_in_forward(
    undo: Undo, model: nn.Module, block: nn.Module, rounded: Callable[[int], int]
) -> Iterator[list[int]]:
    """Yields a list of the bytes of gradients that do not exist at each forward of a block, each ``rounded``.

    A step with ``zero_grad(set_to_none=True)``, which is the default, has none there.
    """
    sizes: list[int] = []

    def add(*_: object) -> None:
        missing = (p for p in model.parameters() if p.requires_grad and p.grad is None)
        sizes.append(sum(rounded(p.nbytes) for p in missing))

    add_pre_hook(undo, block, add)
    yield sizes


@lists_options(FitOptionsDict)
def find_batch_size(
    make_step: MakeStep,
    *,
    batch_sizes: Iterable[int] | None = None,
    memory_budget: Budget = "max",
    device: Device = None,
    world_size: int | None = None,
    rank: int | None = None,
    cluster: Cluster = None,
    global_batch: int | None = None,
    progress: Callable[[str], None] | bool | None = None,
    restore: Iterable[Any] | None = None,
    **options: Unpack[FitOptionsDict],
) -> Fit:
    """Finds the largest batch that fits into a memory budget, the fastest one, and the plan of each batch size.

    The step is measured at each size that is shown, and runs under its plan. The largest size is searched until it fits
    and one more sample does not. A size at which the memory of the device is too small for the step with everything
    kept runs under the plans of the largest size at which it is not.

    Args:
        make_step: called with a batch size; returns the model and a function that runs one training step of that many
            samples, as :func:`graphckpt.plan` takes them. The model may be the same each time, which takes less memory.
        batch_sizes: the micro-batch sizes to plan, as any ints. A ``range`` with step 1 bounds a search for the largest
            that fits, and ``None`` searches from 1; the rows are then the sizes of the search and some powers of two.
        memory_budget: the peak of the whole step in bytes, or as ``"12GiB"``; ``"50%"`` is half of the device's memory,
            and ``"max"`` all of it less a headroom.
        device: ``None`` runs the steps on the device of the model. The name of a device profile such as ``"h200"``, a
            profile file or a profile runs no step: ``make_step`` is called where tensors allocate no memory, and has to
            build the model there.
        world_size: with ``device``, the number of ranks of an absent cluster, of which one is simulated, as by
            :func:`graphckpt.plan`. Batch sizes are those of the rank.
        rank: the rank that is simulated, by default 0.
        cluster: with ``world_size``, the name of a cluster profile such as ``"dgx-h200"``, a profile file or a profile.
        global_batch: samples of one update; sizes that divide it are planned too, of a search the eight largest that
            fit, for :meth:`~graphckpt.search.fit_result.Fit.at_global_batch`.
        progress: called with a line about each measurement before it begins. ``True`` prints the lines to stderr if
            fitting takes longer than two seconds; ``None`` does so in a terminal and in a notebook.
        restore: objects that a step changes and that are not found, as of :func:`graphckpt.plan`.
        options: fields of :class:`~graphckpt.planning.PlanOptions`, such as ``offload="cpu"``.

    Raises:
        ConfigError: an argument cannot be used, or no layers were found in the model.
        PlanError: not even the smallest batch fits, or the step runs at no size. Sizes at which it raises a ValueError,
            as with BatchNorm and one sample, are left out; a search finds multiples of a number up to 32. Any other
            error of the step is raised as it is, with a note of the batch size.

    >>> import torch
    >>> from torch import nn
    >>> layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)]
    >>> model = nn.Sequential(*layers)
    >>> def make_step(batch_size):
    ...     x = torch.ones(batch_size, 64)
    ...     return model, lambda: model(x).sum().backward()
    >>> result = find_batch_size(make_step, memory_budget="8MiB")
    >>> result.largest.batch_size > result.largest_without_recompute.batch_size
    True
    """
    if isinstance(make_step, nn.Module) or not callable(make_step):
        fix = "def make_step(batch_size): ...; return model, step_fn"
        raise ConfigError(f"make_step: expected a function, got {type(make_step).__name__} · fix: {fix}")
    plan_options = PlanOptions.of(options, "find_batch_size")
    has_group = world_size is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if has_group and plan_options.group is not False:
        fix = "fit in one process and pass the batch size on, or group=False"
        what = f"expected one process, got a group of {dist.get_world_size()}"
        raise ConfigError(f"find_batch_size: {what} · fix: {fix}")
    if plan_options.step_group is not None:
        what = "expected step_group=None, since one process runs the step"
        raise ConfigError(f"find_batch_size: {what} · fix: leave it out")
    plan_options = replace(plan_options, group=False)
    with keeping_surroundings(), simulated_rank(world_size, rank, device, cluster) as simulated:
        machine = None if device is None else FakeDevice(load_profile(device), cluster=simulated)

        def make_sized(size: int, _: int) -> SizedStep:
            step, model = made_step(partial(make_step, size), machine, "find_batch_size.make_step", restore)
            return SizedStep(step, model, find_blocks(model, plan_options.select))

        budget = check_budget(memory_budget, for_fit=True)
        steps = SizedSteps(
            make_sized=make_sized,
            budget=budget,
            options=plan_options,
            is_real=machine is None,
            notes=() if simulated is None else simulated.notes,
        )
        fitted = steps.fit(batch_sizes, global_batch, progress)
    return fitted if simulated is None else replace(fitted, world_size=simulated.world_size, rank=simulated.rank)


fit = find_batch_size
"""A second name, as short as ``plan``."""
