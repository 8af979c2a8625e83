"""Prints an explanation as a table: in colour on a terminal, as plain aligned text anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich import box
from rich.console import Console, ConsoleDimensions
from rich.table import Table
from rich.text import Text

from graphckpt.ledger.group_rows import group_rows, total_seconds
from graphckpt.ledger.record import Explanation, Row
from graphckpt.units import format_bytes, format_seconds

_NOTE_WIDTH = 24  # columns; on a narrow terminal, only notes wrap


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    cell: Callable[[Row], str]
    is_number: bool = False


def _seconds(value: float | None) -> str:
    return "-" if value is None else format_seconds(value)


def _bytes(value: int) -> str:
    return format_bytes(value) if value else "-"


def _hidden(row: Row) -> str:
    """The share of the copies' time that overlapped with computation."""
    if not row.copy_seconds or row.wait_seconds is None:
        return "-"
    return f"{max(0.0, 1 - row.wait_seconds / row.copy_seconds):.0%}".replace("%", " %")


_COLUMNS = (
    _Column("block", lambda row: row.block or "(model)"),
    _Column("rule", lambda row: row.rule),
    _Column("place", lambda row: row.place),
    _Column("kept before", lambda row: format_bytes(row.bytes_before), is_number=True),
    _Column("kept after", lambda row: format_bytes(row.bytes_after), is_number=True),
    _Column("on host", lambda row: _bytes(row.bytes_host), is_number=True),
    _Column("on disk", lambda row: _bytes(row.bytes_disk), is_number=True),
    _Column("runs", lambda row: str(row.runs), is_number=True),
    _Column("reruns", lambda row: str(row.reruns), is_number=True),
    _Column("forward", lambda row: _seconds(row.forward_seconds), is_number=True),
    _Column("recompute", lambda row: _seconds(row.recompute_seconds), is_number=True),
    _Column("copies", lambda row: _seconds(row.copy_seconds), is_number=True),
    _Column("hidden", _hidden, is_number=True),
    _Column("note", lambda row: row.note),
)


_OPTIONAL = ("on host", "on disk", "forward", "recompute", "copies", "hidden", "note")


def print_table(explanation: Explanation, file: TextIO | None = None) -> None:
    """Prints the rows, the totals, the measured peak and the warnings.

    Equal consecutive layers are printed as one line of sums; the rows of the explanation are not changed.
    Columns that are empty in all rows (times, notes) are omitted. Plain text is the same at every width.

    Args:
        explanation: what ``explain()`` returned.
        file: where to print; ``None`` means the current ``sys.stdout``.

    >>> from dataclasses import replace
    >>> row = Row(block="layers.0", rule="full", bytes_before=4096, bytes_after=1024, runs=1, reruns=1)
    >>> rows = (row, replace(row, block="layers.1"))
    >>> print_table(Explanation(title="TrainStep", rows=rows, bytes_before=8192, bytes_after=2048))
    TrainStep
    block            rule  place   kept before  kept after  runs  reruns
    ---------------  ----  ------  -----------  ----------  ----  ------
    layers.0-1 (2x)  full  device     8.00 KiB    2.00 KiB     2       2
    ---------------  ----  ------  -----------  ----------  ----  ------
    total                             8.00 KiB    2.00 KiB     2       2
    kept for backward: 8.00 KiB -> 2.00 KiB, 6.00 KiB less (75 %)
    """
    stream = sys.stdout if file is None else file
    rows = tuple(group_rows(explanation.rows))
    columns = tuple(column for column in _COLUMNS if _has_content(column, rows))
    cells = [[column.cell(row) for column in columns] for row in rows]
    total = [_total(column, explanation) for column in columns]
    if stream.isatty():
        _print_rich(explanation, columns, cells, total, stream)
    else:
        _print_plain(explanation, columns, cells, total, stream)


def _has_content(column: _Column, rows: Sequence[Row]) -> bool:
    return column.name not in _OPTIONAL or any(column.cell(row) not in ("", "-") for row in rows)


