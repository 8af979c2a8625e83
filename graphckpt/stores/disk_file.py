"""An unlinked file, read and written past the page cache, and the messages of its failures. No tensors, no threads."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import final

from graphckpt.errors import did_you_mean
from graphckpt.stores.ranges import aligned
from graphckpt.units import format_bytes

BLOCK = 4096  # bytes; alignment of addresses, offsets and lengths that direct I/O needs on every common disk
_REFUSES_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)
_IN_MEMORY = ("tmpfs", "ramfs")


def in_blocks(num_bytes: int) -> int:
    """Returns ``num_bytes`` rounded up to whole blocks of the file, and one block at least.

    >>> in_blocks(0), in_blocks(4096), in_blocks(4097)
    (4096, 4096, 8192)
    """
    return max(aligned(num_bytes, BLOCK), BLOCK)


@final
class UnlinkedFile:
    """A file that is unlinked as soon as it is open, so that nothing is left behind, however the process ends.

    Where the file system supports direct I/O, ``write`` and ``read`` bypass the page cache. Elsewhere ``flush`` writes
    the cache back and drops it.

    Raises:
        OSError: The folder is missing, not writable, or full.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.is_direct = False
        self._number = -1
        direct = getattr(os, "O_DIRECT", 0)  # not on every system
        if direct:
            self._try_direct(direct)
        if not self.is_direct:
            self._number = _open_unlinked(folder, 0)

    def write(self, source: memoryview, offset: int) -> None:
        """Writes all of ``source``: whole blocks, at an address and an ``offset`` that are multiples of a block."""
        done = 0
        while done < len(source):
            num_bytes = os.pwrite(self._number, source[done:], offset + done)
            num_bytes -= num_bytes % BLOCK  # a partial block is written again
            if num_bytes <= 0:
                raise OSError(errno.EIO, f"expected {len(source)} bytes to be written, got {done}")
            done += num_bytes

    def read(self, target: memoryview, offset: int) -> None:
        done = 0
        while done < len(target):
            num_bytes = os.preadv(self._number, [target[done:]], offset + done)
            num_bytes -= num_bytes % BLOCK
            if num_bytes <= 0:
                raise OSError(errno.EIO, f"expected {len(target)} bytes to be read, got {done}")
            done += num_bytes

    def flush(self, offset: int, num_bytes: int) -> None:
        """Writes these bytes to the disk and drops them from the page cache."""
        if not self.is_direct:
            os.fdatasync(self._number)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._number, offset, num_bytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        number, self._number = self._number, -1
        if number >= 0:
            os.close(number)

    def _try_direct(self, direct: int) -> None:
        try:
            self._number = _open_unlinked(self.folder, direct)
            page = memoryview(mmap.mmap(-1, BLOCK))
            self.write(page, 0)  # some file systems accept the flag and refuse the write
            self.read(page, 0)
            self.is_direct = True
        except OSError as error:
            if error.errno not in _REFUSES_DIRECT:
                raise
        finally:
            if not self.is_direct:
                self.close()


def _open_unlinked(folder: str, flags: int) -> int:
    unnamed = getattr(os, "O_TMPFILE", 0)
    if unnamed:
        with suppress(OSError):  # not on every file system; the other way reports other errors better
            return os.open(folder, unnamed | os.O_RDWR | flags, 0o600)
    number, path = tempfile.mkstemp(prefix="graphckpt-", dir=folder)
    try:
        if not flags:
            return number
        try:
            return os.open(path, os.O_RDWR | flags)
        finally:
            os.close(number)
    finally:
        Path(path).unlink()


def file_system_in_memory(folder: str) -> str | None:
    with suppress(OSError):
        device = Path(folder).stat().st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            mount, _, kind = line.partition(" - ")
            if mount.split()[2] == number and kind.split()[0] in _IN_MEMORY:
                return kind.split()[0]
    return None


def failure_message(block: str, doing: str, num_bytes: int, folder: str, error: BaseException) -> str:
    """Returns the message for a failure to ``doing`` (``"write"`` or ``"read"``) something of ``num_bytes``."""
    number = 0
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    if isinstance(error, OSError):
        number = error.errno or 0
        reason = f"{error.strerror or error}" + (f" ({errno.errorcode[number]})" if number in errno.errorcode else "")
    return (
        f"{block}: offload: failed to {doing} {format_bytes(num_bytes)} in {folder}: {reason}"
        f" · fix: {_fix(number, folder, error)}"
    )


def _fix(number: int, folder: str, error: BaseException) -> str:
    elsewhere = 'use offload="disk:/another/folder"'
    if number in (errno.ENOENT, errno.ENOTDIR):
        siblings = [str(path) for path in Path(folder).parent.iterdir()] if Path(folder).parent.is_dir() else []
        return f"create the folder{did_you_mean(folder, siblings)}, or {elsewhere}"
    if number in (errno.EMFILE, errno.ENFILE):
        return "raise the limit of open files (ulimit -n)"
    if number == errno.ENOMEM or isinstance(error, (MemoryError, RuntimeError)):
        return "lower Disk(in_flight_bytes=...), or offload fewer blocks"
    return f"{_FIXES.get(number, 'run the step again')}, or {elsewhere}"


_FIXES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free space there"),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "give this user write access"),
    errno.EIO: "check the system log for disk errors",
}
