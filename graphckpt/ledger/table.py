"""The table of an explanation: in colour on a terminal, as plain text of 80 columns anywhere else."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TextIO

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from graphckpt.ledger.group_rows import group_rows, sums
from graphckpt.ledger.record import Row, StepRecord
from graphckpt.ledger.table_style import WIDTH, Column, bullet, show, table_of, width_of
from graphckpt.units import format_bytes, format_seconds

_LONG = 28  # characters of a rule; a list of ops that is longer is put below the table


@dataclass(frozen=True, slots=True)
class _Cells:
    """A column of the table, and how its cells come from rows."""

    column: Column
    cell: Callable[[Row], str]
    is_time: bool = False


def rule_and_place(row: Row) -> str:
    """Returns the rule of a block, and the store of its saved tensors if they leave the device."""
    return row.rule if row.place in ("", "device") else f"{row.rule} + {row.place}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else format_seconds(value)


def _bytes(value: int) -> str:
    return format_bytes(value) if value else "-"


def _hidden(row: Row) -> str:
    """Returns the share of the copies' time that overlapped with computation."""
    if not row.copy_seconds or row.wait_seconds is None:
        return "-"
    return f"{max(0.0, 1 - row.wait_seconds / row.copy_seconds):.0%}".replace("%", " %")


_BLOCK = _Cells(Column("block"), lambda row: row.block or "(model)")
_RUNS = _Cells(Column("runs", is_number=True), lambda row: str(row.runs))
_COLUMNS = (
    _BLOCK,
    _Cells(Column("rule"), rule_and_place),
    _Cells(Column("before", is_number=True), lambda row: format_bytes(row.bytes_before)),
    _Cells(Column("after", is_number=True, style="bold green"), lambda row: format_bytes(row.bytes_after)),
    _Cells(Column("moved", is_number=True), lambda row: _bytes(row.bytes_host + row.bytes_disk)),
    _RUNS,
    _Cells(Column("reruns", is_number=True), lambda row: "-" if row.is_own and not row.reruns else str(row.reruns)),
    _Cells(Column("forward", is_number=True), lambda row: _seconds(row.forward_seconds), is_time=True),
    _Cells(Column("recompute", is_number=True), lambda row: _seconds(row.recompute_seconds), is_time=True),
    _Cells(Column("copies", is_number=True), lambda row: _seconds(row.copy_seconds), is_time=True),
    _Cells(Column("hidden", is_number=True), _hidden, is_time=True),
)


def print_table(explanation: StepRecord, file: TextIO | None = None) -> None:
    """Prints the rows, the totals, the peak and the warnings.

    Equal consecutive layers are printed as one line of sums; the rows of the explanation are not changed.
    Columns that say the same in all rows (one run, no times) are omitted.

    Args:
        explanation: what ``explain()`` returned.
        file: where to print; ``None`` means the current ``sys.stdout``.

    >>> from dataclasses import replace
    >>> row = Row(block="layers.0", rule="full", bytes_before=4096, bytes_after=1024, runs=1, reruns=1)
    >>> rows = (row, replace(row, block="layers.1"))
    >>> print_table(StepRecord(title="TrainStep", rows=rows, bytes_before=8192, bytes_after=2048))
    TrainStep: bytes kept for backward, before and after
    block            rule    before     after  reruns
    -------------------------------------------------
    layers.0-1 (2x)  full  8.00 KiB  2.00 KiB       2
    -------------------------------------------------
    total                  8.00 KiB  2.00 KiB       2
    kept for backward: 8.00 KiB -> 2.00 KiB, 6.00 KiB less (75 %)
    """
    show(parts_of(explanation), file)


def parts_of(explanation: StepRecord) -> Iterator[RenderableType]:
    """Yields what :func:`print_table` prints."""
    yield Text(f"{explanation.title}: bytes kept for backward, before and after", style="bold")
    short, legend = _short_rules(explanation)
    plain = [replace(row, rule=short.get(row.rule, row.rule)) for row in explanation.rows]
    rows = tuple(group_rows([replace(row, note="") for row in plain]))
    used = [cells for cells in _COLUMNS if _has_content(cells, explanation.rows)]
    together = _table(used, rows, explanation)
    if width_of(together) <= WIDTH or not any(cells.is_time for cells in used):
        yield together
    else:
        yield _table([cells for cells in used if not cells.is_time], rows, explanation)
        yield Text("")
        times = [cells for cells in used if cells.is_time]
        timed = [row for row in rows if any(cells.cell(row) != "-" for cells in times)]
        yield _table([_BLOCK, *times], timed, explanation)
    yield from map(Text, _summary(explanation))
    for name, text in legend:
        yield bullet(f"{name} {text}", "*")
    for names, note in _notes(plain):
        yield bullet(f"{names}: {note}", "*")
    for warning in explanation.warnings:
        yield bullet(warning)


