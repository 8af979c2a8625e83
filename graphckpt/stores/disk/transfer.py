"""Copies bytes between tensors and a file, in chunks. It knows devices and streams, no queue, no thread.

Note [Each step of a transfer is synchronous]: each step of ``save`` and ``load`` ends when its bytes have arrived, as
seen from the host (on CUDA: after an event that the host has waited for). So the source may be freed at once, and
kernels that are launched later, on any stream, see the copied bytes. ``record_stream``, which delays frees, is not
needed.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from contextlib import suppress
from typing import Any, final

import torch

from graphckpt.stores.disk.extents import BLOCK, in_blocks
from graphckpt.stores.disk.file import UnlinkedFile
from graphckpt.stores.streams import streams_of

CHUNK = 8 * 2**20  # bytes; a direct write of this size saturates a disk, and a stop waits for one chunk only
_TRIM_EVERY = (
    64 * 2**20
)  # bytes; glibc keeps the freed memory of tensors below 32 MiB, and cannot reuse it for the next one
_trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device


class Transfer(ABC):
    """Copies between the tensors of one device and one file.

    Args:
        file: The file. The transfer does not close it.

    Raises:
        OSError: The chunk cannot be allocated or pinned.
    """

    def __init__(self, file: UnlinkedFile) -> None:
        self.file = file
        self._chunk = mmap.mmap(-1, CHUNK)  # page-aligned, as direct writes require

    def mark(self) -> Any:
        """Returns what ``save`` or ``load`` must wait for: the work submitted to the device so far."""
        return None

    def target(self, num_bytes: int) -> tuple[torch.Tensor | None, Any]:
        """Returns memory to load into and its stream, if the calling thread must allocate it."""
        return None, None

    def save(self, data: torch.Tensor, offset: int, ready: Any) -> Generator[None, None, None]:
        """Writes ``data``, flat ``uint8``, at ``offset``, a chunk per step."""
        with memoryview(self._chunk) as chunk:
            for begin, size in _chunks(data.numel()):
                self._fetch(data, begin, size, ready)
                with chunk[: in_blocks(size)] as blocks:
                    self.file.write(blocks, offset + begin)
                yield
        self.file.flush(offset, in_blocks(data.numel()))

    @abstractmethod
    def load(
        self, num_bytes: int, offset: int, target: torch.Tensor | None, ready: Any
    ) -> Generator[torch.Tensor, None, None]:
        """Reads ``num_bytes`` from ``offset``, a chunk per step; yields the tensor, complete after the last step."""

    def count(self, num_bytes: int) -> None:  # noqa: B027 - optional
        """Counts bytes that were copied and whose tensors are freed."""

    def close(self) -> None:
        """Frees the chunk."""
        with suppress(BufferError):  # an exception may still hold a view of it
            self._chunk.close()

    @abstractmethod
    def _fetch(self, data: torch.Tensor, begin: int, size: int, ready: Any) -> None:
        """Copies ``size`` bytes of ``data`` into the chunk."""


@final
class HostTransfer(Transfer):
    """For tensors in host memory. Reads go into them directly."""

    def __init__(self, file: UnlinkedFile) -> None:
        super().__init__(file)
        self._address = _address(self._chunk)
        self._untrimmed_bytes = 0

    def load(
        self, num_bytes: int, offset: int, target: torch.Tensor | None, ready: Any
    ) -> Generator[torch.Tensor, None, None]:
        """Reads into new memory, one block larger, so that the bytes can be page-aligned."""
        size = in_blocks(num_bytes)
        room = torch.empty(size + BLOCK, dtype=torch.uint8, device="cpu")
        blocks = room.narrow(0, -room.data_ptr() % BLOCK, size)
        flat = blocks[:num_bytes]
        with blocks.numpy().data as view:
            for begin, part in _chunks(num_bytes):
                with view[begin : begin + in_blocks(part)] as some:
                    self.file.read(some, offset + begin)
                yield flat
        self.file.flush(offset, size)
        yield flat

    def count(self, num_bytes: int) -> None:
        """Asks the C library to return memory to the system, now and then."""
        self._untrimmed_bytes += num_bytes
        if _trim is not None and self._untrimmed_bytes >= _TRIM_EVERY:
            self._untrimmed_bytes = 0
            _trim(0)

    def _fetch(self, data: torch.Tensor, begin: int, size: int, ready: Any) -> None:
        # copy_() would start a team of OpenMP threads for this thread
        ctypes.memmove(self._address, data.data_ptr() + begin, size)


@final
class CudaTransfer(Transfer):
    """For tensors on a CUDA device: through the pinned chunk, on its own stream.

    Memory to load into is allocated on the stream of the calling thread, whose kernels will read it, so that the
    allocator reuses it in the order of that stream.
    """

    def __init__(self, file: UnlinkedFile, device: torch.device) -> None:
        super().__init__(file)
        self._device = device
        self._stream = streams_of(device).disk
        self._pinned = torch.frombuffer(self._chunk, dtype=torch.uint8)
        with torch.cuda.device(device):
            code = int(torch.cuda.cudart().cudaHostRegister(self._pinned.data_ptr(), CHUNK, _PORTABLE))
        if code:
            raise OSError(errno.ENOMEM, f"pinning host memory failed (CUDA error {code})")

    def mark(self) -> torch.cuda.Event:
        """Returns an event after all work submitted to the current stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def target(self, num_bytes: int) -> tuple[torch.Tensor, torch.cuda.Stream]:
        """Returns memory of the current stream."""
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
        self.file.flush(offset, in_blocks(num_bytes))
        yield target

    def close(self) -> None:
        """Unpins and frees the chunk."""
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
            done = torch.cuda.Event(blocking=True)  # waits without spinning: the step's threads need the cores
            done.record(self._stream)
        done.synchronize()


def transfer_for(device: torch.device, file: UnlinkedFile) -> Transfer:
    """Returns the transfer between ``file`` and the tensors of ``device``, a CPU or a CUDA device."""
    return CudaTransfer(file, device) if device.type == "cuda" else HostTransfer(file)


def _chunks(num_bytes: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, num_bytes, CHUNK):
        yield begin, min(CHUNK, num_bytes - begin)


def _address(chunk: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(chunk))
