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
        self._file = folder / LOCK
        self._folder = folder
        self._close: Callable[[], object] | None = None
        self._is_new = False

    def check(self) -> None:
        """Takes nothing and writes nothing.

        Raises:
            ConfigError: another process holds the lock.
        """
        if self._close is not None or fcntl is None:
            return
        with suppress(OSError):  # there is none yet, or it cannot be tried without the right to write
            number = os.open(self._file, os.O_RDONLY)
            try:
                self._take(number)
            finally:
                os.close(number)

    def acquire(self) -> None:
        """Takes the lock, if it is not taken yet. A file system that knows no locks lets everyone in.

        Raises:
            ConfigError: another process holds it.
            OSError: the folder cannot be written.
        """
        if self._close is not None or fcntl is None:
            return
        while True:
            is_new = not self._file.exists()
            number = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                is_taken = self._take(number)
            except ConfigError:
                os.close(number)
                raise
            if not is_taken:
                os.close(number)
                return
            if self._is_same(number):
                break
            os.close(number)  # the one who had it has removed the file
        self._is_new = is_new
        with suppress(OSError):  # on a full disk it is locked all the same, by a process without a name
            os.ftruncate(number, 0)
            os.write(number, f"{_me()}\n".encode())
        self._close = weakref.finalize(self, os.close, number)

    def release(self, *, discard: bool = False) -> None:
        """Gives the lock back; with ``discard``, a file that this object has made goes too."""
        if self._close is None:
            return
        if discard and self._is_new:
            with suppress(OSError):
                self._file.unlink()
        self._close()
        self._close = None

    def _take(self, number: int) -> bool:
        """Returns whether an open file could be locked; not so where nothing can be, or this process has the lock."""
        assert fcntl is not None
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(number, 1000).decode(errors="replace").strip()
            if isinstance(error, BlockingIOError) and holder != _me():
                raise ConfigError(self._taken_by(holder)) from None
            return False
        return True

    def _is_same(self, number: int) -> bool:
        try:
            return os.path.samestat(os.fstat(number), self._file.stat())
        except OSError:
            return False

    def _taken_by(self, holder: str) -> str:
        who = holder or "another process"
        fix = f"wait until it ends, or end it ({_how_to_end(holder)}), or name another folder: train.output_dir=..."
        return f"train.output_dir: {self._folder}: {who} is training in this folder · fix: {fix}"


def _me() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _how_to_end(holder: str) -> str:
    number = holder.split()[1] if holder.count(" ") >= 3 else "its number"
    return f"kill {number} stops it with a snapshot"
