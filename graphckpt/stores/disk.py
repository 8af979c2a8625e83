r"""Offloads tensors to a file and reloads them, in threads that overlap with computation.

::

    DiskStore       the byte store: opens a file at the first put, and replaces one that has failed
      _OpenFile     a file in use: which bytes are where, what is written and read next, and how much at once
        Transfer    copies between one tensor and the file, chunk by chunk: the work of a thread
          UnlinkedFile

    put --> unwritten (held in memory, bounded) --> written --> requested --> read ahead (bounded) --> get
                 \______________ requested before it is written: no read is needed __________________/^

One thread writes and another one reads, both in order. A freed range may be assigned to the next ``put`` while a thread
is still busy with the old bytes: new bytes are written after them, and what is read of a freed range is dropped.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar, Literal, NoReturn, final

import torch

from graphckpt._compat import unseen_by_modes
from graphckpt.errors import ConfigError, StoreError, did_you_mean
from graphckpt.stores.base import ByteHandle, ByteStore, Offload, TensorGroup, Tier
from graphckpt.stores.pinned import pinned_buffer, streams_of
from graphckpt.stores.slab import FreeRanges, aligned
from graphckpt.units import format_bytes, parse_bytes

CHUNK = 8 * 2**20  # bytes; a direct write of this size saturates a disk, and a stop waits for one chunk only
BLOCK = 4096  # bytes; alignment of addresses, offsets and lengths that direct I/O needs on every common disk


@final
@dataclass(frozen=True)
class Disk(Offload):
    """Offloads tensors to an unlinked temporary file, which threads write and read.

    Args:
        folder: An existing folder; ``None`` for the system's folder for temporary files. The file is unlinked at open,
            so nothing is left behind, however the program ends. It grows to the bytes of one step.
        in_flight_bytes: Bytes, or a size such as ``"256MiB"``. Tensors that are not written yet hold at most this much;
            then forward waits. The same bound applies to bytes read ahead. A larger tensor is handled alone.

    Raises:
        ConfigError: A setting has the wrong type or value.

    >>> Disk.parse("/scratch")
    Disk(folder='/scratch', in_flight_bytes=268435456)
    """

    name: ClassVar[str] = "disk"
    tier: ClassVar[Literal["host", "disk"]] = "disk"

    folder: str | os.PathLike[str] | None = None
    in_flight_bytes: int | str = 256 * 2**20

    def __post_init__(self) -> None:
        folder: Any = self.folder
        if folder is not None and (not isinstance(folder, (str, os.PathLike)) or not str(folder)):
            raise ConfigError(f"Disk.folder: expected a path or None, got {folder!r} · fix: use an existing folder")
        try:
            num_bytes = parse_bytes(self.in_flight_bytes)
        except ValueError as error:
            raise ConfigError(f"Disk.in_flight_bytes: {error}") from None
        if num_bytes < 1:
            raise ConfigError(
                f"Disk.in_flight_bytes: expected at least 1 byte, got {num_bytes} · fix: use a size such as '256MiB'"
            )
        object.__setattr__(self, "folder", None if folder is None else os.fspath(folder))
        object.__setattr__(self, "in_flight_bytes", num_bytes)

    @classmethod
    def parse(cls, argument: str) -> Disk:
        """Parses the folder after ``"disk:"``; ``~`` is the user's home."""
        if not argument:
            raise ConfigError(
                "offload: expected a folder after 'disk:', got none · fix: use 'disk:/path/to/folder' or 'disk'"
            )
        return cls(str(Path(argument).expanduser()))

    def check(self) -> str | None:
        if self.folder is None or Path(self.folder).is_dir():
            return None
        return f"offload: expected an existing folder, got {str(self.folder)!r} · fix: create it, or use 'disk'"

    def byte_store_for(self, device: torch.device, note: Callable[[str], None]) -> ByteStore | None:
        """Returns a byte store with a file, which is opened at the first ``put``."""
        if device.type not in ("cpu", "cuda") or not hasattr(os, "preadv"):
            what = f"tensors on {device.type!r} are" if hasattr(os, "preadv") else "this operating system is"
            note(f"offload to 'disk' has no effect: {what} not supported")
            return None
        folder = tempfile.gettempdir() if self.folder is None else os.fspath(self.folder)
        in_memory = file_system_in_memory(folder)
        if in_memory is not None:
            saves = "saves no memory" if device.type == "cpu" else "saves device memory only"
            text = f"offload to 'disk' {saves}: {folder} is on {in_memory}, which is host memory"
            note(text)
            warnings.warn(f'graphckpt: {text} · fix: set offload to "disk:/folder/on/a/disk"', stacklevel=2)
        return DiskStore(device, folder, int(self.in_flight_bytes))


