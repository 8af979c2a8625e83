"""Writes the lines, tables and bars of a run to console and log, and files that are replaced as one or appended."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TextIO, cast, final

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

_LOG_WIDTH = 120  # columns of a table in log.txt


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a path to write to, in the same folder and with the same suffix, which becomes ``path`` at the end.

    An error leaves ``path`` as it was, and nothing else.
    """
    fresh = path.with_name(f".{path.name}.tmp{path.suffix}")
    try:
        yield fresh
        # In this order: a file system may rename before it writes the data, so that after a crash `path` would be
        # empty. Within one folder, as a rename is atomic only within one file system. The suffix tells matplotlib the
        # format.
        sync(fresh)
        fresh.replace(path)
    except BaseException:
        remove(fresh)
        raise
    # The rename itself is a change of the folder, which has to reach the disk as well.
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    with replacing(path) as fresh:
        fresh.write_text(text, encoding="utf-8")


def hidden(path: Path, kind: str) -> Path:
    """Returns a hidden name next to ``path``; ``kind`` is ``"tmp"``, ``"old"`` or ``"trash"``."""
    return path.with_name(f".{path.name}.{kind}")


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


@final
class AppendFile:
    """Appends text; what cannot be written yet, of a full disk or before it is open, comes with the next."""

    def __init__(self, path: Path, *, is_open: bool = True) -> None:
        self.path = path
        self.is_open = is_open
        self._waiting = ""
        self._has_complained = False

    def append(self, text: str, complain: Callable[[str], object]) -> None:
        """Writes all of ``text`` or nothing; of errors in a row ``complain`` gets the first."""
        self._waiting += text
        if not self.is_open:
            return
        try:
            with self.path.open("ab", buffering=0) as file:
                # Unbuffered, so that a full disk raises here, and half a line can be cut off again.
                start, data = file.seek(0, 2), self._waiting.encode()
                try:
                    written = 0
                    while written < len(data):
                        written += file.write(data[written:])
                except OSError:
                    file.truncate(start)
                    raise
            self._waiting, self._has_complained = "", False
        except OSError as error:  # which should not end a run
            if not self._has_complained:
                complain(f"{self.path}: {error.strerror}; its lines wait until they can be written")
            self._has_complained = True


def cut_log(path: Path, last_iteration: int) -> None:
    """Drops the lines of iterations after ``last_iteration``, from 0, from a log, whose lines count from 1."""
    # A line without an iteration, such as that of a start, is of all iterations and stays.
    iterations = re.compile(r" iteration: (\d+)/")
    _filter(path, lambda line: all(int(number) <= last_iteration + 1 for number in iterations.findall(line)))


def cut_metrics(path: Path, last_iteration: int) -> None:
    """Drops rows of iterations after ``last_iteration``, and invalid rows, from a file of JSON lines."""

    def is_valid(line: str) -> bool:
        try:
            return int(json.loads(line)["iteration"]) <= last_iteration
        except (ValueError, TypeError, KeyError):  # an incomplete line of a killed process
            return False

    _filter(path, is_valid)


def _filter(path: Path, is_valid: Callable[[str], bool]) -> None:
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    remaining = [line if line.endswith("\n") else f"{line}\n" for line in lines if is_valid(line)]
    if remaining != lines:
        write_text(path, "".join(remaining))


@final
class Report:
    """Prints lines, tables and progress bars; everything but the bars goes to ``log_file`` too."""

    def __init__(self, console: Console | None = None, log_file: Path | None = None, *, waits: bool = False) -> None:
        self._console = console or Console(highlight=False)
        self._log_file = AppendFile(log_file, is_open=not waits) if log_file else None

    def open_log(self) -> None:
        if self._log_file:
            self._log_file.is_open = True
            self._append("")

    @classmethod
    def silent(cls) -> Report:
        return cls(Console(quiet=True))

    @property
    def stream(self) -> TextIO:
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
        if self._log_file:
            complain = partial(self._console.print, style="red", markup=False, highlight=False, soft_wrap=True)
            self._log_file.append(text, complain)
