"""Plans a step at any batch size, from measurements at a few."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

from graphckpt.planning.fit.gradients import GradientBytes
from graphckpt.planning.fit.interpolate import NotAffineError
from graphckpt.planning.fit.recording import RecordedStep, Recording, ReplayedStep, are_affine
from graphckpt.planning.model.events import Phase
from graphckpt.planning.plan_group import PlanGroup

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphckpt.planning.fit.steps import PlanRun, SizedStep, StepSource
    from graphckpt.planning.options import PlanOptions
    from graphckpt.planning.planner import Planners


@final
@dataclass(frozen=True, slots=True)
class SizedPlanners:
    """The planners of one batch size."""

    planners: Planners
    is_measured: bool
    """Whether the step was measured at this size, and not at others."""
    optimizer_seconds: float
    """Seconds of the optimizer in a step."""
    gradient_bytes: int
    """Bytes of gradients that an accumulating step holds in its forward, and this one does not."""

    @property
    def least_bytes(self) -> int:
        """The lowest peak of any plan."""
        return self.planners.bytes_of("min", 0)

    @property
    def plain_bytes(self) -> int:
        """The peak with everything kept."""
        return self.planners.plain.plain.peak


@final
class SizePlanner:
    """Plans a step at any batch size. Sizes between and above three at which memory is affine are not measured.

    Args:
        source: makes the step of each size.
        options: what the planner may use.
        progress: called with a line about each measurement before it begins.
    """

    def __init__(self, source: StepSource, options: PlanOptions, progress: Callable[[str], None]) -> None:
        self._source = source
        self._options = options
        self._progress = progress
        self._recordings: dict[int, Recording] = {}
        self._first: Recording | None = None
        self._measured: dict[int, SizedPlanners] = {}
        self._interpolated: dict[int, SizedPlanners] = {}
        self._predicted: dict[int, SizedPlanners] = {}
        self._gradient_bytes = 0
        self._last: SizedStep | None = None
        self._affine: dict[tuple[int, int, int], bool] = {}

    @property
    def measured_sizes(self) -> list[int]:
        """The sizes at which the step was measured, in ascending order."""
        return sorted(self._measured)

    @property
    def last_step(self) -> SizedStep:
        """The step that was measured last."""
        assert self._last is not None
        return self._last

    @property
    def can_predict(self) -> bool:
        """Whether the measurements can be combined to predict another size."""
        sizes = self.measured_sizes
        return len(sizes) > 1 and self._replay(2 * sizes[-1], *_nearest(sizes, 2 * sizes[-1])) is not None

    @property
    def is_affine_above(self) -> bool:
        """Whether memory is affine in the three largest sizes that were measured."""
        low, middle, high = self.measured_sizes[-3:]
        return self._is_affine((low, middle, high))

    def at(self, size: int, limit: int) -> SizedPlanners:
        """Returns the planners of a size: from measurements at other sizes if memory is affine, or measured here.

        Args:
            size: the batch size.
            limit: what may be allocated; a step that needs more to be measured is predicted in any case.
        """
        if size in self._measured:
            return self._measured[size]
        if size not in self._interpolated:
            near = self._affine_pair(size)
            found = None if near is None else self._replay(size, *near)
            if found is None:
                return self.measure(size) if self.can_measure(size, limit) else self.predict(size)
            self._interpolated[size] = found
        return self._interpolated[size]

    def can_measure(self, size: int, limit: int) -> bool:
        """Returns whether the step may be measured at a size, which runs it with everything kept."""
        if self._source.can_run_any:
            return True
        if len(self._measured) < 2:
            return all(size < known or planners.plain_bytes <= limit for known, planners in self._measured.items())
        return self.predict(size).plain_bytes <= limit

    def measure(self, size: int) -> SizedPlanners:
        """Measures the step at a size."""
        if size in self._measured:
            return self._measured[size]
        self._progress(f"measuring the step at batch size {size}")
        self._last = None  # its tensors take memory
        step = self._last = self._source.step(size)
        recorded = RecordedStep(step.measurable, size, self._first)
        with step.restoring(), GradientBytes(step.model, step.blocks[0][1]) as gradients:
            planners = self._planners(recorded)
        self._recordings[size] = recorded.recording
        self._first = self._first or recorded.recording
        self._gradient_bytes = gradients.num_bytes
        self._measured[size] = self._sized(planners, recorded.recording, is_measured=True)
        self._predicted.clear()
        return self._measured[size]

    def predict(self, size: int) -> SizedPlanners:
        """Returns the planners of a size from the nearest measurements, whether or not memory is affine.

        Where two measurements cannot be combined, that of the next larger size counts, or else that of the largest.
        """
        sizes = self.measured_sizes
        if size in self._measured:
            return self._measured[size]
        if size not in self._predicted:
            found = self._replay(size, *_nearest(sizes, size)) if len(sizes) > 1 else None
            self._predicted[size] = found or replace(self._measured[_next(sizes, size)], is_measured=False)
        return self._predicted[size]

    def run(self, size: int, limit: int, accumulation: int = 1) -> PlanRun | None:
        """Runs the step of a size under its plan."""
        self._progress(f"running the step at batch size {size} under its plan")
        self._last = None
        step = self._last = self._source.step(size, accumulation)
        found = self.at(size, limit)
        return step.run(found.planners, limit, found.gradient_bytes if accumulation > 1 else 0)

    def _affine_pair(self, size: int) -> tuple[int, int] | None:
        """Returns the two measured sizes nearest to ``size`` if memory is known to be affine there."""
        sizes = self.measured_sizes
        for triple in zip(sizes, sizes[1:], sizes[2:], strict=False):
            is_near = triple[0] < size and (size < triple[2] or triple[2] == sizes[-1])
            if is_near and self._is_affine(triple):  # beyond the last size, the longest line errs least in seconds
                return _nearest(triple, size) if size < triple[2] else (triple[0], triple[2])
        return None

    def _is_affine(self, triple: tuple[int, int, int]) -> bool:
        if triple not in self._affine:
            self._affine[triple] = are_affine([self._recordings[size] for size in triple])
        return self._affine[triple]

    def _replay(self, size: int, low: int, high: int) -> SizedPlanners | None:
        measurable = self.last_step.measurable
        try:
            replayed = ReplayedStep(size, self._recordings[low], self._recordings[high], measurable)
            planners = self._planners(replayed)
        except NotAffineError:
            return None
        return self._sized(planners, self._recordings[low], is_measured=False)

    def _planners(self, step: RecordedStep | ReplayedStep) -> Planners:
        from graphckpt.planning.measure_all import measure_all  # noqa: PLC0415 - imports most of the planner

        made, notes = self.last_step, self._source.notes
        return measure_all(step, made.model, made.blocks, self._options, PlanGroup(), notes, step.levels)

    def _sized(self, planners: Planners, recording: Recording, *, is_measured: bool) -> SizedPlanners:
        times = recording.runs[0].sample.seconds
        seconds = sum(took for interval, took in times.items() if interval.phase is Phase.OPTIMIZER)
        return SizedPlanners(planners, is_measured, seconds, self._gradient_bytes)


def _nearest(sizes: tuple[int, ...] | list[int], size: int) -> tuple[int, int]:
    """Returns the two measured sizes around a size, or the two nearest.

    >>> _nearest((2, 4, 16), 8), _nearest((2, 4, 16), 32), _nearest((2, 4, 16), 1)
    ((4, 16), (4, 16), (2, 4))
    """
    number = sum(1 for one in sizes if one <= size)
    first = min(max(number - 1, 0), len(sizes) - 2)
    return sizes[first], sizes[first + 1]


def _next(sizes: list[int], size: int) -> int:
    """Returns the smallest measured size that is not smaller, or the largest."""
    return next((one for one in sizes if one >= size), sizes[-1])
