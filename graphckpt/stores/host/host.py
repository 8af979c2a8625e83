"""Offloads tensors to pinned host memory and reloads them, overlapping with computation."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch

from graphckpt._compat import at_end_of_backward
from graphckpt.errors import ConfigError
from graphckpt.stores.base import TensorGroup
from graphckpt.stores.byte_store import ByteHandle, ByteStore, Tier
from graphckpt.stores.host.copy_engine import CopyEngine, CopyEvent, CudaCopyEngine
from graphckpt.stores.host.pinned import postpone
from graphckpt.stores.host.pinned_pool import PinnedBlock, PinnedPool
from graphckpt.stores.offload import Offload

_STAYS = (
    "offload: tensors that exist only in the captured step, such as an attention mask, stay on the device (host memory "
    "cannot be pinned during a capture)"
)


@dataclass(frozen=True)
class Host(Offload):
    """Offloads CUDA tensors to pinned host memory.

    Args:
        in_flight_bytes: Device memory that copies to the host may hold. ``None``: the saved bytes of one block, so that
            its copies overlap with the next block's computation.

    Raises:
        ConfigError: ``in_flight_bytes`` is not a number of bytes.
    """

    name: ClassVar[str] = "cpu"

    in_flight_bytes: int | None = None

    def __post_init__(self) -> None:
        value = self.in_flight_bytes
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise ConfigError(
                f"Host.in_flight_bytes: expected a non-negative int or None, got {value!r} · fix: use a number of bytes"
            )

    def byte_store_for(self, device: torch.device, note: Callable[[str], None]) -> ByteStore | None:
        """Returns a byte store for CUDA tensors; for other tensors ``None``, with a note."""
        if device.type == "cuda":
            return HostStore(device, CudaCopyEngine(device, note), self.in_flight_bytes)
        if device.type == "cpu":
            note("offload to 'cpu' does nothing: the tensors are in host memory already")
        else:
            note(f"offload to 'cpu' does nothing: expected CUDA tensors, got tensors on {device}")
        return None


@final
class _HostHandle(ByteHandle):
    __slots__ = ("block", "data", "group_number", "offload_event", "reload_buffer", "reload_event", "reloaded")

    def __init__(self, data: torch.Tensor, block: PinnedBlock | None, group_number: int) -> None:
        super().__init__(data.numel())
        self.block = block
        """Its host memory; ``None`` if it stays on the device."""
        self.group_number = group_number
        self.data: torch.Tensor | None = data
        """The tensor's own memory, held until the compute stream waits for the copy."""
        self.offload_event: CopyEvent | None = None
        self.reload_buffer: torch.Tensor | None = None
        """Memory that the bytes are reloaded into, until they are returned."""
        self.reload_event: CopyEvent | None = None
        self.reloaded: weakref.ref[torch.UntypedStorage] | None = None
        """The storage returned last."""

    @property
    def is_on_device(self) -> bool:
        """Whether the bytes are on the device, or being reloaded."""
        has_storage = self.reloaded is not None and self.reloaded() is not None
        return self.data is not None or self.reload_buffer is not None or has_storage


# Note [Memory is held until a stream wait, not an event query]
# The caching allocator reuses memory as soon as the last reference is gone, in the order of the compute stream. So a
# tensor that a copy still reads is held until the compute stream waits for that copy. The moment is decided by counting
# groups or bytes, never by querying an event: a capture forbids queries, and all steps should use the same memory at
# the same moment. `record_stream` would delay every free to the end of a capture.


