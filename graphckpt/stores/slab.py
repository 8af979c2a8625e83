"""Keeps saved tensors in one slab on their device, at the same addresses in every step."""

from __future__ import annotations

import logging
import sys
import weakref
from bisect import bisect
from collections import deque
from typing import ClassVar, final

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from graphckpt._compat import unseen_by_modes
from graphckpt._compat_fake import is_of_absent_device
from graphckpt.errors import StoreError
from graphckpt.stores.base import ByteHandle, ByteStore, TensorGroup, Tier
from graphckpt.units import format_bytes

ALIGN = 256  # bytes; cudaMalloc's guarantee, so vectorised kernels stay legal


def aligned(num_bytes: int, align: int = ALIGN) -> int:
    """Rounds up to the alignment.

    >>> aligned(1), aligned(256), aligned(257)
    (256, 256, 512)
    """
    return -(-num_bytes // align) * align


@final
class FreeRanges:
    """The free ranges of an address space without an end. Once all is freed, the same calls return the same ranges.

    ::

        bytes ^   +------+ +--+         Forward puts, backward frees: a stack, which first fit packs without a gap.
              | +-+      +-+  +-+
              |-+                +--
              +---------------------> moments

    >>> ranges = FreeRanges()
    >>> ranges.allocate(10), ranges.allocate(20), ranges.end
    (0, 10, 30)
    >>> ranges.free(0, 10)
    >>> ranges.allocate(11), ranges.allocate(3)  # the gap is too small for the first
    (30, 0)
    """

    __slots__ = ("_free",)

    def __init__(self) -> None:
        self._free = [(0, sys.maxsize)]  # begin and end, sorted; no two touch, and the last has no end

    @property
    def end(self) -> int:
        return self._free[-1][0]

    def allocate(self, size: int) -> int:
        # The last range has no end, so that one always fits.
        at = next(at for at, (begin, end) in enumerate(self._free) if end - begin >= size)
        begin, end = self._free[at]
        self._free[at : at + 1] = [(begin + size, end)] if end - begin > size else []
        return begin

    def free(self, begin: int, end: int) -> None:
        first = last = bisect(self._free, (begin, end))
        if self._free[last][0] == end:
            end, last = self._free[last][1], last + 1
        if first > 0 and self._free[first - 1][1] == begin:
            begin, first = self._free[first - 1][0], first - 1
        self._free[first:last] = [(begin, end)]


_log = logging.getLogger("graphckpt")


@final
class _SlabHandle(ByteHandle):
    __slots__ = ("data",)

    def __init__(self, data: torch.Tensor) -> None:
        super().__init__(data.numel())
        self.data: torch.Tensor | None = data


# Note [Each use of a slab's range has a storage]
# What `get` returns may outlive the key: backward may keep a view of it, even as a gradient. A range must not be reused
# while any view of it is alive, so each use of a range gets a new storage over the slab's memory (by DLPack, without
# a copy), and the range is free when that storage is gone. A weak reference shows when that is: the Python object of a
# storage lives as long as its memory, whichever object refers to it (pytorch#103907).
#
#     key = put(x)            range in use
#     y = get(key); del key   in use: y has the storage of this use
#     del y                   the callback appends the range; the next `put` frees it

# Note [Captured slabs are not freed]
# A captured graph writes to the addresses of its capture at every replay. So a slab that was used in a capture is held
# for good when a larger one replaces it.


@final
class SlabStore(ByteStore):
    """A slab of device memory, allocated after the first step and exactly as large as that step needs.

    Tensors of the first step, and of a step that differs from all before, are allocated one by one.
    """

    tier: ClassVar[Tier] = "device"

    def __init__(self, device: torch.device) -> None:
        self.label = "slab"
        self._device = device
        self._ranges = FreeRanges()
        self._in_use: dict[int, tuple[int, int, weakref.ref[torch.UntypedStorage]]] = {}  # ranges, by number of `put`
        self._num_puts = 0
        self._free: deque[int] = deque()
        self._slab: torch.Tensor | None = None
        self._wanted_bytes = 0
        self._needs_slab = False
        self._is_captured = False
        self._captured: list[torch.Tensor] = []  # see Note [Captured slabs are not freed]

    @property
    def slab_bytes(self) -> int:
        return 0 if self._slab is None else self._slab.numel()

    def put(self, data: torch.Tensor, group: TensorGroup) -> ByteHandle:
        if is_of_absent_device(data):  # a slab would be memory of this machine; its ranges are what counts
            return _SlabHandle(self._allocate(data.numel(), group).copy_(data))
        self._free_dropped()
        if self._needs_slab:
            _log.info("contiguous: a slab of %s on %s", format_bytes(self._wanted_bytes), self._device)
            if self._slab is not None and self._is_captured:
                self._captured.append(self._slab)
            self._slab = None  # the old slab is freed before the new one is allocated
            self._is_captured = False
            with unseen_by_modes():  # its ranges are counted, not the slab
                self._slab = self._allocate(self._wanted_bytes, group)
            self._needs_slab = False  # last: until then an interrupt leaves the old slab, which may be too small
        num_bytes = data.numel()
        size = aligned(num_bytes)
        begin = self._ranges.allocate(size)
        self._wanted_bytes = max(self._wanted_bytes, begin + size)
        if self._slab is None or begin + size > self.slab_bytes:
            copy = self._allocate(num_bytes, group)
        else:
            if self._device.type == "cuda":
                self._is_captured |= torch.cuda.is_current_stream_capturing()
            with unseen_by_modes():
                copy = from_dlpack(to_dlpack(self._slab[begin : begin + num_bytes]))
        # The callback runs where the last reference goes: in any thread, and also within `allocate` here, if the
        # garbage collector starts in it. So it appends to a deque, which is atomic, and leaves the free ranges alone.
        number, self._num_puts = self._num_puts, self._num_puts + 1
        append = self._free.append  # holds no reference to the store
        storage = weakref.ref(copy.untyped_storage(), lambda _: append(number))
        # Before the copy: if that fails or is interrupted, the range is freed with the storage. The weak reference is
        # held too, since its callback runs only while it lives.
        self._in_use[number] = begin, begin + size, storage
        return _SlabHandle(copy.copy_(data))

    def get(self, handle: ByteHandle, group: TensorGroup) -> torch.Tensor:
        assert isinstance(handle, _SlabHandle)
        assert handle.data is not None
        return handle.data

    def free(self, handle: ByteHandle) -> None:
        """Drops the range. See Note [Each use of a slab's range has a storage]."""
        assert isinstance(handle, _SlabHandle)
        handle.data = None

    def begin_step(self) -> None:
        # An interrupt may have ended a callback.
        self._free.extend(number for number, (_, _, storage) in self._in_use.items() if storage() is None)
        self._free_dropped()
        self._needs_slab = self._wanted_bytes > self.slab_bytes
        if self._needs_slab or not self._in_use:
            # What is in use of a slab to be replaced is not in the next, and an interrupt may have left a range behind.
            self._ranges, self._in_use = FreeRanges(), {}

    def close(self) -> None:
        self._slab = None
        self._captured.clear()

    def _free_dropped(self) -> None:
        while self._free:
            use = self._in_use.pop(self._free.popleft(), None)
            if use is not None:
                self._ranges.free(use[0], use[1])

    def _allocate(self, num_bytes: int, group: TensorGroup) -> torch.Tensor:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        except RuntimeError as error:
            raise StoreError(
                f"{group.block}: contiguous: expected {format_bytes(num_bytes)} free on {self._device}, got none "
                f"({str(error).splitlines()[0]}) · fix: set offload or activation_checkpointing, or contiguous = False"
            ) from error