@final
class DiskStore(ByteStore):
    """A file and its threads, started by the first ``put``.

    After a failure, or an interrupt in one of the methods, the file is closed, stored bytes are lost, and the next
    ``put`` starts anew. The same holds in a forked child: it has another file, and cannot read the bytes of its parent.
    """

    label = "disk"
    tier: ClassVar[Tier] = "disk"

    _file: _OpenFile | None = None

    def __init__(self, device: torch.device, folder: str, in_flight_bytes: int) -> None:
        self._device = device
        self._folder = folder
        self._in_flight_bytes = in_flight_bytes

    def put(self, data: torch.Tensor, group: TensorGroup) -> ByteHandle:
        self._check()
        if data.is_cuda and torch.cuda.is_current_stream_capturing():
            raise StoreError(
                f"{group.block}: offload: {format_bytes(data.numel())} cannot be offloaded to disk in a CUDA graph, as "
                "a replay runs no Python · fix: use offload='cpu', or run without capture"
            )
        try:
            if self._file is None:
                self._file = _OpenFile(self._device, self._folder, self._in_flight_bytes, group.note)
            return self._file.put(data, group)
        except BaseException as error:
            self._give_up("write", data.numel(), group, error)

    def get(self, handle: ByteHandle, group: TensorGroup) -> torch.Tensor:
        self._check()
        assert isinstance(handle, _DiskHandle)
        if handle.file is not self._file:
            raise StoreError(
                handle.file.failure
                or f"{group.block}: offload: {format_bytes(handle.num_bytes)} in {self._folder} belong to process "
                f"{handle.file.pid}, and this process is a fork of it"
                " · fix: run forward and backward in the same process"
            )
        try:
            flat = self._file.get(handle)
        except BaseException as error:
            self._give_up("read", handle.num_bytes, group, error)
        if handle.stream is None or handle.stream == (current := torch.cuda.current_stream(flat.device)):
            return flat
        copy = flat.clone()
        current.synchronize()  # `flat` is freed to the stream it was allocated on, which does not wait for this one
        return copy

    def prefetch(self, handles: Sequence[ByteHandle], group: TensorGroup) -> None:
        """Queues reads. Bytes lost in an earlier failure are skipped: ``get`` raises for them."""
        self._check()
        if self._file is None:
            return
        queued = [handle for handle in handles if isinstance(handle, _DiskHandle) and handle.file is self._file]
        try:
            self._file.prefetch(queued)
        except BaseException as error:
            self._give_up("read", sum(handle.num_bytes for handle in queued), group, error)

    def hint(self, handles: Sequence[ByteHandle], group: TensorGroup) -> None:
        """Queues reads too, unless they would take device memory: they run after the others, within the bound."""
        if self._device.type == "cpu":
            self.prefetch(handles, group)

    def close_group(self, group: TensorGroup) -> None:
        self._check()

    def free(self, handle: ByteHandle) -> None:
        assert isinstance(handle, _DiskHandle)
        handle.release()
        if handle.file is self._file and self._file.pid == os.getpid():
            self._file.free(handle)

    def begin_step(self) -> None:
        if self._file is not None and self._file.ranges.end:  # an interrupt has lost a handle, which frees no more
            self.close()

    def stored_bytes(self, num_bytes: int) -> int:
        return in_blocks(num_bytes)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.failure = file.failure or (
                f"offload: the file in {self._folder} was closed before its bytes were read"
                " · fix: run backward before closing"
            )
            file.stop()

    def __del__(self) -> None:
        self.close()

    def _check(self) -> None:
        """Raises if the file has failed, and drops one that a fork has copied."""
        if self._file is None:
            return
        if self._file.pid != os.getpid():
            self._file.stop()
            self._file = None
        elif self._file.failure is not None:
            text = self._file.failure
            self.close()
            raise StoreError(text)

    def _give_up(self, verb: str, num_bytes: int, group: TensorGroup, error: BaseException) -> NoReturn:
        self.close()
        if isinstance(error, StoreError) or not isinstance(error, (OSError, RuntimeError, MemoryError)):
            raise error
        raise StoreError(_failure_message(group.block, verb, num_bytes, self._folder, error)) from error


