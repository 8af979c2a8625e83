"""The batch sizes that fit into a memory budget, with the plan of each; their table and their picture."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, final, get_args

from rich.text import Text

from graphckpt.errors import ConfigError, PlanError
from graphckpt.ledger.groups import rule_colour, sorted_rules
from graphckpt.ledger.page import notebook_html
from graphckpt.ledger.plot import (
    ACCENT,
    DASHES,
    INK,
    figure_of,
    file_of,
    frame,
    legend,
    patches,
    title_of,
    unit_of,
)
from graphckpt.ledger.table import Column, bullet, bytes_or_dash, show, table_of, text_of
from graphckpt.planning.plot import LEVEL_AT_START
from graphckpt.planning.rows import Budgeted, budget_line, byte_values, device_text
from graphckpt.units import format_bytes, format_rate, format_seconds, format_sizes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from graphckpt.planning.plan import Plan

Goal: TypeAlias = Literal["throughput", "batch"]
"""The goal for which a micro-batch is chosen: the most samples per second, or the largest batch."""

_NUMBERS = (
    "batch_size", "accumulation", "fits", "peak_bytes", "seconds", "samples_per_second", "plain_peak_bytes",
    "floor_bytes", "is_measured", "checked_peak_bytes", "checked_seconds",
)  # fmt: skip
_BYTE_VALUES = ("allocated_bytes", "reserved_bytes", "expandable_reserved_bytes", "nvidia_smi_bytes", "parts")
_OP_LEVEL = re.compile(r"\(level \d+ of \d+\)")
_TOP = 1.25  # of the budget: the upper limit of the memory axis
_RESERVED = "reserved"
_COLUMNS = (
    *(Column(name, is_number=True) for name in ("batch", "peak", _RESERVED, "kept", "step", "samples/s")),
    Column("policies"),
    Column("from"),
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFit:
    """The best plan of one micro-batch size."""

    batch_size: int
    """Samples in one forward."""
    plan: Plan | None
    """The fastest plan within the budget; ``None`` if none fits."""
    plain_peak_bytes: int
    """The peak with everything kept; where the step cannot run so, that of the largest size that could, a lower
    bound."""
    floor_bytes: int
    """The lowest peak of any plan; a lower bound where the step was not measured."""
    is_measured: bool
    """Whether the step was measured, or simulated, at this size. If not, it does not fit into the memory of the device
    with everything kept, and ran under the plans of the largest size that does."""
    accumulation: int = 1
    """Forwards for one update of the weights."""
    optimizer_seconds: float = 0.0
    """Seconds of the optimizer, once for an update."""
    time_factor: float = 1.0
    """The seconds of the step that ran under the plan divided by those predicted; 1 if it did not run."""
    accumulating_plan: Plan | None = field(default=None, repr=False)
    """The fastest plan of a step that accumulates gradients. It holds all of them in its forward, and its predicted
    peak counts them in every interval, so that it is an upper bound."""
    checked_peak_bytes: int | None = None
    """The peak of a step that ran, or was simulated, under the plan; ``None`` if none did."""
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
        # A plan of 2 s for the step, of which the optimizer takes 0.5, and that ran in 2.2 s: 4 forwards for one update
        # take 4 * (1.1 * 2 - 0.5) + 0.5 = 7.3 s.
        each = self.time_factor * self.plan.predicted_step_seconds - self.optimizer_seconds
        return self.accumulation * each + self.optimizer_seconds

    @property
    def samples_per_second(self) -> float:
        """The throughput that follows from :attr:`seconds`; 0 if no plan fits."""
        return self.global_batch / self.seconds if self.seconds else 0.0

    @property
    def recomputes(self) -> bool:
        """Whether the plan of any block does something other than keeping everything on the device."""
        return self.plan is None or bool(self.plan.policies)

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
        values = {name: getattr(self, name) for name in _NUMBERS}
        if not self.fits:
            values |= {"seconds": None, "samples_per_second": None}
        values |= dict.fromkeys(_BYTE_VALUES) if self.plan is None else byte_values(self.plan)
        policies = {name: dict(fields) for name, fields in self.plan.policies.items()} if self.plan else None
        return {**values, "policies": policies, "blocks": policies}  # under its old name for scripts that read it


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Fit(Budgeted):
    """The result of :func:`graphckpt.find_batch_size`: the best plan of each micro-batch size, with its throughput."""

    rows: tuple[BatchFit, ...]
    """One for each micro-batch size, in ascending order."""
    global_batch: int | None = None
    """The ``global_batch`` of the call."""
    measured_sizes: tuple[int, ...] = ()
    """The batch sizes at which the step was measured, in rows or not."""
    notes: tuple[str, ...] = ()
    is_searched: bool = True
    """Whether with one sample more than in the largest batch no plan fits. If not, larger batches were not tried, or
    the step cannot run with it."""

    @property
    def largest(self) -> BatchFit:
        """The largest batch that fits, of those that were tried: see :attr:`is_searched`.

        Raises:
            PlanError: none does.
        """
        return max(self._fitting(), key=lambda row: row.batch_size)

    @property
    def largest_without_recompute(self) -> BatchFit | None:
        """The largest batch that fits with everything kept; ``None`` if none does."""
        plain = [row for row in self.rows if row.is_measured and row.plain_peak_bytes <= self.budget_bytes]
        if self.is_simulated:  # the bytes that are reserved may have to fit, too
            plain = [row for row in plain if row.plan is not None and row.plan.keeps_everything]
        return plain[-1] if plain else None

    @property
    def fastest(self) -> BatchFit:
        """The batch with the most samples per second.

        Raises:
            PlanError: none fits.
        """
        return max(self._fitting(), key=_speed)

    def at_global_batch(self, global_batch: int, goal: Goal = "throughput") -> BatchFit:
        """Returns the micro-batch with which gradients are accumulated over ``global_batch`` samples.

        Args:
            global_batch: samples of one update.
            goal: ``"throughput"`` for the fastest one, ``"batch"`` for the largest.

        Raises:
            ConfigError: ``goal`` is another one.
            PlanError: no row fits whose size divides ``global_batch``.
        """
        if goal not in get_args(Goal):
            raise ConfigError(f"goal: expected 'throughput' or 'batch', got {goal!r} · fix: goal='batch'")
        dividing = [row for row in self.rows if global_batch % row.batch_size == 0]
        rows = [row.accumulating(global_batch // row.batch_size) for row in dividing]
        fitting = [row for row in rows if row.fits]
        if fitting:
            return max(fitting, key=_speed if goal == "throughput" else lambda row: row.batch_size)
        divisors = ", ".join(str(row.batch_size) for row in dividing)
        if not divisors:
            sizes = ", ".join(str(row.batch_size) for row in self.rows)
            what = f"expected a multiple of a batch size that was planned, which are {sizes}"
            raise PlanError(f"global batch {global_batch}: {what} · fix: plan for batch sizes that divide it")
        what = f"none of the batch sizes {divisors} fits into {format_bytes(self.budget_bytes)}"
        raise PlanError(f"global batch {global_batch}: {what} · fix: smaller batch sizes, or a larger budget")

    def __str__(self) -> str:
        """Returns the table, in plain text."""
        return text_of(_parts_of(self)).rstrip("\n")

    def __repr__(self) -> str:
        """Returns one line."""
        sizes = [row.batch_size for row in self.rows if row.fits]
        largest = f"{_largest_name(self)} {sizes[-1]}" if sizes else "no batch fits"
        where = f"{format_bytes(self.budget_bytes)} on {device_text(self)}"
        return f"<Fit of {len(self.rows)} batch sizes: {largest} in {where}>"

    def _repr_html_(self) -> str:
        return notebook_html(_parts_of(self), self.plot, alt="throughput, peak memory and policies by batch size")

    def explain(self, *, display: bool = True) -> Self:
        """Prints the table unless ``display`` is false; returns the fit, which prints the same."""
        if display:
            show(_parts_of(self))
        return self

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values."""
        plain = self.largest_without_recompute
        fits = any(row.fits for row in self.rows)
        values: dict[str, Any] = {
            "device": self.device,
            "is_simulated": self.is_simulated,
            "budget_bytes": self.budget_bytes,
            "headroom_bytes": self.headroom_bytes,
            "largest": self.largest.batch_size if fits else None,
            "is_searched": self.is_searched,
            "largest_without_recompute": None if plain is None else plain.batch_size,
            "fastest": self.fastest.batch_size if fits else None,
            "rows": [row.to_dict() for row in self.rows],
            "notes": list(self.notes),
        }
        if self.global_batch is not None:
            values["global_batch"] = {"size": self.global_batch}
            try:
                values["global_batch"] |= self.at_global_batch(self.global_batch).to_dict()
            except PlanError as error:
                values["global_batch"] |= {"fits": False, "fault": str(error)}
        return values

    def plot(self, path: str | Path) -> Path:
        """Draws samples per second, the peak, and the share of blocks of each policy over the batch size.

        Args:
            path: the file to write, or to replace; its suffix, ``.png`` or ``.svg``, is the format.

        Returns:
            The path written.

        Raises:
            ConfigError: the suffix is another one, or the folder does not exist.
            PlanError: no batch fits.
        """
        target = file_of(path)
        rows = [row for row in self.rows if row.fits]
        if not rows:
            raise PlanError(f"{target}: expected a batch that fits, got none · fix: a larger budget")
        return _draw(self, rows, target)

    def _fitting(self) -> list[BatchFit]:
        rows = [row for row in self.rows if row.fits]
        if rows:
            return rows
        first = self.rows[0]
        fix = "a larger memory_budget" if first.batch_size == 1 else "smaller batch sizes, or a larger memory_budget"
        limit, peak = format_sizes(self.budget_bytes, first.floor_bytes)
        raise PlanError(
            f"memory_budget {limit}: no batch fits · the lowest possible peak is {peak} at batch size "
            f"{first.batch_size} · fix: {fix}"
        )


