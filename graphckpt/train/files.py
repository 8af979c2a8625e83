"""Replaces files so that a reader finds the old or the new one, never a part; appends what a full disk delays."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a path to write to, in the same folder and with the same suffix, which becomes ``path`` at the end.

    An error leaves ``path`` as it was, and nothing else.
    """
    fresh = path.with_name(f".{path.name}.tmp{path.suffix}")
    try:
        yield fresh
        sync(fresh)
        fresh.replace(path)
    except BaseException:
        remove(fresh)
        raise
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    with replacing(path) as fresh:
        fresh.write_text(text, encoding="utf-8")


def hidden(path: Path, kind: str) -> Path:
    """Returns a hidden name beside ``path``; ``kind`` is ``"tmp"``, ``"old"`` or ``"trash"``."""
    return path.with_name(f".{path.name}.{kind}")


def remove(path: Path) -> None:
    """Removes a file or a folder, if it is there; of a folder, as much as can be removed."""
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
    """Appends text to a file; text that cannot be written is kept and written with the next one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting = ""

    def append(self, text: str) -> OSError | None:
        """Writes, or returns why it could not; then nothing of ``text`` is in the file."""
        self._waiting += text
        try:
            with self.path.open("ab", buffering=0) as file:
                start, data = file.seek(0, 2), self._waiting.encode()
                try:
                    written = 0
                    while written < len(data):
                        written += file.write(data[written:])
                except OSError:
                    file.truncate(start)
                    raise
        except OSError as error:
            return error
        self._waiting = ""
        return None


def cut_log(path: Path, last_iteration: int) -> None:
    """Drops the lines of iterations after ``last_iteration``, from 0, from a log, whose lines count from 1."""
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
