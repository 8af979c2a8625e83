"""All tables: plain text of 80 columns, and colour on a terminal; and the table of a step."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import TextIO, final

from rich.box import Box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from graphckpt.ledger.groups import common_prefix, group_rows, nest, paths_to, rule_and_place, sums
from graphckpt.ledger.record import Row, StepRecord
from graphckpt.units import format_bytes, format_seconds

WIDTH = 80
"""Columns of plain text."""
# Of rich's eight lines of a box (top, head, below the head, between, row, above the foot, foot, bottom) the third and
# the sixth draw something.
_DASHES = Box("    \n    \n -- \n    \n    \n -- \n    \n    \n", ascii=True)
_LONG = 28  # characters of a rule; a list of ops that is longer is put below the table


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its title, whether it has numbers, which never break, and its colour on a terminal."""

    name: str
    is_number: bool = False
    style: str | None = None


@final
@dataclass(frozen=True, slots=True)
class _Name:
    """The path of a block or the name of a policy. It breaks behind dots and the like, never within a word."""

    text: str

    def __str__(self) -> str:
        return self.text

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(max(map(len, self._parts(self.text))), len(self.text)).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        lines, width = [""], options.max_width
        for word in self.text.split(" "):
            parts = [word] if len(word) <= width - 2 else self._parts(word)
            for number, part in enumerate(parts):
                space = " " if number == 0 and lines[-1].strip() else ""
                if lines[-1].strip() and len(lines[-1] + space + part) > width:
                    lines.append("  ")
                    space = ""
                lines[-1] += space + part
        yield Text("\n".join(lines), overflow="fold")

    @staticmethod
    def _parts(text: str) -> list[str]:
        return re.split(r"(?<=[. +,])|(?<=\w\()", text)


