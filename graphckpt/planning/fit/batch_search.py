"""Finds the batch sizes that fit: measures the step at a few, plans all others from these, and runs what it found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import count
from math import isqrt
from typing import TYPE_CHECKING, final

from graphckpt.errors import ConfigError
from graphckpt.planning import budget as budgets
from graphckpt.planning.errors import PlanError
from graphckpt.planning.fit.result import Fit
from graphckpt.planning.fit.rows import BatchFit
from graphckpt.planning.fit.search import divisors, doubling, largest, largest_of, on_lines
from graphckpt.planning.fit.sizes import SizedPlanners, SizePlanner

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphckpt.planning.fit.steps import StepSource
    from graphckpt.planning.options import PlanOptions
    from graphckpt.planning.plan import Plan
    from graphckpt.planning.planner import Planner

_FIRST_FAKE = 8  # larger than where kernels change with small batches
_MOST_BETWEEN = 3
_MOST_SPREAD = 32  # of the sizes of rows that were not asked for, the ratio of the largest to the smallest
_REAL_FACTOR = 4  # the third measurement of a real step, as a multiple of the second
_MOST_CORRECTIONS = 4


def fit_steps(
    source: StepSource,
    batch_sizes: Iterable[int] | None,
    memory_budget: budgets.Budget,
    options: PlanOptions,
    *,
    global_batch: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Fit:
    """Fits the steps of a source; see :func:`graphckpt.fit`."""
    budget = check_fit_budget(memory_budget)
    sizes = _checked_sizes(batch_sizes, global_batch)
    return _Search(source, sizes, budget, options, global_batch, progress or (lambda _: None)).found()


def check_fit_budget(budget: budgets.Budget) -> int | str:
    """Returns a budget that a fit can use.

    Raises:
        ConfigError: it cannot be read, or it is ``"min"``.
    """
    if budget == "min":
        fix = "fix: memory_budget='12GiB', '50%' or 'max'"
        raise ConfigError(f"memory_budget: 'min' is a different number of bytes for each batch size · {fix}")
    return budgets.check_budget(budget)


def _checked_sizes(given: Iterable[int] | None, global_batch: int | None) -> range | list[int] | None:
    if global_batch is not None and (isinstance(global_batch, bool) or global_batch < 1):
        raise ConfigError(f"global_batch: expected 1 or more, got {global_batch!r} · fix: global_batch=512")
    if given is None:
        return None
    fix = "fix: batch_sizes=[1, 2, 4, 8], or range(1, 65)"
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise ConfigError(f"batch_sizes: expected whole numbers, got {given!r} · {fix}")
    if isinstance(given, range):
        if given.start < 1 or given.step != 1 or not given:
            raise ConfigError(f"batch_sizes: expected a range from 1 or more with step 1, got {given!r} · {fix}")
        return given
    sizes = list(given)
    wrong = next((size for size in sizes if isinstance(size, bool) or not isinstance(size, int) or size < 1), None)
    if wrong is not None or not sizes:
        raise ConfigError(f"batch_sizes: expected whole numbers of 1 or more, got {sizes!r} · {fix}")
    more = divisors(global_batch) if global_batch is not None else []
    return sorted({*sizes, *(size for size in more if min(sizes) <= size <= max(sizes))})


@final
class _Search:
    """Measures the step at a few sizes, and plans all others from these."""

    def __init__(
        self,
        source: StepSource,
        sizes: range | list[int] | None,
        budget: int | str,
        options: PlanOptions,
        global_batch: int | None,
        progress: Callable[[str], None],
    ) -> None:
        self._source = source
        self._budget = budget
        self._global_batch = global_batch
        self._listed = sizes if isinstance(sizes, list) else None
        self._low = 1 if sizes is None else sizes[0]
        self._high = None if sizes is None else sizes[-1]
        self._at_size = SizePlanner(source, options, progress)
        self._limit = 0
        self._checked: dict[int, BatchFit] = {}
        self._not_fitting: int | None = None

    def found(self) -> Fit:
        """Returns the rows of all sizes, of which the largest and the fastest have run under their plans.

        Raises:
            PlanError: not even the smallest batch fits.
        """
        self._measure_some()
        for turn in count():
            due = self._sizes_to_check(with_fastest=turn < _MOST_CORRECTIONS)
            if not due:
                break
            for size in due:
                self._check(size)
        found = self._fit()
        _ = found.largest  # raises if there is none
        if self._global_batch is not None and self._source.can_accumulate:
            self._check_accumulating(found, self._global_batch)
            found = self._fit()
        return found

    def _sizes_to_check(self, *, with_fastest: bool) -> list[int]:
        """Returns the sizes that seem to be the largest and the fastest, unless they have run.

        After a plan that did not fit, predictions are too low: then the size halfway to the largest that has run.
        """
        rows = [row for row in self._rows() if row.fits]
        if not rows:
            return []
        sizes = [rows[-1].batch_size]
        if self._not_fitting is not None:
            known = max((size for size in self._checked if size <= sizes[0]), default=self._low - 1)
            between = [size for size in self._listed or range(sizes[0] + 1) if known < size <= sizes[0]]
            sizes = [between[len(between) // 2]] if between else []
        if with_fastest:
            sizes.append(max(rows, key=lambda row: (row.samples_per_second, row.batch_size)).batch_size)
        return [size for size in dict.fromkeys(sizes) if size not in self._checked]

    def _fit(self) -> Fit:
        rows = self._rows()
        notes = (note for row in rows if row.plan is not None for note in row.plan.notes)
        return Fit(
            rows=tuple(rows),
            budget_bytes=self._limit,
            device=self._at_size.last_step.measurable.device_name,
            global_batch=self._global_batch,
            measured_sizes=tuple(self._at_size.measured_sizes),
            notes=tuple(dict.fromkeys(notes)),
        )

    def _measure_some(self) -> None:
        """Measures two sizes, a third one that shows whether memory is affine, and others in between if it is not."""
        at_size, high = self._at_size, self._high
        listed = [size for size in self._listed or () if size > 1]
        is_free = self._source.can_run_any and self._listed is None  # no size costs more than another
        first = listed[0] if listed else max(self._low, _FIRST_FAKE if is_free else 2)  # at 1 some copies are views
        first = first if high is None else min(first, high)
        planners = at_size.measure(first)
        self._limit = self._limit_of(planners)
        second = 2 * first if high is None else min(2 * first, high)
        if second == first or not at_size.can_measure(second, self._limit):
            return
        at_size.measure(second)
        if not at_size.can_predict:
            return
        third = self._largest(lambda size: at_size.predict(size).least_bytes)
        if not self._source.can_run_any:
            third = self._largest(lambda size: at_size.predict(size).plain_bytes, min(third, _REAL_FACTOR * second))
        if third <= second:
            return
        at_size.measure(third)
        for _ in range(_MOST_BETWEEN):
            if at_size.is_affine_above or third <= second + 1:
                break
            second = max(second + 1, isqrt(second * third))
            at_size.measure(second)

    def _limit_of(self, planners: SizedPlanners) -> int:
        static = planners.planners.plain.measured.model.static_bytes
        available = self._source.available_bytes(self._at_size.last_step, static)
        if budgets.is_percentage(self._budget):
            return budgets.budget_bytes(self._budget, floor=0, static=0, plain_peak=available, available=available)
        return planners.planners.bytes_of(self._budget, available)

    def _largest(self, bytes_of: Callable[[int], int], high: int | None = None) -> int:
        """Returns the largest size whose peak is within the budget; the smallest one minus 1 if there is none."""
        high = self._high if high is None else high
        if self._not_fitting is not None:
            high = self._not_fitting - 1 if high is None else min(high, self._not_fitting - 1)
        if self._listed is not None:
            sizes = [size for size in self._listed if high is None or size <= high]
            return largest_of(lambda size: bytes_of(size) <= self._limit, sizes) or self._low - 1
        known = [size for size in self._at_size.measured_sizes if self._low <= size <= (high or size)]
        start = max((size for size in known if bytes_of(size) <= self._limit), default=self._low)
        return largest(bytes_of, self._limit, start, high)

    def _rows(self) -> list[BatchFit]:
        return [self._row(size) for size in self._sizes()]

    def _sizes(self) -> list[int]:
        """Returns the sizes of the rows."""
        if self._listed is not None:
            return self._listed
        most = self._largest(lambda size: self._planners(size).least_bytes)
        if most < self._low:
            return [self._low]
        plain = self._largest(lambda size: self._planners(size).plain_bytes, most)
        least = self._low
        if self._high is None:  # all sizes are possible
            least = max(most // _MOST_SPREAD, min(most, self._at_size.measured_sizes[0]), self._low)
            least = 2 ** (least - 1).bit_length()
            least = min(least, most)
        sizes = {*doubling(least, most), *([plain] if plain >= self._low else [])}
        if self._global_batch is not None:
            sizes |= {size for size in divisors(self._global_batch) if least <= size <= most}
        return sorted(sizes)

    def _planners(self, size: int) -> SizedPlanners:
        return self._at_size.at(size, self._limit)

    def _row(self, size: int) -> BatchFit:
        if size in self._checked:
            measured, factor = self._planners(size).is_measured, self._time_factor(size)
            return replace(self._checked[size], is_measured=measured, time_factor=factor)
        found = self._planners(size)
        grads = found.gradient_bytes
        is_out = self._not_fitting is not None and size >= self._not_fitting
        return BatchFit(
            batch_size=size,
            plan=None if is_out else self._plan(found, 0),
            plain_peak_bytes=found.plain_bytes,
            floor_bytes=found.least_bytes,
            is_measured=found.is_measured,
            optimizer_seconds=found.optimizer_seconds,
            time_factor=self._time_factor(size),
            accumulating_plan=None if is_out else self._plan(found, grads),
        )

    def _time_factor(self, size: int) -> float:
        """Returns by what the predicted seconds of a size are multiplied: 1 where it was measured."""
        factors = dict.fromkeys(self._at_size.measured_sizes, 1.0)
        for checked, row in self._checked.items():
            if row.plan is not None and row.checked_seconds is not None and row.plan.predicted_step_seconds:
                factors[checked] = row.checked_seconds / row.plan.predicted_step_seconds
        return on_lines(factors, size)

    def _plan(self, found: SizedPlanners, correction: int) -> Plan | None:
        def plan(planner: Planner) -> Plan:
            return planner.plan(self._limit, correction=correction)

        try:
            return self._portable(found.planners.best_of(plan))
        except PlanError:
            return None

    def _portable(self, plan: Plan) -> Plan:
        """Returns a plan without the model, if that exists only while fake tensors do."""
        return replace(plan, model=None) if self._source.can_run_any else plan

    def _check(self, size: int) -> None:
        """Runs the step of a size under its plan."""
        row = self._row(size)
        try:
            run = self._at_size.run(size, self._limit)
        except PlanError:
            self._not_fitting = min(size, self._not_fitting or size)
            return
        if run is None:
            self._checked[size] = row
            return
        if run.peak_bytes > self._limit:
            self._not_fitting = min(size, self._not_fitting or size)
            return
        plan = self._portable(run.plan)
        self._checked[size] = replace(row, plan=plan, checked_peak_bytes=run.peak_bytes, checked_seconds=run.seconds)

    def _check_accumulating(self, found: Fit, global_batch: int) -> None:
        """Runs a step of two micro-batches, since any more take as much memory."""
        try:
            row = found.at_global_batch(global_batch)
        except PlanError:
            return
        if row.accumulation == 1:
            return
        run = self._at_size.run(row.batch_size, self._limit, accumulation=2)
        if run is not None:
            own = self._row(row.batch_size)
            self._checked[row.batch_size] = replace(own, checked_accumulating_bytes=run.peak_bytes)