def _speed(row: BatchFit) -> tuple[float, int]:
    return row.samples_per_second, row.batch_size


def _parts_of(fit: Fit) -> Iterator[RenderableType]:
    has_reserved = any(row.plan is not None and row.plan.predicted_reserved_bytes for row in fit.rows)
    columns = [column for column in _COLUMNS if has_reserved or column.name != _RESERVED]
    yield table_of(columns, (_cells(row, fit, has_reserved=has_reserved) for row in fit.rows))
    yield from map(Text, _summary_lines(fit))
    plain = "kept: the peak with everything kept, without recomputation or offloading"
    simulated = f"simulated: under all policies and under its plan; nothing ran on {fit.device}"
    measured = "measured: under all policies; checked: it ran under its plan as well"
    for note in (plain, simulated if fit.is_simulated else measured, *fit.notes):
        yield bullet(note, "*")


def _largest_name(fit: Fit) -> str:
    return "largest batch" if fit.is_searched else "largest of the given sizes"


def _summary_lines(fit: Fit) -> Iterator[str]:
    yield budget_line(fit)
    if not any(row.fits for row in fit.rows):
        yield f"no batch fits; the lowest possible peak is {format_sizes(fit.rows[0].floor_bytes, fit.budget_bytes)[0]}"
        return
    plain = fit.largest_without_recompute
    kept_size = "none with everything kept" if plain is None else f"{plain.batch_size} with everything kept"
    yield f"{_largest_name(fit)}: {fit.largest.batch_size} ({kept_size}){_checked(fit.largest, fit)}"
    if fit.largest.plan is not None and (shown := fit.largest.plan.predicted_nvidia_smi_bytes):
        yield f"nvidia-smi shows {format_bytes(shown)} with it"
    fastest = fit.fastest
    yield f"fastest: {fastest.batch_size}, {format_rate(fastest.samples_per_second)} samples/s{_checked(fastest, fit)}"
    if fit.global_batch is not None:
        try:
            row = fit.at_global_batch(fit.global_batch)
        except PlanError as error:
            yield str(error)
            return
        rate = format_rate(row.samples_per_second)
        bound = "up to " if row.accumulation > 1 and row.checked_peak_bytes is None else ""
        yield (
            f"global batch {fit.global_batch}: {row.batch_size} x {row.accumulation}, {rate} samples/s, "
            f"peak {bound}{format_bytes(row.peak_bytes)}{_checked(row, fit)}"
        )


