"""Files that grow by lines: log.txt and metrics.json. A full disk loses none of them while the process lives."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import final

from graphckpt.train.files import write_text

_ITERATION = re.compile(r" iteration: (\d+)/")


@final
class GrowingFile:
    """Appends text to a file; what the disk does not take is written with the next text."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting = ""

    def append(self, text: str) -> OSError | None:
        """Writes, or returns why it could not; then nothing of ``text`` is in the file."""
        self._waiting += text
        try:
            with self.path.open("ab", buffering=0) as file:
                start, whole = file.seek(0, 2), self._waiting.encode()
                try:
                    written = 0
                    while written < len(whole):
                        written += file.write(whole[written:])
                except OSError:
                    file.truncate(start)
                    raise
        except OSError as error:
            return error
        self._waiting = ""
        return None


def cut_log(path: Path, last_iteration: int) -> None:
    """Drops the lines of iterations after ``last_iteration`` from a log.

    Raises:
        OSError: the file cannot be written.
    """

    def is_kept(line: str) -> bool:
        found = _ITERATION.search(line)
        return not found or int(found[1]) <= last_iteration

    _keep(path, is_kept)


def cut_metrics(path: Path, last_iteration: int) -> None:
    """Drops the rows of iterations after ``last_iteration``, and what is no row, from a file of JSON lines.

    Raises:
        OSError: the file cannot be written.
    """

    def is_kept(line: str) -> bool:
        try:
            row = json.loads(line)
            return int(row["iteration"]) <= last_iteration
        except (ValueError, TypeError, KeyError):  # half a line, of a process that was killed
            return False

    _keep(path, is_kept)


def _keep(path: Path, is_kept: Callable[[str], bool]) -> None:
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    kept = [line if line.endswith("\n") else f"{line}\n" for line in lines if is_kept(line)]
    if kept != lines:
        write_text(path, "".join(kept))
