"""The table of the batch sizes that fit."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rich.text import Text

from graphckpt.ledger.table_style import Column, bullet, table_of
from graphckpt.planning.errors import PlanError
from graphckpt.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from graphckpt.planning.fit.rows import BatchFit, FitRows
    from graphckpt.planning.plan import Plan

_LEVEL = re.compile(r"\(level \d+ of \d+\)")
_COLUMNS = (
    Column("batch", is_number=True),
    Column("peak", is_number=True),
    Column("kept", is_number=True),
    Column("step", is_number=True),
    Column("samples/s", is_number=True),
    Column("policies"),
    Column("from"),
)


def parts_of(fit: FitRows) -> Iterator[RenderableType]:
    """Yields the table, and what was looked for."""
    yield table_of(_COLUMNS, (_cells(row) for row in fit.rows))
    yield from map(Text, summary_lines(fit))
    yield bullet("kept: the peak with everything kept, without recomputation or offloading", "*")
    if any(not row.is_measured for row in fit.rows):
        sizes = ", ".join(map(str, fit.measured_sizes))
        yield bullet(f"interpolated, checked: predicted from measurements at {sizes}; checked: it ran as well", "*")
    for note in fit.notes:
        yield bullet(note, "*")


def summary_lines(fit: FitRows) -> Iterator[str]:
    """Yields lines about the batches that were looked for."""
    yield f"memory budget {format_bytes(fit.budget_bytes)} on {fit.device}"
    if not any(row.fits for row in fit.rows):
        yield f"no batch fits; the lowest possible peak is {format_bytes(fit.rows[0].floor_bytes)}"
        return
    plain = fit.largest_without_recompute
    kept = "none with everything kept" if plain is None else f"{plain.batch_size} with everything kept"
    yield f"largest batch: {fit.largest.batch_size} ({kept}){_checked(fit.largest)}"
    fastest = fit.fastest
    yield f"fastest: {fastest.batch_size}, {_rate(fastest)} samples/s{_checked(fastest)}"
    if fit.global_batch is not None:
        try:
            row = fit.at_global_batch(fit.global_batch)
        except PlanError as error:
            yield str(error)
            return
        bound = "up to " if row.accumulation > 1 and row.checked_peak_bytes is None else ""
        yield (
            f"global batch {fit.global_batch}: {row.batch_size} x {row.accumulation}, {_rate(row)} samples/s, "
            f"peak {bound}{format_bytes(row.peak_bytes)}{_checked(row)}"
        )


def policies_of(plan: Plan) -> dict[str, int]:
    """Returns the number of blocks of each policy, in the order of the blocks; levels of ``selective`` count as one."""
    counts: dict[str, int] = {}
    for row in plan.rows:
        name = _LEVEL.sub("", row.option)
        counts[name] = counts.get(name, 0) + 1
    return counts


def _cells(row: BatchFit) -> list[str]:
    source = "checked" if row.checked_peak_bytes is not None else "measured" if row.is_measured else "interpolated"
    size, kept = str(row.batch_size), format_bytes(row.plain_peak_bytes)
    if row.plan is None:
        return [size, f">{format_bytes(row.floor_bytes)}", kept, "-", "-", "does not fit", source]
    policies = ", ".join(f"{count} {name}" for name, count in policies_of(row.plan).items())
    return [size, format_bytes(row.peak_bytes), kept, format_seconds(row.seconds), _rate(row), policies, source]


def _rate(row: BatchFit) -> str:
    rate = row.samples_per_second
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


def _checked(row: BatchFit) -> str:
    if row.checked_peak_bytes is None:
        return ""
    took = "" if row.checked_seconds is None else f", {format_seconds(row.checked_seconds)}"
    return f"; it ran: peak {format_bytes(row.checked_peak_bytes)}{took}"