def _cells(row: BatchFit, fit: Fit, *, has_reserved: bool) -> list[str]:
    source = "checked" if row.checked_peak_bytes is not None else "measured" if row.is_measured else "-"
    source = "simulated" if fit.is_simulated else source
    size, plain = str(row.batch_size), format_bytes(row.plain_peak_bytes)
    plain = plain if row.is_measured else f">{plain}"
    if row.plan is None:
        reserved = ["-"] * has_reserved
        return [size, f">{format_bytes(row.floor_bytes)}", *reserved, plain, "-", "-", "does not fit", source]
    policies = ", ".join(f"{count} {name}" for name, count in policy_counts(row.plan).items())
    reserved = [bytes_or_dash(row.plan.predicted_reserved_bytes)] * has_reserved
    took = [format_seconds(row.seconds), format_rate(row.samples_per_second)]
    return [size, format_bytes(row.peak_bytes), *reserved, plain, *took, policies, source]


def _checked(row: BatchFit, fit: Fit) -> str:
    if row.checked_peak_bytes is None:
        return ""
    took = "" if row.checked_seconds is None else f", {format_seconds(row.checked_seconds)}"
    how = "simulated" if fit.is_simulated else "it ran"
    return f"; {how}: peak {format_bytes(row.checked_peak_bytes)}{took}"


