"""Output of a run, on the console and in log.txt."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TextIO, cast, final

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from graphckpt.train.files import AppendFile

_LOG_WIDTH = 120  # columns of a table in log.txt


@final
class Report:
    """Prints lines, tables and progress bars; everything but the bars goes to ``log_file`` too.

    Args:
        console: where to print.
        log_file: the file, if any.
        waits: write nothing into the file before ``open_log`` is called, then everything since the start.
    """

    def __init__(self, console: Console | None = None, log_file: Path | None = None, *, waits: bool = False) -> None:
        self._console = console or Console(highlight=False)
        self._log_file = AppendFile(log_file) if log_file else None
        self._waiting: list[str] | None = [] if waits else None
        self._has_complained = False

    def open_log(self) -> None:
        if self._waiting is not None:
            text, self._waiting = "".join(self._waiting), None
            self._append(text)

    @classmethod
    def silent(cls) -> Report:
        return cls(Console(quiet=True))

    @property
    def stream(self) -> TextIO:
        """The console's stream, for code that prints by itself."""
        return cast("TextIO", self._console.file)  # rich says IO[str], a wider type

    def log(self, text: str) -> None:
        """Writes to the file, not to the console."""
        self._append(text if text.endswith("\n") else f"{text}\n")

    def line(self, text: str, style: str | None = None) -> None:
        """Prints one line, however long; in the file it bears the time."""
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
        stamp = datetime.now().astimezone().strftime("%m/%d %H:%M:%S")
        self.log(f"[{stamp} graphckpt]: {text}")

    def show(self, renderable: RenderableType) -> None:
        self._console.print(renderable)
        plain = io.StringIO()
        Console(file=plain, width=_LOG_WIDTH, no_color=True, force_terminal=False).print(renderable)
        self._append(plain.getvalue())

    @contextmanager
    def progress(self, label: str, total: int, *, counts: bool = False) -> Iterator[Callable[[int], None]]:
        """Shows a bar, and gives the function that moves it on; ``counts`` shows numbers and not per cent."""
        amount = MofNCompleteColumn() if counts else TaskProgressColumn()
        columns = (TextColumn("{task.description}"), BarColumn(), amount, TextColumn("eta"), TimeRemainingColumn())
        quiet = not self._console.is_terminal
        with Progress(*columns, console=self._console, transient=True, disable=quiet) as progress:
            task = progress.add_task(label, total=total)
            yield lambda amount: progress.update(task, advance=amount)

    def _append(self, text: str) -> None:
        if not self._log_file:
            return
        if self._waiting is not None:
            self._waiting.append(text)
            return
        error = self._log_file.append(text)
        if error and not self._has_complained:  # a full disk is no reason to end a run
            what = f"{self._log_file.path}: {error.strerror}; its lines wait until they can be written"
            self._console.print(what, style="red", markup=False, highlight=False, soft_wrap=True)
        self._has_complained = error is not None
