"""Prints a plan as a table."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from graphckpt.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from graphckpt.planning.rows import PlanRow, PlanSummary

_WIDTH = 4096


def summary_lines(plan: PlanSummary) -> Iterator[str]:
    """Yields lines about the whole step."""
    budget = plan.budget_bytes
    share = f", {plan.predicted_peak_bytes / budget:.1%} of the budget".replace("%", " %") if budget else ""
    corrected = (
        f" (corrected by {format_bytes(plan.correction_bytes)} after a measured step)" if plan.correction_bytes else ""
    )
    yield f"memory budget {format_bytes(budget)} on {plan.device}"
    yield f"peak {format_bytes(plan.predicted_peak_bytes)}{share}; set by {plan.binding}{corrected}"
    slower = plan.predicted_step_seconds / plan.plain_step_seconds - 1 if plan.plain_step_seconds else 0.0
    percent = f"{slower:+.1%}".replace("%", " %")
    yield f"step {format_seconds(plan.predicted_step_seconds)}, {percent} over keeping everything"
    yield f"everything kept: {format_bytes(plan.plain_peak_bytes)}; lowest possible: {format_bytes(plan.floor_bytes)}"


def print_plan(
    rows: Sequence[PlanRow], summary: PlanSummary, notes: Sequence[str] = (), file: TextIO | None = None
) -> None:
    """Prints runs of equal rows, the totals, and the notes."""
    console = _console(file)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    moves = any(row.moved_bytes for row in rows)
    table.add_column("block", no_wrap=True)
    table.add_column("policy", no_wrap=True)
    table.add_column("blocks", justify="right", no_wrap=True)
    table.add_column("costs", justify="right", no_wrap=True)
    if moves:
        table.add_column("moves", justify="right", no_wrap=True)
    for group in equal_runs(rows):
        cost = sum(row.extra_seconds for row in group)
        cells = [name_of(group), group[0].option, str(len(group)), format_seconds(cost) if cost > 0 else "-"]
        moved = sum(row.moved_bytes for row in group)
        table.add_row(*cells, *([format_bytes(moved) if moved else "-"] if moves else []))
    console.print(table)
    for line in (*summary_lines(summary), *(f"note: {note}" for note in notes)):
        console.print(line, markup=False)


def print_sweep(
    front: Sequence[tuple[int, float, Sequence[PlanRow]]], uniform: Sequence[tuple[str, int, float]]
) -> None:
    """Prints the Pareto-optimal plans in peak and time, and the uniform policies."""
    console = _console(None)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("peak", justify="right", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("policies", no_wrap=True)
    rows = [
        (peak, seconds, ", ".join(f"{name_of(r)} {r[0].option}" for r in equal_runs(plan)))
        for peak, seconds, plan in front
    ]
    rows += [(peak, seconds, f"all {name}") for name, peak, seconds in uniform]
    for peak, seconds, text in sorted(rows, key=lambda row: row[0]):
        table.add_row(format_bytes(peak), format_seconds(seconds), text)
    console.print(table)


def _console(file: TextIO | None) -> Console:
    """Returns a console that is wide enough for every row, so that numbers are not wrapped."""
    return Console(file=file or sys.stdout, highlight=False, soft_wrap=True, width=_WIDTH)


def equal_runs(plan: Sequence[PlanRow]) -> Iterator[list[PlanRow]]:
    """Yields consecutive rows with the same policy, together."""
    for _, rows in groupby(plan, key=lambda row: (row.option, row.block.rstrip("0123456789"))):
        yield list(rows)


def name_of(rows: list[PlanRow]) -> str:
    """Returns one name for consecutive blocks: ``"h.0-3"``."""
    first, last = rows[0].block, rows[-1].block
    return first if len(rows) == 1 else f"{first}-{last[len(last.rstrip('0123456789')) :]}"
