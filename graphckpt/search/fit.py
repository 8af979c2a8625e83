"""Finds the batch sizes that fit into a memory budget, and the plan of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import gcd, inf
from typing import Any, NamedTuple, TypeAlias, Unpack, final

import torch
import torch.distributed as dist
from torch import nn

from graphckpt.blocks.hooks import ModuleHook
from graphckpt.errors import ConfigError, GraphckptError, PlanError, first_line, shown, without_repeats
from graphckpt.planning.options import (
    Budget,
    DeviceMemory,
    FitOptionsDict,
    PlanOptions,
    budget_bytes,
    check_budget,
    lists_options,
)
from graphckpt.planning.plan import Plan
from graphckpt.planning.plan_group import PlanGroup
from graphckpt.planning.plan_step import find_blocks, measure_all
from graphckpt.planning.planner import Planners, plan_in_limit, run_plan
from graphckpt.planning.rows import assumptions_line
from graphckpt.planning.steps import FakeStep, RealStep, made_step
from graphckpt.progress import Progress
from graphckpt.search.fit_result import BatchFit, Fit
from graphckpt.simulation.cluster_profile import Cluster
from graphckpt.simulation.fake_cluster import simulated_rank
from graphckpt.simulation.fake_device import FakeDevice
from graphckpt.simulation.profile import Device, load_profile

MakeStep: TypeAlias = Callable[[int], tuple[nn.Module, Callable[[], object]]]

_FIRST_FAKE = 8  # larger than where kernels change with small batches
_FIRST_REAL = 2  # with one sample some copies are views
_MAX_ROWS = 8  # of sizes that were not listed
_MAX_SPREAD = 32  # of these sizes, the ratio of the largest to the smallest
_MAX_ON_LINES = 8  # sizes that are measured where a line leads before the search bisects
_MAX_SIZE = 2**20  # samples in a batch; memory that fits this many does not depend on the batch
_MAX_STEP = 32  # a step may run only at multiples of a number up to this, and the search finds them
_MAX_GAPS = 2  # errors at multiples of a number, with larger sizes that run, until it is not that one
_SLACK = 1.1  # of the available memory: a step that is predicted to need more is not run at all


class SizedStep(NamedTuple):
    step: RealStep | FakeStep
    model: nn.Module
    blocks: Sequence[tuple[str, nn.Module]]


MakeSized: TypeAlias = Callable[[int, int], SizedStep]
"""Returns the step of a batch size that accumulates the gradients of a number of batches."""


def fit_steps(
    make_sized: MakeSized,
    batch_sizes: Iterable[int] | None,
    memory_budget: Budget,
    options: PlanOptions,
    *,
    is_real: bool,
    can_accumulate: bool = False,
    notes: Sequence[str] = (),
    global_batch: int | None = None,
    progress: Callable[[str], None] | bool | None = None,
) -> Fit:
    """Fits the steps that ``make_sized`` makes; see :func:`fit` for the other arguments.

    ``is_real`` says whether they run, so that they may need more memory than there is, and ``can_accumulate`` whether
    they can accumulate gradients. Plans mention ``notes``.
    """
    budget = check_budget(memory_budget, for_fit=True)
    samples = None if global_batch is None else _size_of(global_batch)
    if samples == 0:
        raise ConfigError(f"global_batch: expected an int of 1 or more, got {global_batch!r} · fix: global_batch=512")
    sizes = None if batch_sizes is None else _range_or_list(batch_sizes, samples)
    low, high = (1, None) if sizes is None else (sizes[0], sizes[-1])
    with Progress(is_shown=False if callable(progress) else progress) as lines:
        report = progress if callable(progress) else lines.begin
        rows = _SizedRows(make_sized, budget, options, report, low, is_real, notes, can_accumulate)
        listed = sizes if isinstance(sizes, list) else _search(rows, low, high, samples)
        fit = rows.fit(listed, samples)
        largest = fit.largest.batch_size  # raises if there is none
        if samples is not None and can_accumulate:
            fit = rows.with_checked_accumulation(listed, samples)
    return replace(fit, is_searched=largest + 1 in rows.sizes)


def _range_or_list(sizes: Iterable[int], global_batch: int | None) -> range | list[int]:
    """Returns a range to search in, or else all sizes to plan."""
    fix = "fix: batch_sizes=[1, 2, 4, 8], or range(1, 65)"
    if isinstance(sizes, range) and sizes.step == 1:
        if sizes.start < 1 or not sizes:
            raise ConfigError(f"batch_sizes: expected a range from 1 or more, got {sizes!r} · {fix}")
        return sizes
    values: Iterator[Any] = iter(())
    with suppress(TypeError):  # of what is not iterable, such as an array without a dimension
        values = iter(() if isinstance(sizes, (str, bytes)) else sizes)
    entries = list(values)
    listed = {*map(_size_of, entries)}
    if not listed or 0 in listed:
        what = "expected a list or a range of ints of 1 or more"
        raise ConfigError(f"batch_sizes: {what}, got {shown(entries or sizes)} · {fix}")
    between = range(min(listed), max(listed) + 1) if global_batch is not None else ()
    return sorted(listed.union(size for size in between if (global_batch or 1) % size == 0))


def _size_of(value: Any) -> int:
    """Returns an int of Python, NumPy or torch as one of Python; 0 if it is not an int of 1 or more."""
    size = value.tolist() if hasattr(value, "tolist") else value
    return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else 0


def _search(rows: _SizedRows, low: int, high: int | None, global_batch: int | None) -> list[int]:
    """Measures until the largest size that fits is known, and some below it; returns those that fit.

    The largest with everything kept is searched first. It is often the fastest, and larger sizes may have to run under
    its plans.
    """
    first_size = _FIRST_REAL if rows.is_real else _FIRST_FAKE
    first = max(low, min(first_size, high or first_size))
    largest(rows.plain_bytes, low, high, [first, min(2 * first, high or 2 * first)])
    rows.check_any_ran()
    top = largest(rows.needed_bytes, low, high, [rows.sizes[0], rows.sizes[-1]])  # far apart: their line errs least
    if top < low:
        return [low]
    bottom = low if high is not None else max(min(first, top), top // _MAX_SPREAD)
    if global_batch is not None:
        more = [size for size in range(bottom, top + 1) if global_batch % size == 0][-_MAX_ROWS:]
    else:
        num_rows = sum(size <= top for size in rows.sizes)
        powers = [2**power for power in range(bottom.bit_length() - 1, top.bit_length())]
        more = [size for size in powers if bottom <= size <= top and size not in rows.sizes]
        more = more[max(0, len(more) + num_rows - _MAX_ROWS) :]
    for size in [low, *more] if high is not None else more:
        rows.nearest(size)
    return [size for size in rows.sizes if rows.rows[size].fits] or rows.sizes[:1]


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
#     nearest(size)     the row of `size`, or of a smaller size at which the step runs
#       row(size)       once for each size; a ValueError of the step puts the size into `errors`
#         _new_row      1. a real step, and a smaller size does not fit: neither does this one, and nothing runs
#                       2. an absent device, or no smaller size that fits was measured: `_measure`
#                       3. a real step that is predicted to fit with everything kept: `_measure`
#                       4. it is not, or memory ran out in 3: `_run_under_plans_of` the next smaller measured size
#
# An error that is not a ValueError is one of the program, and ends the search.


@final
@dataclass(eq=False)
class _SizedRows:
    """The rows of batch sizes. Each step is measured, planned, and runs under its plan."""

    make_sized: MakeSized
    budget: Budget
    options: PlanOptions
    progress: Callable[[str], None]
    low: int
    is_real: bool
    notes: Sequence[str]
    can_accumulate: bool
    rows: dict[int, BatchFit] = field(default_factory=dict)
    errors: dict[int, ValueError] = field(default_factory=dict)
    """By size at which the step cannot run: its error, as with BatchNorm and one sample."""
    end: float = inf
    """A size from which on the step cannot run, if one is known."""
    memory: _Memory = field(init=False)
    """Known as soon as there is a row."""

    @property
    def sizes(self) -> list[int]:
        return sorted(self.rows)

    @property
    def measured_sizes(self) -> list[int]:
        return [size for size in self.sizes if self.rows[size].is_measured]

    @property
    def verb(self) -> str:
        return "measuring" if self.is_real else "simulating"

    def fit(self, sizes: Iterable[int], global_batch: int | None) -> Fit:
        rows = tuple(row for row in map(self.row, sizes) if row is not None)
        self.check_any_ran()
        plans = [row.plan for row in rows] + [row.accumulating_plan for row in rows if row.checked_accumulating_bytes]
        notes = dict.fromkeys(note for plan in plans if plan is not None for note in plan.notes)
        notes |= {assumptions_line(row.plan): None for row in rows if row.plan is not None and row.plan.assumptions}
        notes |= {f"left out: the step cannot run at {fault}": None for fault in self._faults(sorted(self.errors))}
        return Fit(
            rows=rows,
            budget_bytes=self.memory.limit,
            device=self.memory.device,
            is_simulated=not self.is_real,
            headroom_bytes=self.memory.total.headroom if self.budget == "max" else 0,
            global_batch=global_batch,
            measured_sizes=tuple(self.measured_sizes),
            notes=tuple(notes),
        )

    def needed_bytes(self, size: int) -> int:
        return self._bytes_above_limit(size, lambda row: (row.floor_bytes, row.fits))

    def plain_bytes(self, size: int) -> int:
        return self._bytes_above_limit(size, lambda row: (self._plain_bytes_of(row), row.is_measured))

    def _plain_bytes_of(self, row: BatchFit) -> int:
        """Returns the bytes of the step with everything kept: its peak, or those that have to be reserved.

        Where the latter are limited but not known, they are those of the row's plan, with more between the blocks of
        the allocator as the peak is higher.
        """
        plan = row.plan
        if self.is_real or self.budget != "max" or plan is None or not plan.predicted_reserved_bytes:
            return row.plain_peak_bytes
        if plan.keeps_everything:
            return min(plan.predicted_reserved_bytes, self.memory.limit)
        scaled = plan.predicted_reserved_bytes * row.plain_peak_bytes // plan.predicted_peak_bytes
        return max(scaled, self.memory.limit + 1)

    def _bytes_above_limit(self, size: int, bytes_of: Callable[[BatchFit], tuple[int, bool]]) -> int:
        """Returns the bytes of a size beyond the limit, as :func:`largest` takes them: 0 or less if it fits.

        The nearest smaller size at which the step runs counts. If none is near, the search goes on towards sizes at
        which it has run: to smaller ones if there are any.
        """
        if size >= self.end:
            return 1
        if (row := self.nearest(size)) is not None:
            num_bytes, may_fit = bytes_of(row)
            excess = num_bytes - self.memory.limit
            return excess if may_fit else max(1, excess)
        if self.rows and size > self.sizes[0]:
            self.end = size
            return 1
        if len(self.errors) >= _MAX_STEP:
            self.check_any_ran()
        return 0

    def nearest(self, size: int) -> BatchFit | None:
        """Returns the row of a size, or of a smaller one near it at which the step runs; ``None`` if none is found.

        The step may run only at multiples of a unit, which divides all sizes at which it has run.
        """
        candidates: Iterable[int] = range(size, size - _MAX_STEP, -1)
        if sizes := self.measured_sizes:
            # A step that has run at 24 and 36 may need multiples of 12, or of a divisor of it. An error between them at
            # a multiple of a candidate speaks against that candidate; a single one may have another cause.
            common = gcd(*sizes)
            gaps = [error for error in self.errors if sizes[0] < error < sizes[-1]]
            units = [unit for unit in range(1, _MAX_STEP + 1) if common % unit == 0]
            units = [unit for unit in units if sum(gap % unit == 0 for gap in gaps) < _MAX_GAPS]
            candidates = [*(size - size % unit for unit in units or [1]), size - 1]
        return next((row for one in candidates if one >= self.low and (row := self.row(one)) is not None), None)

    def row(self, size: int) -> BatchFit | None:
        """Returns the row of a size; ``None`` if the step cannot run at it."""
        if size not in self.rows and size not in self.errors:
            try:
                self.rows[size] = self._new_row(size)
            except Exception as error:
                if not isinstance(error, ValueError) or isinstance(error, GraphckptError):
                    error.add_note(f"fit: raised at batch size {size}")
                    raise
                self.errors[size] = error
        return self.rows.get(size)

    def check_any_ran(self) -> None:
        """Raises the first error of the step, if it ran at no size."""
        if not self.rows:
            cause = next(iter(self.errors.values()))
            fix = "fix: batch_sizes at which it runs"
            raise PlanError(f"fit: the step cannot run at {self._faults(self.errors)[0]} · {fix}") from cause

    def _faults(self, sizes: Iterable[int]) -> list[str]:
        return without_repeats(f"batch size {size}: {first_line(self.errors[size])}" for size in sizes)

    def with_checked_accumulation(self, sizes: Iterable[int], global_batch: int) -> Fit:
        """Returns the fit whose best micro-batch for ``global_batch`` has run with accumulation within the limit."""
        while True:  # a plan that has to change may make another size the fastest
            fit = self.fit(sizes, global_batch)
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
        self.progress(f"{self.verb} two steps of batch size {size} for one update")
        sized = self.make_sized(size, 2)
        step, group, limit = sized.step, PlanGroup(), self.memory.limit
        is_reserved = isinstance(step, FakeStep) and step.limits_reserved(self.budget)
        run = run_plan(plan, sized.model, step, group, most_reserved=limit if is_reserved else 0)
        accumulating, optimizer_seconds = run.plan, self.rows[size].optimizer_seconds
        if run.needed_bytes > limit:
            planners = measure_all(step, sized.model, sized.blocks, self.options, group, self.notes)
            try:
                accumulating = self._plan_in_limit(planners, step)
            except PlanError:
                return None
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
        smaller = [self.rows[one] for one in self.sizes if one < size]
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
        return self.memory.static + (num_bytes - self.memory.static) * size // base.batch_size

    def _measure(self, size: int) -> BatchFit:
        self.progress(f"{self.verb} the step at batch size {size}")
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
        with plan.apply(sized.model):
            peak, seconds, *_ = sized.step.run()
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
        plans = base.plan.front()  # lowest peak first
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
        self.progress(f"running the step at batch size {size} under plans of batch size {base.batch_size}")
        sized = self.make_sized(size, 1)

        @cache
        def run(number: int) -> Plan:
            try:
                with plans[number].apply(sized.model):
                    peak, seconds, *_ = sized.step.run()
            except torch.OutOfMemoryError:
                peak, seconds = max(self.memory.total.available, self.memory.limit) + 1, float("inf")
            return replace(
                plans[number],
                predicted_peak_bytes=peak,
                predicted_step_seconds=seconds,
                budget_bytes=self.memory.limit,
                model=sized.model,
                stages=(),
                front=None,
            )

        def fastest(limit: int) -> Plan | None:
            peaks = [self._scaled(plan.predicted_peak_bytes, base, size) for plan in plans]
            candidates = [n for n, peak in enumerate(peaks) if peak <= limit or n == 0]
            return next((run(n) for n in reversed(candidates) if run(n).predicted_peak_bytes <= limit), None)

        with sized.step.restoring():
            plan = fastest(self.memory.limit)
            accumulating_plan = None if plan is None else fastest(self.memory.limit - self.memory.gradients)
        if plan is None:
            return replace(row, floor_bytes=run(0).predicted_peak_bytes)
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


@contextmanager
def _gradients_missing_in_forward(
    model: nn.Module, block: nn.Module, rounded: Callable[[int], int]
) -> Iterator[list[int]]:
    """Yields a list of the bytes of gradients that do not exist at each forward of a block, each ``rounded``.

    A step with ``zero_grad(set_to_none=True)``, which is the default, has none there.
    """
    sizes: list[int] = []

    def add(*_: object) -> None:
        missing = (p for p in model.parameters() if p.requires_grad and p.grad is None)
        sizes.append(sum(rounded(p.nbytes) for p in missing))

    hook = block.register_forward_pre_hook(ModuleHook(add))
    try:
        yield sizes
    finally:
        hook.remove()


def largest(bytes_of: Callable[[int], int], low: int, high: int | None, start: Iterable[int]) -> int:
    """Returns the largest size from ``low`` to ``high`` that fits, or ``low - 1`` if none does.

    The next size to measure is where the line through the last two reaches the limit, so that few are needed where the
    bytes are nearly affine.

    Args:
        bytes_of: returns the bytes above the limit, 0 or less if a size fits; they do not become fewer with it.
        low: the smallest size.
        high: the largest size; ``None`` sets no limit.
        start: the sizes to measure first.

    >>> largest(lambda size: 100 + 7 * size - 1000, 1, None, [8, 16]), largest(lambda size: size - 83, 1, 64, [8])
    (128, 64)
    >>> largest(lambda size: size * size - 1000, 1, None, [8, 16]), largest(lambda size: size - 3, 4, None, [8])
    (31, 3)
    """
    end = (_MAX_SIZE if high is None else high) + 1
    fits, above = low - 1, end
    points: list[tuple[int, int]] = []
    queue = list(start)
    while above - fits > 1:
        if queue:
            size = queue.pop(0)
            if not fits < size < above:
                continue
        elif 2 <= len(points) <= _MAX_ON_LINES and points[-1][1] != points[-2][1]:
            (before, value_before), (size, value) = points[-2:]
            size -= value * (size - before) // (value - value_before)
        else:
            size = 2 * max(fits, 1) if above == end else (fits + above) // 2
        size = min(max(size, fits + 1), above - 1)
        points.append((size, bytes_of(size)))
        if points[-1][1] <= 0:
            fits = size
        else:
            above = size
    return fits


@lists_options(FitOptionsDict)
def fit(
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
    >>> result = fit(make_step, memory_budget="8MiB")
    >>> result.largest.batch_size > result.largest_without_recompute.batch_size
    True
    """
    if isinstance(make_step, nn.Module) or not callable(make_step):
        fix = "def make_step(batch_size): ...; return model, step_fn"
        raise ConfigError(f"make_step: expected a function, got {type(make_step).__name__} · fix: {fix}")
    plan_options = PlanOptions.of(options, "fit")
    has_group = world_size is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if has_group and plan_options.group is not False:
        fix = "fit in one process and pass the batch size on, or group=False"
        raise ConfigError(f"fit: expected one process, got a group of {dist.get_world_size()} · fix: {fix}")
    if plan_options.step_group is not None:
        raise ConfigError("fit: expected step_group=None, since one process runs the step · fix: leave it out")
    plan_options = replace(plan_options, group=False)
    with simulated_rank(world_size, rank, device, cluster) as simulated:
        machine = None if device is None else FakeDevice(load_profile(device), cluster=simulated)

        def make_sized(size: int, _: int) -> SizedStep:
            step, model = made_step(partial(make_step, size), machine, "fit.make_step", restore)
            return SizedStep(step, model, find_blocks(model, plan_options.select))

        fitted = fit_steps(
            make_sized,
            batch_sizes,
            memory_budget,
            plan_options,
            is_real=machine is None,
            notes=() if simulated is None else simulated.notes,
            global_batch=global_batch,
            progress=progress,
        )
    return fitted if simulated is None else replace(fitted, world_size=simulated.world_size, rank=simulated.rank)