@final
class _DiskHandle(ByteHandle):
    __slots__ = (
        "block", "data", "file", "is_freed", "is_requested", "is_written", "offset", "read", "stream", "traffic",
        "write",
    )  # fmt: skip

    def __init__(self, file: _OpenFile, data: torch.Tensor, group: TensorGroup, offset: int) -> None:
        super().__init__(data.numel())
        self.file = file
        self.block, self.traffic = group.block, group.traffic
        self.offset = offset
        """First byte of the range in the file."""
        self.data: torch.Tensor | None = data
        """The tensor's memory, until it is written, or returned if it was requested before."""
        self.is_requested = False
        """The bytes were requested and not returned yet."""
        self.is_written = False
        """The writer does not need ``data`` any more."""
        self.is_freed = False
        self.write: Future[Any] | None = None
        """The queued or running write, while its bytes count as unwritten."""
        self.read: Future[torch.Tensor | None] | None = None
        """The queued, running or finished read, while its bytes count as read ahead."""
        self.stream: Any = None
        """The stream that the memory of the last read was allocated on."""

    def is_obsolete(self) -> bool:
        return self.is_freed or self.file.failure is not None

    def release(self) -> None:
        self.is_freed, self.data = True, None

    def is_lost(self) -> bool:
        return self.file.failure is not None or self.file.pid != os.getpid()


# Note [A file is closed with its last reference]
# The number of a closed file may be given to another file at once, and a busy thread would then write to that one. So
# a file in use is never closed: `stop` drops the reference, and the last job that holds it closes it.