def _table(columns: Sequence[_Cells], rows: Sequence[Row], explanation: StepRecord) -> Table:
    total = _total(explanation)
    cells = [[column.cell(row) for column in columns] for row in rows]
    return table_of([c.column for c in columns], cells, [column.cell(total) for column in columns])


def _short_rules(explanation: StepRecord) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Returns short names of rules that are long lists, and what stands below the table for all that need it."""
    short: dict[str, str] = {}
    for rule in dict.fromkeys(row.rule for row in explanation.rows):
        if len(rule) > _LONG and rule.count(", ") and rule.startswith("selective("):
            number = len(short) + 1
            short[rule] = re.sub(r"\(.*\)", f"({rule.count(', ') + 1} ops: {number})", rule)
    return short, [*explanation.legend, *((name, f"is {rule}") for rule, name in short.items())]


def _notes(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """Yields each note once, with the blocks that it is about."""
    blocks: dict[str, list[Row]] = {}
    for row in rows:
        for note in filter(None, row.note.split(" · ")):
            blocks.setdefault(note, []).append(replace(row, note=""))
    for note, about in blocks.items():
        groups = [*group_rows(about)]
        more = f" and {len(about) - 1} more" if len(groups) > 1 else ""
        yield groups[0].block.partition(" (")[0] if not more else f"{about[0].block}{more}", note


def _has_content(cells: _Cells, rows: Sequence[Row]) -> bool:
    if cells is _RUNS:
        return any(row.runs > 1 for row in rows)
    is_optional = cells.is_time or cells.column.name == "moved"
    return not is_optional or any(cells.cell(row) not in ("", "-") for row in rows)


def _total(explanation: StepRecord) -> Row:
    """Returns the last line: bytes of the explanation, other sums over outermost rows."""
    names = {row.block for row in explanation.rows}
    rows = [row for row in explanation.rows if not _is_inside(row.block, names)]
    return Row(
        block="total",
        rule="",
        place="",
        runs=sum(row.runs for row in rows),
        reruns=sum(row.reruns for row in rows),
        bytes_before=explanation.bytes_before,
        bytes_after=explanation.bytes_after,
        bytes_host=explanation.bytes_host,
        bytes_disk=explanation.bytes_disk,
        **sums(rows, "forward_seconds", "recompute_seconds"),
        **sums(explanation.rows, "copy_seconds", "wait_seconds"),
    )


def _is_inside(block: str, names: Collection[str]) -> bool:
    """Whether a block is inside another one of ``names``, which counts its runs and seconds already.

    >>> _is_inside("h.0.attn", {"h.0", "h.0.attn"}), _is_inside("h.10", {"h.1", "h.10"})
    (True, False)
    """
    parts = block.split(".")
    outer = {".".join(parts[:length]) for length in range(len(parts))}
    return block != "" and not outer.isdisjoint(names)


def _summary(explanation: StepRecord) -> Iterator[str]:
    yield _change("kept for backward", explanation.bytes_before, explanation.bytes_after)
    places = ((explanation.bytes_host, "in host memory"), (explanation.bytes_disk, "on disk"))
    if moved := [f"{format_bytes(num_bytes)} {where}" for num_bytes, where in places if num_bytes]:
        yield f"moved away: {', '.join(moved)}"
    peak_bytes, plain_bytes = explanation.peak_bytes, explanation.plain_peak_bytes
    if peak_bytes is not None:
        if plain_bytes is None or plain_bytes == peak_bytes:
            yield f"peak of the step: {format_bytes(peak_bytes)}"
        else:
            yield _change("peak of the step", plain_bytes, peak_bytes, " (predicted)")
    if explanation.timeline:
        static = explanation.static_bytes
        which = "weights and optimizer states"
        if not explanation.has_optimizer_states:
            which = "weights, as optimizer states did not exist yet"
        of_it = f"; {format_bytes(static)} are {which}" if static else ""
        yield f"set by the {explanation.peak_at}{of_it}"
    if explanation.capture:
        yield f"capture: {explanation.capture}"


def _change(what: str, before: int, after: int, remark: str = "") -> str:
    change = f"{format_bytes(abs(before - after))} {'less' if before >= after else 'more'}"
    percent = f" ({abs(before - after) / before:.0%})".replace("%", " %") if before else ""
    return f"{what}: {format_bytes(before)}{remark} -> {format_bytes(after)}, {change}{percent}"