def _draw(fit: Fit, rows: Sequence[BatchFit], target: Path) -> Path:
    sizes, fastest = [row.batch_size for row in rows], fit.fastest
    measured = [row for row in rows if row.is_measured]
    with figure_of(target, inches=(9, 7.2)) as figure:
        speed, memory, policies = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 2))
        rates = [row.samples_per_second for row in rows]
        lines = speed.plot(sizes, rates, "o-", color=INK, linewidth=1.2, markersize=4, label="under the plan")
        best = [fastest.batch_size], [fastest.samples_per_second]
        lines += speed.plot(*best, "o", color=ACCENT, markersize=7, label="fastest")
        speed.set_ylim(0, 1.12 * fastest.samples_per_second)
        frame(speed, "samples per second")
        legend(speed, {"throughput": lines})

        scale, unit = unit_of(fit.budget_bytes)
        plain, floor = [row.plain_peak_bytes for row in measured], [row.floor_bytes for row in measured]
        lines = []
        for name, points, peaks, style in (
            ("with everything kept", measured, plain, {"color": rule_colour("joined")}),
            ("under the plan", rows, [r.peak_bytes for r in rows], {"color": INK, "marker": "o", "markersize": 3.5}),
            ("lowest possible", measured, floor, {"color": LEVEL_AT_START}),
        ):
            xs, ys = [row.batch_size for row in points], [peak / scale for peak in peaks]
            lines += memory.plot(xs, ys, linewidth=1.2, label=name, **style)
        budget = fit.budget_bytes / scale
        lines.append(memory.axhline(budget, color=INK, linewidth=1, linestyle=DASHES, label="memory budget"))
        memory.set_ylim(0, _TOP * budget)
        frame(memory, f"peak memory ({unit})")
        legend(memory, {"peak": lines})

        counts = [policy_counts(row.plan) for row in rows if row.plan is not None]
        colour_of = {name: rule_colour(name) for name in sorted_rules(name for count in counts for name in count)}
        shares = [[count.get(name, 0) / sum(count.values()) for count in counts] for name in colour_of]
        policies.stackplot(sizes, shares, colors=list(colour_of.values()), linewidth=0, antialiased=False)
        policies.set_ylim(0, 1)
        policies.set_yticks([0, 0.5, 1], ["0", "50 %", "100 %"])
        frame(policies, "share of the blocks")
        legend(policies, {"policy of the block": patches(colour_of)})
        policies.set_xscale("log", base=2)
        policies.set_xticks(sizes, _labels(sizes, fit.largest.batch_size, fastest.batch_size))
        policies.minorticks_off()
        policies.set_xlabel("micro-batch size (logarithmic)", color=INK)
        title = f"largest: {fit.largest.batch_size} · fastest: {fastest.batch_size}"
        title_of(speed, f"batch sizes in {format_bytes(fit.budget_bytes)} on {device_text(fit)}", title)
    return target


def _labels(sizes: Sequence[int], *first: int) -> list[str]:
    """Names sizes that are not too close to each other on a logarithmic axis, ``first`` before all others.

    >>> _labels([2, 4, 109, 110, 111, 128, 256], 256, 110)
    ['2', '4', '', '110', '', '', '256']
    """
    gap = (sizes[-1] / sizes[0]) ** (1 / 20)
    labelled: list[int] = []
    for size in (*first, *reversed(sizes)):
        if all(max(size, other) / min(size, other) >= gap for other in labelled if other != size):
            labelled.append(size)
    return [str(size) if size in labelled else "" for size in sizes]


def policy_counts(plan: Plan) -> dict[str, int]:
    """Returns the number of blocks of each policy, in the order of the blocks; levels of ``selective`` count as one."""
    return Counter(_OP_LEVEL.sub("", row.option) for row in plan.rows)
