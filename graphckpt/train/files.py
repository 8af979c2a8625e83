"""Replaces files so that a reader, or a process that is killed, finds the old one or the new one, and never a part."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a path to write to, in the same folder and with the same suffix, which becomes ``path`` at the end.

    An error leaves ``path`` as it was, and nothing else.

    Raises:
        OSError: the file cannot be written.
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
    """Replaces a file by one with this text.

    Raises:
        OSError: the file cannot be written.
    """
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
