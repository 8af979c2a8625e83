"""The data of a fit that its tables and pictures show."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, final

from graphckpt.planning.errors import PlanError
from graphckpt.units import format_bytes

if TYPE_CHECKING:
    from graphckpt.planning.plan import Plan


Goal: TypeAlias = Literal["throughput", "batch"]
"""What a micro-batch is chosen for: the most samples per second, or the largest batch."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFit:
    """The best plan of one micro-batch size."""

    batch_size: int
    """Samples in one forward."""
    plan: Plan | None
    """The fastest plan within the budget; ``None`` if none fits."""
    plain_peak_bytes: int
    """The peak with everything kept."""
    floor_bytes: int
    """The lowest peak of any plan."""
    is_measured: bool
    """Whether the step was measured at this size; if not, the numbers are interpolated between measured sizes."""
    accumulation: int = 1
    """Forwards for one update of the weights."""
    optimizer_seconds: float = 0.0
    """Seconds of the optimizer, once for an update."""
    time_factor: float = 1.0
    """The seconds of steps that ran under their plans divided by those predicted, interpolated for this size."""
    accumulating_plan: Plan | None = field(default=None, repr=False)
    """The fastest plan of a step that accumulates gradients. It holds all of them in its forward, and its predicted
    peak counts them in every interval, so that it is an upper bound."""
    checked_peak_bytes: int | None = None
    """The peak of a step that ran under the plan; ``None`` if it did not run."""
    checked_seconds: float | None = None
    """Seconds of that step."""
    checked_accumulating_bytes: int | None = None
    """The peak of a step that ran under the accumulating plan; ``None`` if it did not run."""

    @property
    def fits(self) -> bool:
        """Whether a plan fits into the budget."""
        return self.plan is not None

    @property
    def global_batch(self) -> int:
        """Samples of one update."""
        return self.batch_size * self.accumulation

    @property
    def peak_bytes(self) -> int:
        """The predicted peak under the plan, or the lowest one if no plan fits."""
        return self.floor_bytes if self.plan is None else self.plan.predicted_peak_bytes

    @property
    def seconds(self) -> float:
        """Seconds of one update: predicted, or of the step that ran under the plan; infinite if no plan fits."""
        if self.plan is None:
            return float("inf")
        if self.checked_seconds is not None:
            return self.checked_seconds
        each = self.time_factor * self.plan.predicted_step_seconds - self.optimizer_seconds
        return self.accumulation * each + self.optimizer_seconds

    @property
    def samples_per_second(self) -> float:
        """The throughput that follows from :attr:`seconds`; 0 if no plan fits."""
        return self.global_batch / self.seconds if self.seconds else 0.0

    @property
    def recomputes(self) -> bool:
        """Whether the plan of any block does something other than keeping everything on the device."""
        return self.plan is None or bool(self.plan.blocks)

    def accumulating(self, accumulation: int) -> BatchFit:
        """Returns the same micro-batch with ``accumulation`` forwards for one update."""
        if accumulation == 1:
            return self
        floor = self.floor_bytes if self.accumulating_plan is None else self.accumulating_plan.floor_bytes
        return replace(
            self,
            plan=self.accumulating_plan,
            floor_bytes=floor,
            accumulation=accumulation,
            checked_peak_bytes=self.checked_accumulating_bytes,
            checked_seconds=None,
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values."""
        is_fitting = self.plan is not None
        return {
            "batch_size": self.batch_size,
            "accumulation": self.accumulation,
            "fits": is_fitting,
            "peak_bytes": self.peak_bytes,
            "seconds": self.seconds if is_fitting else None,
            "samples_per_second": self.samples_per_second if is_fitting else None,
            "plain_peak_bytes": self.plain_peak_bytes,
            "floor_bytes": self.floor_bytes,
            "is_measured": self.is_measured,
            "checked_peak_bytes": self.checked_peak_bytes,
            "checked_seconds": self.checked_seconds,
            "blocks": {name: dict(fields) for name, fields in self.plan.blocks.items()} if self.plan else None,
        }


@dataclass(frozen=True, kw_only=True, repr=False)
class FitRows:
    """One row for each micro-batch size, in ascending order, and what is found in them."""

    rows: tuple[BatchFit, ...]
    budget_bytes: int
    device: str
    global_batch: int | None = None
    """The global batch that was asked for."""
    measured_sizes: tuple[int, ...] = ()
    """The batch sizes at which the step was measured, in rows or not."""
    notes: tuple[str, ...] = ()

    @property
    def largest(self) -> BatchFit:
        """The largest batch that fits.

        Raises:
            PlanError: none does.
        """
        return max(self._fitting(), key=lambda row: row.batch_size)

    @property
    def largest_without_recompute(self) -> BatchFit | None:
        """The largest batch that fits with everything kept; ``None`` if none does."""
        plain = [row for row in self.rows if row.plain_peak_bytes <= self.budget_bytes]
        return plain[-1] if plain else None

    @property
    def fastest(self) -> BatchFit:
        """The batch with the most samples per second.

        Raises:
            PlanError: none fits.
        """
        return max(self._fitting(), key=lambda row: (row.samples_per_second, row.batch_size))

    def at_global_batch(self, global_batch: int, goal: Goal = "throughput") -> BatchFit:
        """Returns the micro-batch with which gradients are accumulated over ``global_batch`` samples.

        Args:
            global_batch: samples of one update.
            goal: ``"throughput"`` for the fastest one, ``"batch"`` for the largest.

        Raises:
            PlanError: no row fits whose size divides ``global_batch``.
        """
        known = [row for row in self.rows if global_batch % row.batch_size == 0]
        rows = [row.accumulating(global_batch // row.batch_size) for row in known]
        found = [row for row in rows if row.fits]
        if not found:
            divisors = ", ".join(str(row.batch_size) for row in known)
            if not divisors:
                tried = ", ".join(str(row.batch_size) for row in self.rows)
                what = f"expected a multiple of a batch size that was planned, which are {tried}"
                raise PlanError(f"global batch {global_batch}: {what} · fix: plan for batch sizes that divide it")
            what = f"none of the batch sizes {divisors} fits into {format_bytes(self.budget_bytes)}"
            raise PlanError(f"global batch {global_batch}: {what} · fix: smaller batch sizes, or a larger budget")
        if goal == "batch":
            return max(found, key=lambda row: row.batch_size)
        return max(found, key=lambda row: (row.samples_per_second, row.batch_size))

    def _fitting(self) -> list[BatchFit]:
        rows = [row for row in self.rows if row.fits]
        if rows:
            return rows
        first = self.rows[0]
        raise PlanError(
            f"memory_budget {format_bytes(self.budget_bytes)}: no batch fits · the lowest possible peak is "
            f"{format_bytes(first.floor_bytes)} at batch size {first.batch_size} · "
            "fix: smaller batch sizes, or a larger budget"
        )
