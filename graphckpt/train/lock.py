"""Keeps two processes from writing to one output folder. The kernel releases the lock, also of a killed process."""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import final

from graphckpt.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows has none, and there nothing is locked
    fcntl = None  # type: ignore[assignment]

LOCK = "run.lock"
"""The file that is locked. It stays in the folder: whether it is there says nothing, whether it is locked does."""


@final
class FolderLock:
    """A lock on a folder that one process at a time holds; another object in the same process may share it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._close: Callable[[], object] | None = None

    def acquire(self) -> None:
        """Takes the lock, if it is not taken yet. A file system that knows no locks lets everyone in.

        Raises:
            ConfigError: another process holds it.
            OSError: the folder cannot be written.
        """
        if self._close is not None or fcntl is None:
            return
        number = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(number, 1000).decode(errors="replace").strip()
            os.close(number)
            if isinstance(error, BlockingIOError) and holder != _me():
                raise ConfigError(self._taken_by(holder)) from None
            return
        with suppress(OSError):  # on a full disk it is locked all the same, by a process without a name
            os.ftruncate(number, 0)
            os.write(number, f"{_me()}\n".encode())
        self._close = weakref.finalize(self, os.close, number)

    def release(self) -> None:
        """Gives the lock back."""
        if self._close is not None:
            self._close()
            self._close = None

    def _taken_by(self, holder: str) -> str:
        who = holder or "another process"
        fix = f"wait until it ends, or end it ({_how_to_end(holder)}), or name another folder: train.output_dir=..."
        return f"train.output_dir: {self._folder}: {who} is training in this folder · fix: {fix}"


def _me() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _how_to_end(holder: str) -> str:
    number = holder.split()[1] if holder.count(" ") >= 3 else "its number"
    return f"kill {number} stops it with a snapshot"