class HostStore(ByteStore):
    """Host memory for the tensors of one device. See Note [Memory is held until a stream wait, not an event query].

    Bytes that are still on the device when backward needs them, such as those of the last block, are not reloaded.
    """

    tier: ClassVar[Tier] = "host"

    def __init__(self, device: torch.device, engine: CopyEngine, in_flight_bytes: int | None) -> None:
        self.label = Host.name
        self._device = device
        self._engine = engine
        self._memory = PinnedPool(engine)
        self._max_in_flight_bytes = in_flight_bytes
        self._in_flight_bytes = 0
        self._offloading: dict[_HostHandle, None] = {}
        self._reloading: dict[_HostHandle, None] = {}
        self._borrowed: dict[int, list[_HostHandle]] = {}  # by group: returned before the copy was waited for
        self._num_alive = 0
        self._is_closing = False
        self._waits_at_end = False
        self._lock = threading.RLock()  # the callback at the end of backward runs in another thread
        self._shut = weakref.finalize(self, _shut, engine, self._memory)

    @property
    def host_bytes(self) -> int:
        """Host memory in use."""
        return self._memory.num_bytes

    def put(self, data: torch.Tensor, group: TensorGroup) -> ByteHandle:
        """Starts a copy to the host."""
        with self._lock:
            self._waits_at_end = False
            block = self._memory.put(data.numel(), group.block)
            handle = _HostHandle(data, block, group.number)
            if block is None:
                group.note(_STAYS)
                self._num_alive += 1
                return handle
            try:
                handle.offload_event = self._engine.offload(data, block.flat, group.traffic)
            except BaseException:
                self._memory.free(block)
                raise
            self._num_alive += 1
            self._offloading[handle] = None
            self._in_flight_bytes += handle.num_bytes
            while self._max_in_flight_bytes is not None and self._in_flight_bytes > self._max_in_flight_bytes:
                self._release_source(next(iter(self._offloading)))
            return handle

    def close_group(self, group: TensorGroup) -> None:
        """Releases the sources of the groups before, unless ``in_flight_bytes`` decides when."""
        with self._lock:
            if self._max_in_flight_bytes is None:
                for handle in [other for other in self._offloading if other.group_number != group.number]:
                    self._release_source(handle)

    def prefetch(self, handles: Sequence[ByteHandle], group: TensorGroup) -> None:
        """Starts copies to the device."""
        with self._lock:
            self._wait_at_end_of_backward()
            for handle in handles:
                assert isinstance(handle, _HostHandle)
                if not handle.is_on_device:
                    self._start_reload(handle, group)

    def get(self, handle: ByteHandle, group: TensorGroup) -> torch.Tensor:
        """Makes the compute stream wait for the bytes."""
        assert isinstance(handle, _HostHandle)
        with self._lock:
            self._wait_at_end_of_backward()
            for number in [number for number in self._borrowed if number != group.number]:
                for other in self._borrowed.pop(number):
                    if other in self._offloading:
                        self._release_source(other)
            flat = handle.data
            if flat is None:
                flat = self._finish_reload(handle, group)
            elif handle.offload_event is not None:
                self._borrowed.setdefault(handle.group_number, []).append(handle)
            handle.reloaded = weakref.ref(flat.untyped_storage())
            return flat

    def free(self, handle: ByteHandle) -> None:
        """Frees the host memory, and bytes that were prefetched in vain."""
        assert isinstance(handle, _HostHandle)
        with self._lock:
            if handle in self._offloading:
                self._release_source(handle)
            self._drop_reload(handle)
            if handle.block is not None:
                self._memory.free(handle.block)
            handle.data = None
            self._num_alive -= 1
            if not self._num_alive:
                self._engine.collect_times()
                if self._is_closing:
                    self._shut()

    def begin_step(self) -> None:
        """Resizes the slab, if the last step did not fit."""
        with self._lock:
            self._waits_at_end = False
            self._memory.begin_step()

    def close(self) -> None:
        """Releases the host memory, once nothing in it is stored."""
        with self._lock:
            self._is_closing = True
            if not self._num_alive:
                self._shut()

    def _start_reload(self, handle: _HostHandle, group: TensorGroup) -> None:
        assert handle.block is not None
        buffer = torch.empty(handle.num_bytes, dtype=torch.uint8, device=self._device)
        handle.reload_event = self._engine.reload(handle.block.flat, buffer, group.traffic)
        handle.reload_buffer = buffer
        self._reloading[handle] = None

    def _finish_reload(self, handle: _HostHandle, group: TensorGroup) -> torch.Tensor:
        if handle.reload_event is not None and not self._engine.is_on_current_stream(handle.reload_event):
            self._drop_reload(handle)  # its memory belongs to the other stream, which may reuse it while this one reads
        if handle.reload_buffer is None:
            self._start_reload(handle, group)
        flat = handle.reload_buffer
        assert flat is not None
        self._drop_reload(handle)
        return flat

    def _release_source(self, handle: _HostHandle) -> None:
        """Waits for the copy to the host, so that the compute stream may reuse the tensor's memory."""
        assert handle.offload_event is not None
        self._engine.wait(handle.offload_event)
        handle.data = handle.offload_event = None
        del self._offloading[handle]
        self._in_flight_bytes -= handle.num_bytes

    def _drop_reload(self, handle: _HostHandle) -> None:
        if handle.reload_event is not None:
            self._engine.wait(handle.reload_event)
        self._reloading.pop(handle, None)
        handle.reload_buffer = handle.reload_event = None

    def _wait_at_end_of_backward(self) -> None:
        """Waits for all copies when this backward is over: a capture must not end with a pending one."""
        if self._waits_at_end:
            return
        self._waits_at_end = at_end_of_backward(self._wait_all)
        if not self._waits_at_end:
            self._wait_all()

    def _wait_all(self) -> None:
        with self._lock:
            self._waits_at_end = False
            self._borrowed.clear()
            for handle in list(self._offloading):
                self._release_source(handle)
            for handle in self._reloading:
                assert handle.reload_event is not None
                self._engine.wait(handle.reload_event)  # unused bytes stay: the next backward may need them
            self._engine.collect_times()


def _shut(engine: CopyEngine, memory: PinnedPool) -> None:
    if engine.is_capturing():  # see Note [Nothing is unpinned in a capture] in pinned.py
        postpone(lambda: _shut(engine, memory))
        return
    try:
        engine.synchronize()
        engine.close()
    finally:
        memory.release()