@final
class _OpenFile:
    """The ranges of a file in use, and the threads that write and read it.

    The methods are called by one thread at a time; the threads of the file only run jobs. A job that fails sets
    ``failure``, and those after it do nothing.
    """

    def __init__(self, device: torch.device, folder: str, in_flight_bytes: int, note: Callable[[str], None]) -> None:
        self.failure: str | None = None
        """Why the bytes are lost."""
        self.pid = os.getpid()
        """The process that writes them."""
        self.folder = folder
        self.ranges = FreeRanges()
        self._bound = in_flight_bytes  # of each of the two counts below
        self._unwritten: deque[_DiskHandle] = deque()  # oldest first; some may be written, freed or returned by now
        self._unwritten_bytes = 0  # of tensors whose memory waits for its write
        self._ahead: deque[_DiskHandle] = deque()  # to be read as soon as the bound allows
        self._loaded_bytes = 0  # that were read and not returned yet, or are being read
        file = UnlinkedFile(folder)
        try:
            with unseen_by_modes():
                self._writer, self._reader = (Transfer(device, file, note) for _ in range(2))
        except BaseException:
            file.close()
            raise
        self._threads = {verb: ThreadPoolExecutor(1, "graphckpt disk") for verb in ("write", "read")}

    def put(self, data: torch.Tensor, group: TensorGroup) -> _DiskHandle:
        num_bytes = data.numel()
        ready = self._writer.mark()
        self._wait_for_room(num_bytes)
        handle = _DiskHandle(self, data, group, self.ranges.allocate(in_blocks(num_bytes)))
        handle.write = self._threads["write"].submit(_run, "write", handle, self._writer.save, ready)
        self._unwritten.append(handle)
        self._unwritten_bytes += num_bytes
        return handle

    def prefetch(self, handles: Sequence[_DiskHandle]) -> None:
        for handle in reversed(handles):  # backward needs first what was saved last
            # See Note [The writer drops a tensor without a lock].
            handle.is_requested = True
            if handle.data is None and handle.read is None:
                self._ahead.append(handle)
        self._read_ahead()

    def get(self, handle: _DiskHandle) -> torch.Tensor:
        flat = handle.data
        if flat is None:
            flat = (handle.read or self._start_read(handle)).result()
            if flat is None or self.failure is not None:
                raise StoreError(self.failure)
            self._end_read(handle)
            self._read_ahead()
        handle.is_requested = False
        if handle.is_written:  # else `save` drops it
            handle.data = None
        return flat

    def free(self, handle: _DiskHandle) -> None:
        self.ranges.free(handle.offset, handle.offset + in_blocks(handle.num_bytes))
        self._end_write(handle)
        self._end_read(handle)

    def stop(self) -> None:
        """Ends the threads, which drop the file. See Note [A file is closed with its last reference]."""
        del self._writer, self._reader, self._threads  # handles, and the traceback of an error, may hold this object
        self._unwritten.clear()  # these handles hold it: without a cycle, what was read for them is freed with them
        self._ahead.clear()

    def _wait_for_room(self, num_bytes: int) -> None:
        # With a bound of 256 MiB and tensors of 100, the third waits until the first is written, and so on: forward
        # then runs at the rate of the disk, instead of holding in memory all that it should offload.
        while self._unwritten:
            # One thread writes in order, so that no later write is over before this one.
            oldest = self._unwritten[0]
            if oldest.write is not None and not oldest.write.done():
                if self._unwritten_bytes + num_bytes <= self._bound:
                    return
                oldest.write.result()
            self._unwritten.popleft()
            self._end_write(oldest)
        if self.failure is not None:
            raise StoreError(self.failure)

    def _read_ahead(self) -> None:
        while self._ahead:
            handle = self._ahead[0]
            if not handle.is_freed and handle.is_requested and handle.read is None:
                if self._loaded_bytes and self._loaded_bytes + handle.num_bytes > self._bound:
                    return
                self._start_read(handle)
            self._ahead.popleft()

    def _start_read(self, handle: _DiskHandle) -> Future[torch.Tensor | None]:
        target, handle.stream = self._reader.target(handle.num_bytes)
        ready = self._reader.mark()
        handle.read = self._threads["read"].submit(_run, "read", handle, self._reader.load, ready, target)
        self._loaded_bytes += handle.num_bytes
        return handle.read

    def _end_write(self, handle: _DiskHandle) -> None:
        if handle.write is not None:
            handle.write.cancel()
            handle.write = None
            self._unwritten_bytes -= handle.num_bytes

    def _end_read(self, handle: _DiskHandle) -> None:
        if handle.read is not None:
            handle.read.cancel()
            handle.read = None
            self._loaded_bytes -= handle.num_bytes


def _run(verb: str, handle: _DiskHandle, job: Callable[..., Any], *arguments: Any) -> Any:
    """Runs a job in a thread of the file, unless its handle is obsolete."""
    started = perf_counter()
    try:
        return None if handle.is_obsolete() else job(handle, *arguments)
    except BaseException as error:  # of any kind: it would be lost with the thread
        file = handle.file
        text = _failure_message(handle.block, verb, handle.num_bytes, file.folder, error)
        file.failure = file.failure or text
    finally:
        if handle.traffic is not None:
            handle.traffic.copy_seconds += perf_counter() - started
    return None


# Note [The writer drops a tensor without a lock]
# Once its bytes are in the file, `save` drops `handle.data` unless `is_requested` is set. `prefetch` sets that before
# it looks at `data`: either the tensor stays, and `get` returns it without a read, or its bytes are in the file. If
# `save` had looked just before, the tensor is dropped after all, and `get` reads it. So `get` reads the attribute once,
# into a variable: it may be None at a second look.
#
# `get` sets `is_requested` before it reads `is_written`, and `save` the other way round: the later of the two drops the
# tensor.


