"""Says what a run does, on the console and in log.txt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TextIO, cast, final

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

_LOG_WIDTH = 120  # columns of a table in log.txt


@final
class Report:
    """Prints lines, tables and progress bars; everything but the bars goes to ``log_file`` too."""

    def __init__(self, console: Console | None = None, log_file: Path | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._log_file = log_file

    @property
    def stream(self) -> TextIO:
        """Where the console writes, for what prints by itself."""
        return cast("TextIO", self._console.file)  # rich says IO[str], a wider type

    def log(self, text: str) -> None:
        """Writes to the file alone."""
        self._append(text if text.endswith("\n") else f"{text}\n")

    def line(self, text: str, style: str | None = None) -> None:
        """Prints one line, however long; in the file it bears the time."""
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
        stamp = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S")
        self.log(f"{stamp}  {text}")

    def show(self, renderable: RenderableType) -> None:
        """Prints a table."""
        self._console.print(renderable)
        if self._log_file:
            with self._log_file.open("a", encoding="utf-8") as file:
                Console(file=file, width=_LOG_WIDTH, no_color=True, force_terminal=False).print(renderable)

    @contextmanager
    def progress(self, label: str, total: int, *, counts: bool = False) -> Iterator[Callable[[int], None]]:
        """Shows a bar with the time that is left, and gives the function that moves it on.

        Args:
            label: what is going on.
            total: how far the bar goes.
            counts: show numbers of ``total`` and not per cent.
        """
        amount = MofNCompleteColumn() if counts else TaskProgressColumn()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            amount,
            TextColumn("eta"),
            TimeRemainingColumn(),
        )
        quiet = not self._console.is_terminal
        with Progress(*columns, console=self._console, transient=True, disable=quiet) as progress:
            task = progress.add_task(label, total=total)
            yield lambda amount: progress.update(task, advance=amount)

    def _append(self, text: str) -> None:
        if self._log_file:
            with self._log_file.open("a", encoding="utf-8") as file:
                file.write(text)
