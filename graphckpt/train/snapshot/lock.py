"""Keeps two processes from writing to one output folder. The kernel releases the lock, also of a killed process."""

from __future__ import annotations

import errno
import os
import socket
import weakref
from contextlib import suppress
from pathlib import Path
from typing import final

from filelock import FileLock, Timeout

from graphckpt.errors import ConfigError

LOCK = "run.lock"
"""The locked file. It remains in the folder: only the lock on it matters, not that it exists."""
_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)


@final
class FolderLock:
    """A lock on a folder that one process at a time holds; another object in the same process may share it."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / LOCK
        self._folder = folder
        self._lock = FileLock(self._file, mode=0o644, thread_local=False, is_singleton=True, blocking=False)
        self._is_new = False
        self._release: weakref.finalize[[], FolderLock] | None = None

    def check(self) -> None:
        """Checks that the lock can be taken; writes nothing.

        Raises:
            ConfigError: another process holds the lock.
        """
        if not self._file.exists() or self._lock.is_locked:
            return
        with suppress(OSError):  # it cannot be tried without the right to write
            self._take()
            self._lock.release()

    def acquire(self) -> None:
        """Takes the lock, if it is not taken yet. A file system without locks lets every process in.

        Raises:
            ConfigError: another process holds it.
            OSError: the folder cannot be written.
        """
        if self._lock.is_locked:
            return
        is_new = not self._file.exists()
        try:
            self._take()
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                return
            raise
        self._is_new = is_new
        self._release = weakref.finalize(self, self._lock.release, force=True)
        self._release.atexit = False  # the kernel releases it; the end of a forked process must not
        with suppress(OSError):  # on a full disk it is locked all the same, by a process without a name
            self._file.write_text(f"process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")

    def release(self, *, discard: bool = False) -> None:
        """Releases the lock; with ``discard``, removes the file if this object created it."""
        if self._release is None or not self._release.alive:
            return
        if discard and self._is_new:
            with suppress(OSError):
                self._file.unlink()
        self._release()

    def _take(self) -> None:
        try:
            self._lock.acquire()
        except Timeout:
            holder = self._file.read_text("utf-8", errors="replace").strip()
            number = holder.split()[1] if holder.count(" ") >= 3 else "its number"
            what = f"train.output_dir: {self._folder}: {holder or 'another process'} is training in this folder"
            end = f"wait until it ends, or end it (kill {number} stops it with a snapshot)"
            raise ConfigError(f"{what} · fix: {end}, or name another folder: train.output_dir=...") from None