# Note [Each step of a transfer is synchronous]
# Each chunk of `save` and `load` is over when its bytes have arrived, as seen from the host (on CUDA: after an event
# that the host has waited for). So the source may be freed at once, and kernels that are launched later, on any stream,
# see the copied bytes. `record_stream`, which delays frees, is not needed.


@final
class Transfer:
    """Copies between the tensors of one device and a file, in chunks that start at whole pages.

    Tensors in host memory are read in place. Those on a CUDA device go through a pinned chunk, on the stream for disks;
    the memory to load into is allocated on the stream of the calling thread, whose kernels will read it, so that the
    allocator reuses it in the order of that stream.
    """

    def __init__(self, device: torch.device, file: UnlinkedFile, note: Callable[[str], None]) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._file = file
        if self._is_cuda:
            self._stream = streams_of(device).disk
            self._buffer = pinned_buffer(CHUNK + BLOCK, device, note)
        self._pages = _whole_pages(CHUNK, self._buffer.flat if self._is_cuda else None)
        self._chunk = self._pages.numpy().data

    def mark(self) -> torch.cuda.Event | None:
        """Returns an event for ``save`` or ``load`` to wait for: the work submitted to the device so far."""
        if not self._is_cuda:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def target(self, num_bytes: int) -> tuple[torch.Tensor | None, torch.cuda.Stream | None]:
        """Returns memory to load into and its stream, if the calling thread must allocate it."""
        if not self._is_cuda:
            return None, None
        target = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return target, torch.cuda.current_stream(self._device)

    def save(self, handle: _DiskHandle, ready: Any) -> None:
        """Writes the tensor of ``handle``, unless obsolete by then, and drops it, unless it was requested."""
        data = handle.data
        for begin, size in _chunks(handle.num_bytes):
            if handle.is_obsolete() or data is None:
                break
            if self._is_cuda:
                self._copy(self._pages[:size], data[begin : begin + size], ready)
            else:  # copy_() would start a team of OpenMP threads for this thread
                ctypes.memmove(self._pages.data_ptr(), data.data_ptr() + begin, size)
            self._file.write(self._chunk[: in_blocks(size)], handle.offset + begin)
        else:
            self._file.flush(handle.offset, in_blocks(handle.num_bytes))
        handle.is_written = True
        if not handle.is_requested:
            handle.data = None

    def load(self, handle: _DiskHandle, ready: Any, target: torch.Tensor | None) -> torch.Tensor:
        """Reads the bytes of ``handle``, unless obsolete by then: into ``target`` by way of the chunk, or in place."""
        num_bytes = handle.num_bytes
        flat = _whole_pages(in_blocks(num_bytes)) if target is None else target
        view = flat.numpy().data if target is None else self._chunk
        for begin, size in _chunks(num_bytes):
            if handle.is_obsolete():
                break
            first = begin if target is None else 0
            self._file.read(view[first : first + in_blocks(size)], handle.offset + begin)
            if target is not None:
                self._copy(target[begin : begin + size], self._pages[:size], ready)
        else:
            self._file.flush(handle.offset, in_blocks(num_bytes))
        return flat[:num_bytes]

    def _copy(self, target: torch.Tensor, source: torch.Tensor, ready: torch.cuda.Event) -> None:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            target.copy_(source, non_blocking=True)
            done = torch.cuda.Event(blocking=True)  # waits without spinning: the step's threads need the cores
            done.record(self._stream)
        done.synchronize()


def _whole_pages(num_bytes: int, room: torch.Tensor | None = None) -> torch.Tensor:
    """Returns memory, a slice of ``room`` if given, that begins at a page, as direct I/O requires."""
    if room is None:
        room = torch.empty(num_bytes + BLOCK, dtype=torch.uint8, device="cpu")
    return room.narrow(0, -room.data_ptr() % BLOCK, num_bytes)


