"""The tables of a plan and of a sweep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TextIO

from rich.console import RenderableType
from rich.text import Text

from graphckpt.ledger.table_style import Column, bullet, show, table_of
from graphckpt.planning.rows import PlanRow, PlanSummary
from graphckpt.units import format_bytes, format_seconds

_ROUNDING = 1e-9  # seconds: sums of measurements differ by as much


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
    percent = f"{round(slower, 4) + 0.0:+.1%}".replace("%", " %")
    yield f"step {format_seconds(plan.predicted_step_seconds)}, {percent} over keeping everything"
    yield f"everything kept: {format_bytes(plan.plain_peak_bytes)}; lowest possible: {format_bytes(plan.floor_bytes)}"


def print_plan(
    rows: Sequence[PlanRow], summary: PlanSummary, notes: Sequence[str] = (), file: TextIO | None = None
) -> None:
    """Prints runs of equal rows, the totals, and the notes."""
    show(parts_of(rows, summary, notes), file)


def parts_of(rows: Sequence[PlanRow], summary: PlanSummary, notes: Sequence[str] = ()) -> Iterator[RenderableType]:
    """Yields what :func:`print_plan` prints."""
    columns = [Column("block"), Column("policy"), Column("blocks", is_number=True), Column("costs", is_number=True)]
    moves = any(row.moved_bytes for row in rows)
    if moves:
        columns.append(Column("moves", is_number=True))
    lines = []
    for group in equal_runs(rows):
        cost = sum(row.extra_seconds for row in group)
        moved = sum(row.moved_bytes for row in group)
        cells = [name_of(group), group[0].option, str(len(group)), format_seconds(cost) if cost > _ROUNDING else "-"]
        lines.append([*cells, format_bytes(moved) if moved else "-"] if moves else cells)
    yield table_of(columns, lines)
    yield from map(Text, summary_lines(summary))
    for name, ops in _levels(rows).items():
        yield bullet(f"{name} keeps the results of {ops}", "*")
    for note in notes:
        yield bullet(note, "*")


def _levels(rows: Sequence[PlanRow]) -> dict[str, str]:
    """Returns the ops that each level of ``selective`` keeps."""
    found: dict[str, str] = {}
    for row in rows:
        value = row.fields.get("activation_checkpointing")
        if isinstance(value, dict) and value.get("label"):
            found[f"selective({value['label']})"] = ", ".join(map(str, value["save"]))
    return dict(sorted(found.items()))


def print_sweep(
    front: Sequence[tuple[int, float, Sequence[PlanRow]]], uniform: Sequence[tuple[str, int, float]]
) -> None:
    """Prints the Pareto-optimal plans in peak and time, and the uniform policies."""
    rows = [
        (peak, seconds, ", ".join(f"{name_of(r)} {r[0].option}" for r in equal_runs(plan)))
        for peak, seconds, plan in front
    ]
    rows += [(peak, seconds, f"all {name}") for name, peak, seconds in uniform]
    lines = [
        (format_bytes(peak), format_seconds(seconds), text)
        for peak, seconds, text in sorted(rows, key=lambda row: row[0])
    ]
    show([table_of([Column("peak", is_number=True), Column("step", is_number=True), Column("policies")], lines)])


def equal_runs(plan: Sequence[PlanRow]) -> Iterator[list[PlanRow]]:
    """Yields consecutive rows with the same policy, together."""
    for _, rows in groupby(plan, key=lambda row: (row.option, row.block.rstrip("0123456789"))):
        yield list(rows)


def name_of(rows: list[PlanRow]) -> str:
    """Returns one name for consecutive blocks: ``"h.0-3"``."""
    first, last = rows[0].block, rows[-1].block
    return first if len(rows) == 1 else f"{first}-{last[len(last.rstrip('0123456789')) :]}"
