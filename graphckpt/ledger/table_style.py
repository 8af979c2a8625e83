"""The style of all tables: plain text of 80 columns, and colour on a terminal."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.box import Box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

WIDTH = 80
"""Columns of plain text."""
_DASHES = Box("    \n    \n -- \n    \n    \n -- \n    \n    \n", ascii=True)


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its title, whether it has numbers, which never break, and its colour on a terminal."""

    name: str
    is_number: bool = False
    style: str | None = None


def table_of(columns: Sequence[Column], rows: Iterable[Sequence[str]], total: Sequence[str] | None = None) -> Table:
    """Returns a table, with sums below it if there are any. Text breaks where the table is too wide."""
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
        table.add_row(*(Text(cell) for cell in row))
    return table


def width_of(table: Table) -> int:
    """Returns the width at which nothing breaks."""
    cells = ([column.header, column.footer, *column.cells] for column in table.columns)
    return sum(max(len(str(cell)) for cell in column) + 2 for column in cells) - 2


def bullet(text: str, mark: str = "-") -> Table:
    """Returns a line that continues under its beginning."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_row(Text(mark, style="yellow"), Text(text))
    return grid


def show(parts: Iterable[RenderableType], file: TextIO | None = None) -> None:
    """Prints tables and lines, in colour on a terminal, as plain text of :data:`WIDTH` columns anywhere else."""
    stream = sys.stdout if file is None else file
    if stream.isatty():
        console = Console(file=stream, highlight=False)
        for part in parts:
            console.print(part)
    else:
        stream.write(text_of(parts))


def text_of(parts: Iterable[RenderableType]) -> str:
    """Returns tables and lines as plain text."""
    lines = io.StringIO()
    console = Console(file=lines, width=WIDTH, color_system=None, force_terminal=False, highlight=False)
    for part in parts:
        console.print(part)
    return "".join(f"{line.rstrip()}\n" for line in lines.getvalue().splitlines())


def html_of(parts: Iterable[RenderableType]) -> str:
    """Returns tables and lines for a notebook."""
    console = Console(file=io.StringIO(), width=WIDTH, record=True, force_terminal=True, highlight=False)
    for part in parts:
        console.print(part)
    return console.export_html(inline_styles=True, code_format='<pre style="line-height: 1.2">{code}</pre>')
