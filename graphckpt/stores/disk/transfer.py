"""Carries bytes between tensors and a file, a chunk at a time. It knows devices and streams, no queue, no thread.

Note [A lane finishes what it begins]: each step of ``save`` and ``load`` ends when its bytes have arrived, as seen from
the host (on CUDA: after an event that the host has waited for). So memory that was copied from may go back to the
allocator at once, and kernels that are launched later, on any stream, find what was copied. No ``record_stream`` is
needed, which gives memory back late.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, Any, final

import torch

from graphckpt.stores.disk.extents import BLOCK, in_blocks

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from graphckpt.stores.disk.file import UnlinkedFile

CHUNK = 8 * 2**20  # bytes; a direct write of this size keeps a disk busy, and a stop need not wait long for it
_TRIM_EVERY = (
    64 * 2**20
)  # bytes; glibc keeps what tensors below 32 MiB free, and cannot use it for the next of that size
_trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device


class Lane(ABC):
    """Between the tensors of one device and one file.

    Args:
        file: The file. The lane does not close it.

    Raises:
        OSError: There is no memory for the chunk, or it cannot be pinned.
    """

    def __init__(self, file: UnlinkedFile) -> None:
        self.file = file
        self._chunk = mmap.mmap(-1, CHUNK)  # at the begin of a page, which direct writes ask for

    def mark(self) -> Any:
        """Returns what ``save`` or ``load`` must wait for: the work that was sent to the device before now."""
        return None

    def target(self, num_bytes: int) -> tuple[torch.Tensor | None, Any]:
        """Returns memory to load into and the stream it belongs to, if the thread that asks must make it."""
        return None, None

    def save(self, data: torch.Tensor, offset: int, ready: Any) -> Generator[None, None, None]:
        """Writes ``data``, flat ``uint8``, at ``offset``, a chunk in each step."""
        with memoryview(self._chunk) as chunk:
            for begin, size in _chunks(data.numel()):
                self._fetch(data, begin, size, ready)
                with chunk[: in_blocks(size)] as blocks:
                    self.file.write(blocks, offset + begin)
                yield
        self.file.settle(offset, in_blocks(data.numel()))

    @abstractmethod
    def load(
        self, num_bytes: int, offset: int, target: torch.Tensor | None, ready: Any
    ) -> Generator[torch.Tensor, None, None]:
        """Reads ``num_bytes`` from ``offset``, a chunk in each step; each gives the tensor, complete after the last."""

    def passed(self, num_bytes: int) -> None:  # noqa: B027 - a device's allocator has nothing to be told
        """So many bytes have been moved, and the tensors that held them let go."""

    def close(self) -> None:
        """Gives back the chunk."""
        with suppress(BufferError):  # an exception that is still looked at may hold a view: then it goes with that
            self._chunk.close()

    @abstractmethod
    def _fetch(self, data: torch.Tensor, begin: int, size: int, ready: Any) -> None:
        """Copies ``size`` bytes of ``data`` into the chunk."""


@final
class HostLane(Lane):
    """For tensors in host memory. Reads go into them directly."""

    def __init__(self, file: UnlinkedFile) -> None:
        super().__init__(file)
        self._address = _address(self._chunk)
        self._untrimmed_bytes = 0

    def load(
        self, num_bytes: int, offset: int, target: torch.Tensor | None, ready: Any
    ) -> Generator[torch.Tensor, None, None]:
        """Reads into new memory, a little bigger, so that the bytes begin at the begin of a page."""
        size = in_blocks(num_bytes)
        room = torch.empty(size + BLOCK, dtype=torch.uint8, device="cpu")
        blocks = room.narrow(0, -room.data_ptr() % BLOCK, size)
        flat = blocks[:num_bytes]
        with blocks.numpy().data as view:
            for begin, part in _chunks(num_bytes):
                with view[begin : begin + in_blocks(part)] as some:
                    self.file.read(some, offset + begin)
                yield flat
        self.file.settle(offset, size)
        yield flat

    def passed(self, num_bytes: int) -> None:
        """Has the C library give memory back to the system, now and then."""
        self._untrimmed_bytes += num_bytes
        if _trim is not None and self._untrimmed_bytes >= _TRIM_EVERY:
            self._untrimmed_bytes = 0
            _trim(0)

    def _fetch(self, data: torch.Tensor, begin: int, size: int, ready: Any) -> None:
        # not copy_(), which would start a team of OpenMP threads for this thread
        ctypes.memmove(self._address, data.data_ptr() + begin, size)


@final
class CudaLane(Lane):
    """For tensors on a CUDA device: through the chunk, which is pinned, on a stream of its own.

    Memory to load into is made on the stream of the thread that asks, whose kernels will read it, so that the
    allocator hands it out again in the order of that stream.
    """

    def __init__(self, file: UnlinkedFile, device: torch.device) -> None:
        super().__init__(file)
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pinned = torch.frombuffer(self._chunk, dtype=torch.uint8)
        with torch.cuda.device(device):
            code = int(torch.cuda.cudart().cudaHostRegister(self._pinned.data_ptr(), CHUNK, _PORTABLE))
        if code:
            raise OSError(errno.ENOMEM, f"host memory cannot be pinned (CUDA error {code})")

    def mark(self) -> torch.cuda.Event:
        """Returns an event behind all that the present stream has been given."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def target(self, num_bytes: int) -> tuple[torch.Tensor, torch.cuda.Stream]:
        """Returns memory of the present stream."""
        target = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return target, torch.cuda.current_stream(self._device)

    def load(
        self, num_bytes: int, offset: int, target: torch.Tensor | None, ready: Any
    ) -> Generator[torch.Tensor, None, None]:
        """Reads into the chunk and copies from there."""
        assert target is not None
        with memoryview(self._chunk) as chunk:
            for begin, size in _chunks(num_bytes):
                with chunk[: in_blocks(size)] as blocks:
                    self.file.read(blocks, offset + begin)
                self._copy(target[begin : begin + size], self._pinned[:size], ready)
                yield target
        self.file.settle(offset, in_blocks(num_bytes))
        yield target

    def close(self) -> None:
        """Gives back the chunk, which is not pinned any more."""
        try:
            self._stream.synchronize()
        finally:
            with torch.cuda.device(self._device):
                torch.cuda.cudart().cudaHostUnregister(self._pinned.data_ptr())
            del self._pinned
            super().close()

    def _fetch(self, data: torch.Tensor, begin: int, size: int, ready: Any) -> None:
        self._copy(self._pinned[:size], data[begin : begin + size], ready)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, ready: torch.cuda.Event) -> None:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            target.copy_(source, non_blocking=True)
            done = torch.cuda.Event(blocking=True)  # to wait without spinning: the step's own threads need the cores
            done.record(self._stream)
        done.synchronize()


def lane_for(device: torch.device, file: UnlinkedFile) -> Lane:
    """Returns the lane between ``file`` and the tensors of ``device``, which is a CPU or a CUDA device."""
    return CudaLane(file, device) if device.type == "cuda" else HostLane(file)


def _chunks(num_bytes: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, num_bytes, CHUNK):
        yield begin, min(CHUNK, num_bytes - begin)


def _address(chunk: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(chunk))