def table_of(columns: Sequence[Column], rows: Iterable[Sequence[str]], total: Sequence[str] | None = None) -> Table:
    """Returns a table, with sums below it if there are any. Where it is too wide, text breaks, but no name does."""
    table = Table(box=_DASHES, show_footer=total is not None, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(
            Text(column.name),
            footer=Text("" if total is None else total[number]),
            justify="right" if column.is_number else "left",
            no_wrap=column.is_number,
            overflow="fold",
            style=column.style,
        )
    for row in rows:
        cells = zip(columns, row, strict=True)
        table.add_row(*(Text(cell) if column.is_number else _Name(cell) for column, cell in cells))
    return table


def bullet(text: str, mark: str = "-") -> Table:
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_row(Text(mark, style="yellow"), Text(text))
    return grid


def prefix_note(prefix: str) -> str:
    """Returns a line about the prefix that the paths of a table lack; empty without one."""
    return f"Names of blocks are relative to {prefix[:-1]}." if prefix else ""


def show(renderables: Iterable[RenderableType], file: TextIO | None = None) -> None:
    """Prints tables and lines, in colour on a terminal, as plain text of :data:`WIDTH` columns anywhere else.

    A plain string is a line of code, to be copied: it is not broken, however long it is.
    """
    stream = sys.stdout if file is None else file
    if stream.isatty():
        _print(Console(file=stream, highlight=False), renderables)
    else:
        stream.write(text_of(renderables))


def text_of(renderables: Iterable[RenderableType]) -> str:
    lines = io.StringIO()
    _print(Console(file=lines, width=WIDTH, color_system=None, force_terminal=False, highlight=False), renderables)
    return "".join(f"{line.rstrip()}\n" for line in lines.getvalue().splitlines())


def _print(console: Console, renderables: Iterable[RenderableType]) -> None:
    for renderable in renderables:
        if isinstance(renderable, str):
            console.out(renderable, highlight=False)
        else:
            console.print(renderable)


# ---- the table of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowColumn(Column):
    cell: Callable[[Row], str]
    is_time: bool = False


def _seconds(value: float | None) -> str:
    return "-" if value is None else format_seconds(value)


def bytes_or_dash(value: int) -> str:
    return format_bytes(value) if value else "-"


def percent_of(value: float) -> str:
    return f"{value:.0%}".replace("%", " %")


def _hidden(row: Row) -> str:
    if not row.copy_seconds or row.wait_seconds is None:
        return "-"
    return percent_of(max(0.0, 1 - row.wait_seconds / row.copy_seconds))


_number = partial(_RowColumn, is_number=True)
_time = partial(_number, is_time=True)
_BLOCK = _RowColumn(name="block", cell=lambda row: row.block or "(model)")
_RUNS = _number(name="runs", cell=lambda row: str(row.runs))
_OFFLOADED = _number(name="offloaded", cell=lambda row: bytes_or_dash(row.bytes_host + row.bytes_disk))
_NOTE = _RowColumn(name="note", cell=attrgetter("note"))
_COLUMNS = (
    _BLOCK,
    _RowColumn(name="rule", cell=rule_and_place),
    _number(name="before", cell=lambda row: format_bytes(row.bytes_before)),
    _number(name="after", style="bold green", cell=lambda row: format_bytes(row.bytes_after)),
    _OFFLOADED,
    _RUNS,
    _number(name="recomputed", cell=lambda row: "-" if row.is_own and not row.reruns else str(row.reruns)),
    _time(name="forward", cell=lambda row: _seconds(row.forward_seconds)),
    _time(name="recompute", cell=lambda row: _seconds(row.recompute_seconds)),
    _time(name="copies", cell=lambda row: _seconds(row.copy_seconds)),
    _time(name="hidden", cell=_hidden),
    _NOTE,
)


def print_table(explanation: StepRecord, file: TextIO | None = None) -> None:
    """Prints the rows, the totals, the peak and the warnings; columns that say the same in all rows are omitted.

    >>> from dataclasses import replace
    >>> row = Row(block="layers.0", rule="full", bytes_before=4096, bytes_after=1024, runs=1, reruns=1)
    >>> rows = (row, replace(row, block="layers.1"))
    >>> print_table(StepRecord(title="TrainStep", rows=rows, bytes_before=8192, bytes_after=2048))
    TrainStep: bytes kept for backward, before and after
    block            rule    before     after  recomputed
    -----------------------------------------------------
    layers.0-1 (2x)  full  8.00 KiB  2.00 KiB           2
    -----------------------------------------------------
    total                  8.00 KiB  2.00 KiB           2
    kept for backward: 8.00 KiB -> 2.00 KiB, 6.00 KiB less (75 %)
    """
    show(renderables_of(explanation), file)


def renderables_of(explanation: StepRecord) -> Iterator[RenderableType]:
    yield Text(f"{explanation.title}: bytes kept for backward, before and after", style="bold")
    prefix = common_prefix(row.block for row in explanation.rows)
    short, legend = _short_rules(explanation)
    rows = [replace(row, rule=short.get(row.rule, row.rule)) for row in _nested(explanation, prefix)]
    groups = tuple(group_rows([replace(row, note="") for row in rows]))
    used = [column for column in _columns(rows) if column is not _NOTE]
    together = _table(used, groups, explanation)
    # Where all columns do not fit into a line of plain text, those of times become a table of their own: rich would
    # break names in the middle, and numbers not at all.
    cells = ([column.header, column.footer, *column.cells] for column in together.columns)
    width = sum(max(len(str(cell)) for cell in column) + 2 for column in cells) - 2
    if width <= WIDTH or not any(column.is_time for column in used):
        yield together
    else:
        yield _table([column for column in used if not column.is_time], groups, explanation)
        yield Text("")
        times = [column for column in used if column.is_time]
        timed = [row for row in groups if any(column.cell(row) != "-" for column in times)]
        yield _table([_BLOCK, *times], timed, explanation)
    yield from map(Text, _summary(explanation))
    if prefix:
        yield bullet(prefix_note(prefix), "*")
    for name, text in legend:
        yield bullet(f"{name} {text}", "*")
    for names, note in _notes(rows):
        if not any(warning.endswith(f": {note}") for warning in explanation.warnings):  # else it is said below
            yield bullet(f"{names}: {note}", "*")
    for warning in explanation.warnings:
        yield bullet(warning)


def step_table(explanation: StepRecord) -> tuple[Sequence[Column], list[list[str]], str]:
    """Returns columns and cells of the table of a page, and the prefix that paths lack in it."""
    prefix = common_prefix(row.block for row in explanation.rows)
    rows = _nested(explanation, prefix)
    columns = _columns(rows)
    return columns, [[column.cell(row) for column in columns] for row in group_rows(rows)], prefix


def _nested(explanation: StepRecord, prefix: str) -> list[Row]:
    return [replace(row, block=row.block.removeprefix(prefix)) for row in nest(explanation.rows)]


def _table(columns: Sequence[_RowColumn], rows: Sequence[Row], explanation: StepRecord) -> Table:
    total = _total(explanation)
    cells = [[column.cell(row) for column in columns] for row in rows]
    return table_of(columns, cells, [column.cell(total) for column in columns])


def _short_rules(explanation: StepRecord) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Returns short names of rules that are long lists, and the lines below the table that explain them."""
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


def _columns(rows: Sequence[Row]) -> list[_RowColumn]:
    columns = [column for column in _COLUMNS if column is not _RUNS or any(row.runs > 1 for row in rows)]
    optional = [column for column in columns if column.is_time or column in (_OFFLOADED, _NOTE)]
    empty = [column for column in optional if all(column.cell(row) in ("", "-") for row in rows)]
    return [column for column in columns if column not in empty]


def _total(explanation: StepRecord) -> Row:
    # Rows of blocks within blocks are left out, whose runs and seconds are in those of the outer one: `h.3.mlp` if
    # there is a row of `h.3`. Bytes are those of the step as a whole, which are no sums: see `Total`.
    names = {row.block for row in explanation.rows}
    rows = [r for r in explanation.rows if not r.block or names.isdisjoint(["", *paths_to(r.block)][:-1])]
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


def _summary(explanation: StepRecord) -> Iterator[str]:
    yield _change("kept for backward", explanation.bytes_before, explanation.bytes_after)
    if offloaded := offloaded_bytes(explanation):
        yield f"offloaded: {offloaded}"
    if explanation.sketch_bytes:
        yield f"value check: {format_bytes(explanation.sketch_bytes)} of sketches in the steps that it checks"
    peak_bytes, plain_bytes = explanation.peak_bytes, explanation.plain_peak_bytes
    if peak_bytes is not None:
        if plain_bytes is None or plain_bytes == peak_bytes:
            yield f"peak memory: {format_bytes(peak_bytes)}"
            if explanation.unpredictable:
                yield f"no peak is predicted for the step without policies: {explanation.unpredictable}"
        else:
            yield _change("peak memory", plain_bytes, peak_bytes, " (predicted)")
    if explanation.timeline:
        static = explanation.static_bytes
        which = "weights and optimizer states"
        if not explanation.has_optimizer_states:
            which = "weights, as optimizer states did not exist yet"
        share = f"; {format_bytes(static)} are {which}" if static else ""
        yield f"reached {time_of(explanation.peak_at)}{share}"
    if explanation.capture:
        yield f"capture: {explanation.capture}"


def offloaded_bytes(explanation: StepRecord) -> str:
    """Returns how much is offloaded where: ``"10.5 MiB to disk"``; empty if nothing is."""
    tiers = ((explanation.bytes_host, "host memory"), (explanation.bytes_disk, "disk"))
    return ", ".join(f"{format_bytes(num_bytes)} to {name}" for num_bytes, name in tiers if num_bytes)


def time_of(interval: str) -> str:
    """Returns when a phase of the step runs, to go on in a sentence.

    >>> time_of("backward of h.3"), time_of("the head and the loss, after h.5"), time_of("before the first block")
    ('during the backward of h.3', 'in the head and the loss, after h.5', 'before the first block')
    """
    if interval.startswith(("before ", "after ")):
        return interval
    if interval.startswith(("forward of ", "backward of ", "recomputation of ")):
        return f"during the {interval}"
    if interval.startswith("optimizer"):
        return "in the optimizer step"
    return f"in {interval}" if interval.startswith("the ") else f"during {interval}"


def _change(what: str, before: int, after: int, remark: str = "") -> str:
    change = f"{format_bytes(abs(before - after))} {'less' if before >= after else 'more'}"
    percent = f" ({percent_of(abs(before - after) / before)})" if before else ""
    return f"{what}: {format_bytes(before)}{remark} -> {format_bytes(after)}, {change}{percent}"