def _total(column: _Column, explanation: Explanation) -> str:
    """Returns a cell of the last line: bytes of the explanation, other sums over outermost rows."""
    names = {row.block for row in explanation.rows}
    rows = [row for row in explanation.rows if not _is_inside(row.block, names)]
    total = Row(
        block="total",
        rule="",
        place="",
        bytes_before=explanation.bytes_before,
        bytes_after=explanation.bytes_after,
        bytes_host=explanation.bytes_host,
        bytes_disk=explanation.bytes_disk,
        runs=sum(row.runs for row in rows),
        reruns=sum(row.reruns for row in rows),
        forward_seconds=total_seconds(row.forward_seconds for row in rows),
        recompute_seconds=total_seconds(row.recompute_seconds for row in rows),
        copy_seconds=total_seconds(row.copy_seconds for row in explanation.rows),
        wait_seconds=total_seconds(row.wait_seconds for row in explanation.rows),
    )
    return column.cell(total)


def _is_inside(block: str, names: Collection[str]) -> bool:
    """Whether a block is inside another one of ``names``, which counts its runs and seconds already.

    >>> _is_inside("h.0.attn", {"h.0", "h.0.attn"}), _is_inside("h.10", {"h.1", "h.10"})
    (True, False)
    """
    parts = block.split(".")
    outer = {".".join(parts[:length]) for length in range(len(parts))}
    return block != "" and not outer.isdisjoint(names)


def _summary(explanation: Explanation) -> Iterator[str]:
    before, after, saved = explanation.bytes_before, explanation.bytes_after, explanation.bytes_saved
    change = f"{format_bytes(abs(saved))} {'less' if saved >= 0 else 'more'}"
    percent = f" ({abs(saved) / before:.0%})".replace("%", " %") if before else ""
    yield f"kept for backward: {format_bytes(before)} -> {format_bytes(after)}, {change}{percent}"
    moved = [(explanation.bytes_host, "in host memory"), (explanation.bytes_disk, "on disk")]
    if any(num_bytes for num_bytes, _ in moved):
        yield "moved away: " + ", ".join(
            f"{format_bytes(num_bytes)} {where}" for num_bytes, where in moved if num_bytes
        )
    if explanation.peak_bytes is not None:
        yield f"peak of the step, all tensors: {format_bytes(explanation.peak_bytes)}"
    if explanation.capture:
        yield f"capture: {explanation.capture}"


def _print_plain(
    explanation: Explanation,
    columns: Sequence[_Column],
    cells: Sequence[Sequence[str]],
    total: Sequence[str],
    stream: TextIO,
) -> None:
    head = [column.name for column in columns]
    widths = [max(map(len, texts)) for texts in zip(head, *cells, total, strict=True)]
    rule = ["-" * width for width in widths]
    lines = [explanation.title]
    for line in (head, rule, *cells, rule, total):
        padded = [
            text.rjust(width) if column.is_number else text.ljust(width)
            for column, width, text in zip(columns, widths, line, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    lines += _summary(explanation)
    lines += [f"- {warning}" for warning in explanation.warnings]
    stream.write("\n".join(lines) + "\n")


def _print_rich(
    explanation: Explanation,
    columns: Sequence[_Column],
    cells: Sequence[Sequence[str]],
    total: Sequence[str],
    stream: TextIO,
) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_footer=True, padding=(0, 1, 0, 0), show_edge=False)
    colours = {"kept after": "bold green", "note": "yellow", "place": "cyan"}
    needed = 0
    for column, last, *texts in zip(columns, total, *cells, strict=True):
        longest = max(map(len, (column.name, last, *texts)))
        width = min(longest, _NOTE_WIDTH) if column.name == "note" else longest
        needed += width + 2
        table.add_column(
            column.name,
            footer=last,
            justify="right" if column.is_number else "left",
            min_width=width,
            overflow="fold",
            style=colours.get(column.name),
        )
    for line in cells:
        table.add_row(*(Text(text) for text in line))
    console = Console(file=stream, highlight=False)
    console.size = ConsoleDimensions(max(console.width, needed), console.height)  # a number is never truncated
    console.print(Text(explanation.title, style="bold"))
    console.print(table)
    for line in _summary(explanation):
        console.print(Text(line))
    for warning in explanation.warnings:
        console.print(Text.assemble(("• ", "yellow"), warning))