def _chunks(num_bytes: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, num_bytes, CHUNK):
        yield begin, min(CHUNK, num_bytes - begin)


def in_blocks(num_bytes: int) -> int:
    """Returns ``num_bytes`` rounded up to whole blocks of the file, and one block at least.

    >>> in_blocks(0), in_blocks(4096), in_blocks(4097)
    (4096, 4096, 8192)
    """
    return max(aligned(num_bytes, BLOCK), BLOCK)


@final
class UnlinkedFile:
    """A file that is unlinked as soon as it is open, so that nothing is left behind, however the process ends.

    Where the file system supports direct I/O, ``write`` and ``read`` bypass the page cache, in which a copy of all that
    is offloaded would take host memory. Elsewhere ``flush`` writes the cache back and drops it.

    Raises:
        OSError: The folder is missing, not writable, or full.
    """

    def __init__(self, folder: str) -> None:
        self._number = -1
        flag = getattr(os, "O_DIRECT", 0)  # not on every system
        self.is_direct = bool(flag)
        if self.is_direct:
            try:
                self._number = _open_unlinked(folder, flag)
                page = memoryview(mmap.mmap(-1, BLOCK))
                self.write(page, 0)  # some file systems accept the flag and refuse the write
                self.read(page, 0)
            except OSError as error:
                self.close()
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP):
                    raise
                self.is_direct = False
        if not self.is_direct:
            self._number = _open_unlinked(folder, 0)

    def write(self, source: memoryview, offset: int) -> None:
        """Writes all of ``source``: whole blocks, at an address and an ``offset`` that are multiples of a block."""
        self._complete(os.pwritev, source, offset, "written")

    def read(self, target: memoryview, offset: int) -> None:
        self._complete(os.preadv, target, offset, "read")

    def _complete(self, call: Callable[..., int], data: memoryview, offset: int, verb: str) -> None:
        done = 0
        while done < len(data):
            num_bytes = call(self._number, [data[done:]], offset + done)
            num_bytes -= num_bytes % BLOCK  # a partial block is transferred again
            if num_bytes <= 0:
                raise OSError(errno.EIO, f"expected {len(data)} bytes to be {verb}, got {done}")
            done += num_bytes

    def flush(self, offset: int, num_bytes: int) -> None:
        if not self.is_direct:
            # In this order: the advice has no effect on pages that are not written back yet.
            os.fdatasync(self._number)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._number, offset, num_bytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        number, self._number = self._number, -1
        if number >= 0:
            os.close(number)

    def __del__(self) -> None:
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
    """Returns the kind of file system of ``folder`` if its files are in host memory."""
    with suppress(OSError):
        device = Path(folder).stat().st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            mount, _, kind = line.partition(" - ")
            if mount.split()[2] == number and kind.split()[0] in ("tmpfs", "ramfs"):
                return kind.split()[0]
    return None


_FIXES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free space there"),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "give this user write access"),
    errno.EIO: "check the system log for disk errors",
}


def _failure_message(block: str, verb: str, num_bytes: int, folder: str, error: BaseException) -> str:
    number = 0
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    if isinstance(error, OSError):
        number = error.errno or 0
        reason = f"{error.strerror or error}" + (f" ({errno.errorcode[number]})" if number in errno.errorcode else "")
    fix = f'{_FIXES.get(number, "run the step again")}, or use offload="disk:/another/folder"'
    if number in (errno.ENOENT, errno.ENOTDIR):
        siblings = map(str, Path(folder).parent.glob("*/"))  # folders only
        fix = f'create the folder{did_you_mean(folder, siblings)}, or use offload="disk:/another/folder"'
    elif number in (errno.EMFILE, errno.ENFILE):
        fix = "raise the limit of open files (ulimit -n)"
    elif number == errno.ENOMEM or isinstance(error, (MemoryError, RuntimeError)):
        fix = "lower Disk(in_flight_bytes=...), or offload fewer blocks"
    return f"{block}: offload: failed to {verb} {format_bytes(num_bytes)} in {folder}: {reason} · fix: {fix}"
