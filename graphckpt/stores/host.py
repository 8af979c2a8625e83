"""Offloads tensors to pinned host memory and reloads them, overlapping with computation."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, final

import torch

from graphckpt._compat import at_end_of_backward, unseen_by_modes
from graphckpt.errors import ConfigError, StoreError
from graphckpt.stores.base import ByteHandle, ByteStore, Offload, TensorGroup, Tier, Traffic
from graphckpt.stores.pinned import HostBuffer, pinned_buffer, postpone, streams_of
from graphckpt.stores.slab import FreeRanges, aligned
from graphckpt.units import format_bytes

_log = logging.getLogger("graphckpt")
_MAX_VIEWS = 10_000  # slices of the slab to reuse; steps of ever new sizes would hold more and more of them


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
        if device.type == "cuda":
            return HostStore(device, CopyEngine(device, note), self.in_flight_bytes)
        if device.type == "cpu":
            note("offload to 'cpu' has no effect: the tensors are in host memory already")
        else:
            note(f"offload to 'cpu' has no effect: expected CUDA tensors, got tensors on {device}")
        return None


@final
class _HostHandle(ByteHandle):
    __slots__ = ("block", "data", "group_number", "offload_event", "reload_buffer", "reload_event")

    def __init__(self, data: torch.Tensor, block: PinnedBlock | None, group_number: int) -> None:
        super().__init__(data.numel())
        self.block = block
        """Its host memory; ``None`` if it stays on the device."""
        self.group_number = group_number
        self.data: torch.Tensor | None = data
        """The tensor's memory, held until the compute stream waits for the copy."""
        self.offload_event: CopyEvent | None = None
        self.reload_buffer: torch.Tensor | None = None
        """Memory that the bytes are reloaded into, until they are returned."""
        self.reload_event: CopyEvent | None = None

    @property
    def is_on_device(self) -> bool:
        return self.data is not None or self.reload_buffer is not None


# Note [Memory is held until a stream wait, not an event query]
# The caching allocator reuses memory as soon as the last reference is gone, in the order of the compute stream. So a
# tensor that a copy still reads is held until the compute stream waits for that copy. The moment is decided by counting
# groups or bytes, never by querying an event: a capture forbids queries, and all steps should use the same memory at
# the same moment. `record_stream` would delay every free to the end of a capture (pytorch#158352).
#
#     compute    | A       | B       | C       | C back  | B back  | A back
#     offload    |         | a>      | b>      | c>      |         |
#     reload     |         |         |         | <b      | <a      |
#     waits for  |         |      a> |      b> |         | <b c>   | <a
#
# When B ends, the compute stream waits for a>: from then on A's memory may be reused, in the order of that stream. The
# bytes of C are still on the device when backward needs them, and c> is waited for when backward reaches B.


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
        self._borrowed: dict[int, set[_HostHandle]] = {}  # by group: returned before the copy was waited for
        self._num_alive = 0
        self._waits_at_end = False
        self._lock = threading.RLock()  # the callback at the end of backward runs in another thread
        self._shut = weakref.finalize(self, _shut, engine, self._memory)

    @property
    def host_bytes(self) -> int:
        return self._memory.num_bytes

    def put(self, data: torch.Tensor, group: TensorGroup) -> ByteHandle:
        with self._lock:
            # A backward that has raised does not call what it has queued: each forward begins without a pending call.
            self._waits_at_end = False
            block = self._memory.put(data.numel(), group.block)
            handle = _HostHandle(data, block, group.number)
            if block is None:
                group.note(
                    "offload: tensors that exist only in the captured step, such as an attention mask, stay on the "
                    "device (host memory cannot be pinned during a capture)"
                )
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
                self._release_sources([next(iter(self._offloading))])
            return handle

    def close_group(self, group: TensorGroup) -> None:
        """Releases the sources of the groups before, unless ``in_flight_bytes`` decides when."""
        with self._lock:
            if self._max_in_flight_bytes is None:
                self._release_sources([other for other in self._offloading if other.group_number != group.number])

    def prefetch(self, handles: Sequence[ByteHandle], group: TensorGroup) -> None:
        with self._lock:
            self._wait_at_end_of_backward()
            self._start_reloads([h for h in handles if isinstance(h, _HostHandle) and not h.is_on_device], group)

    def get(self, handle: ByteHandle, group: TensorGroup) -> torch.Tensor:
        assert isinstance(handle, _HostHandle)
        with self._lock:
            self._wait_at_end_of_backward()
            # The caller of an earlier group got the tensor's memory, which a copy to the host may still read.
            # Backward is done with that group: once the compute stream has waited for its copies, the memory may go.
            for number in [number for number in self._borrowed if number != group.number]:
                borrowed = self._borrowed.pop(number)
                self._release_sources([other for other in self._offloading if other in borrowed])
            flat = handle.data
            if flat is not None:
                if handle.offload_event is not None:
                    self._borrowed.setdefault(handle.group_number, set()).add(handle)
                return flat
            flat = handle.reload_buffer
            if flat is None or not self._drop_reload(handle):
                # Not prefetched, or into memory of another stream, which may reuse it while this one reads.
                self._start_reloads([handle], group)
                flat = handle.reload_buffer
                self._drop_reload(handle)
            assert flat is not None
            return flat

    def free(self, handle: ByteHandle) -> None:
        assert isinstance(handle, _HostHandle)
        with self._lock:
            # Both waits come before the range is free: the next `put` may get it at once, and a copy that it starts is
            # behind all that the compute stream has waited for, see `CopyEngine._issue`. Freed first, the range could
            # be overwritten while this reload still reads it.
            if handle in self._offloading:
                self._release_sources([handle])
            if handle.reload_event is not None:
                self._drop_reload(handle)
            if handle.block is not None:
                self._memory.free(handle.block)
            handle.data = None
            self._num_alive -= 1
            if not self._num_alive:
                self._engine.collect_times()

    def begin_step(self) -> None:
        with self._lock:
            self._waits_at_end = False
            self._memory.begin_step()

    def close(self) -> None:
        self._shut()

    def _start_reloads(self, handles: Sequence[_HostHandle], group: TensorGroup) -> None:
        if not handles:
            return
        buffers = [torch.empty(handle.num_bytes, dtype=torch.uint8, device=self._device) for handle in handles]
        sources = [handle.block.flat for handle in handles if handle.block is not None]
        events = self._engine.reload(sources, buffers, group.traffic)
        for handle, buffer, event in zip(handles, buffers, events, strict=True):
            handle.reload_buffer, handle.reload_event = buffer, event
            self._reloading[handle] = None

    def _release_sources(self, handles: Sequence[_HostHandle]) -> None:
        """Waits for copies to the host, so that the compute stream may reuse the memory of their tensors."""
        self._engine.wait_in_order([handle.offload_event for handle in handles if handle.offload_event is not None])
        for handle in handles:
            handle.data = handle.offload_event = None
            del self._offloading[handle]
            self._in_flight_bytes -= handle.num_bytes

    def _drop_reload(self, handle: _HostHandle) -> bool:
        """Waits for a copy to the device. Returns whether its memory is that of the current compute stream."""
        assert handle.reload_event is not None
        is_of_stream = self._engine.wait(handle.reload_event)
        self._reloading.pop(handle, None)
        handle.reload_buffer = handle.reload_event = None
        return is_of_stream

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
            self._release_sources(list(self._offloading))
            for handle in self._reloading:
                assert handle.reload_event is not None
                self._engine.wait(handle.reload_event)  # unused bytes stay: the next backward may need them
            self._engine.collect_times()


def _shut(engine: CopyEngine, memory: PinnedPool) -> None:
    if engine.is_capturing():  # see Note [Nothing is unpinned in a capture]
        postpone(lambda: _shut(engine, memory))
        return
    try:
        engine.synchronize()
    finally:
        memory.release()


class PinnedBlock(NamedTuple):
    ranges: FreeRanges
    begin: int
    """Begin of its range, which ends after the slab if it has a separate buffer."""
    flat: torch.Tensor
    buffer: HostBuffer | None
    """A separate buffer, if it is not in the slab."""


# Note [Captured buffers are not released]
# A captured graph copies to the addresses of its capture at every replay. So a buffer that was used in a capture is not
# released before the end, and nothing is pinned in a capture: CUDA forbids that. Eager steps and graphs share the slab:
# a whole step leaves nothing in it, so they may alternate, but a replay must not come between an eager forward and its
# backward.

# Note [Tensors that exist only in a capture stay on the device]
# The slab is exactly as large as the steps before the capture needed. In a capture Transformers makes attention masks
# that those steps did not have, since it may not check there whether they are needed. Such a tensor gets no memory in
# the slab, where it would displace a block that is planned to come later: it stays on the device.


@final
class PinnedPool:
    """The slab, and single buffers for steps that it does not fit.

    The first step takes buffers one by one. By its allocations and frees the second gets one slab of exactly the size
    it needs. What a later step needs beyond that are single buffers again, and the step after it gets a larger slab.
    """

    def __init__(self, engine: CopyEngine) -> None:
        self._engine = engine
        self._ranges = FreeRanges()
        self._wanted_bytes = 0
        self._counts: Counter[int] = Counter()  # allocations of this step, by size
        self._max_counts: Counter[int] = Counter()  # of any step before
        self._slab: HostBuffer | None = None
        self._views: dict[tuple[int, int], torch.Tensor] = {}  # of the slab, by begin and size: most are reused
        self._buffers: list[HostBuffer] = []
        self._spare: dict[int, list[HostBuffer]] = {}  # free single buffers, by size
        self._captured: list[HostBuffer] = []
        self._refused = 0  # size of a slab that could not be allocated

    @property
    def slab_bytes(self) -> int:
        return 0 if self._slab is None else self._slab.flat.numel()

    @property
    def num_bytes(self) -> int:
        return self.slab_bytes + sum(buffer.flat.numel() for buffer in (*self._buffers, *self._captured))

    def put(self, num_bytes: int, block: str) -> PinnedBlock | None:
        """Returns memory for bytes saved by ``block``; ``None`` in a capture for what no earlier step offloaded."""
        is_captured = self._engine.is_capturing()
        if is_captured and self._max_counts and self._counts[num_bytes] >= self._max_counts[num_bytes]:
            return None  # see Note [Tensors that exist only in a capture stay on the device]
        size = aligned(num_bytes)
        begin = self._ranges.allocate(size)
        fits = begin + size <= self.slab_bytes
        # An error or an interrupt returns the range, too.
        memory = None
        try:
            memory = self._slab if fits else self._single_buffer(num_bytes, is_captured, block)
        finally:
            if memory is None:
                self._ranges.free(begin, begin + size)
        if memory is None:
            return None
        self._counts[num_bytes] += 1
        self._wanted_bytes = max(self._wanted_bytes, begin + size)
        memory.is_captured |= is_captured
        if not fits:
            return PinnedBlock(self._ranges, begin, memory.flat, memory)
        flat = self._views.get((begin, num_bytes))
        if flat is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            with unseen_by_modes():
                flat = self._views[begin, num_bytes] = memory.flat[begin : begin + num_bytes]
        return PinnedBlock(self._ranges, begin, flat, None)

    def free(self, used: PinnedBlock) -> None:
        used.ranges.free(used.begin, used.begin + aligned(used.flat.numel()))
        if used.buffer is not None:
            self._spare.setdefault(used.flat.numel(), []).append(used.buffer)

    def begin_step(self) -> None:
        """Allocates the slab, or a larger one, if the last step did not fit. Nothing is in use."""
        self._max_counts |= self._counts
        self._counts.clear()
        self._ranges = FreeRanges()
        if self._engine.is_capturing():
            return  # see Note [Captured buffers are not released]
        # `_wanted_bytes` does not fall, so a slab that was refused is not tried again. Single buffers then serve all
        # steps.
        wanted, old_bytes = self._wanted_bytes, self.slab_bytes
        grows = wanted > old_bytes and not 0 < self._refused <= wanted
        if not grows and (not self._buffers or self._refused):
            return
        # The compute stream has waited for the copies of the last step, but the host has not.
        self._engine.synchronize()
        buffers, self._buffers, self._spare = self._buffers, [], {}
        if grows and self._slab is not None:
            buffers.append(self._slab)
            self._slab, self._views = None, {}
        self._captured += [buffer for buffer in buffers if buffer.is_captured]
        while buffers:  # emptied: what is not captured is freed before the new slab is allocated
            if not buffers[-1].is_captured:
                buffers[-1].release()
            del buffers[-1]
        if not grows:
            return
        try:
            self._slab = self._engine.buffer(wanted)
        except (MemoryError, RuntimeError) as error:
            self._refused = wanted  # single buffers may still fit; if not, `put` names the block
            _log.warning(
                "graphckpt: offload: cannot allocate a slab of %s of host memory: %s", format_bytes(wanted), error
            )
            return
        if old_bytes:
            old, new = format_bytes(old_bytes), format_bytes(wanted)
            _log.info("offload: the slab in host memory grows from %s to %s", old, new)
        else:
            _log.info("offload: a slab of %s in host memory", format_bytes(wanted))

    def release(self) -> None:
        for buffer in (*self._buffers, *self._captured, *([] if self._slab is None else [self._slab])):
            buffer.release()
        self._slab, self._buffers, self._captured, self._spare, self._views = None, [], [], {}, {}
        self._ranges, self._wanted_bytes = FreeRanges(), 0
        self._counts, self._max_counts = Counter(), Counter()

    def _single_buffer(self, num_bytes: int, is_captured: bool, block: str) -> HostBuffer | None:
        if spare := self._spare.get(num_bytes):
            return spare.pop()
        if is_captured:
            if self.num_bytes:
                return None
            raise StoreError(
                f"{block}: offload: expected a step before the capture, as host memory cannot be pinned in one, got "
                "none · fix: run two steps with the same shapes first"
            )
        try:
            buffer = self._engine.buffer(num_bytes)
        except (MemoryError, RuntimeError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise StoreError(
                f"{block}: offload: expected {format_bytes(num_bytes)} of host memory besides the "
                f"{format_bytes(self.num_bytes)} in use, got none ({reason}) "
                "· fix: offload fewer blocks, set activation_checkpointing as well, or offload = 'disk'"
            ) from error
        self._buffers.append(buffer)
        return buffer


@dataclass(eq=False, slots=True)
class CopyEvent:
    event: torch.cuda.Event | None
    """``None`` once it was waited for."""
    stream: torch.cuda.Stream | None
    """The compute stream that the copy started from; ``None`` where the device is absent."""
    is_captured: bool
    traffic: Traffic | None


@final
class _StreamTimer:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._begin, self._end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._begin.record(stream)

    def stop(self) -> None:
        self._end.record(self._stream)

    def seconds(self) -> float:
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1e3


class CopyEngine:
    """Asynchronous copies of one CUDA device, on the two streams that it has for them. It knows no handles, no groups.

    A copy starts when all work submitted to the current compute stream so far is done; copies of one direction run in
    order. Both tensors are flat ``uint8`` and must stay allocated until :meth:`wait`: the engine holds no references.

    Events are recorded and waited for, never queried, and are reused afterwards: all of this is legal in a capture. The
    compute stream is looked up at each use, since it is another one in a capture.
    """

    def __init__(self, device: torch.device, note: Callable[[str], None]) -> None:
        self._device = device
        self._note = note
        self._streams = streams_of(device)
        self._offload_stream, self._reload_stream = self._streams.offload, self._streams.reload
        self._fork = torch.cuda.Event()
        self._idle: list[torch.cuda.Event] = []
        self._copying: list[tuple[_StreamTimer, Traffic]] = []
        self._waiting: list[tuple[_StreamTimer, Traffic]] = []
        self._last: torch.cuda.Stream | None = None

    def buffer(self, num_bytes: int) -> HostBuffer:
        return pinned_buffer(num_bytes, self._device, self._note)

    def offload(self, device_flat: torch.Tensor, host_flat: torch.Tensor, traffic: Traffic | None = None) -> CopyEvent:
        """Starts a copy to the host. Its seconds are added to ``traffic`` by :meth:`collect_times`."""
        return self._issue(self._offload_stream, [device_flat], [host_flat], traffic)[0]

    def reload(
        self, host_flats: Sequence[torch.Tensor], device_flats: Sequence[torch.Tensor], traffic: Traffic | None = None
    ) -> list[CopyEvent]:
        return self._issue(self._reload_stream, host_flats, device_flats, traffic)

    def wait(self, event: CopyEvent) -> bool:
        """Makes the current compute stream, and the one the copy started from, wait for it. May be called twice.

        Returns whether the two are the same.
        """
        current = torch.cuda.current_stream(self._device)
        is_same = bool(event.stream == current)
        recorded, event.event = event.event, None
        if recorded is None:
            return is_same
        # A capture cannot wait for an event recorded outside of it, and need not: `torch.cuda.graph` synchronizes the
        # device before it begins. Nor can an eager stream wait for a captured event: that copy has not run.
        if event.is_captured == self.is_capturing():
            timer = _StreamTimer(current) if event.traffic is not None else None
            current.wait_event(recorded)
            if not is_same and event.stream is not None:
                event.stream.wait_event(recorded)
            if timer is not None and event.traffic is not None:
                timer.stop()
                self._waiting.append((timer, event.traffic))
        self._idle.append(recorded)
        return is_same

    def wait_in_order(self, events: Sequence[CopyEvent]) -> None:
        """Waits for copies of one direction, given in the order of their start: the last wait is one for all."""
        last: CopyEvent | None = None
        for event in reversed(events):
            if last is None or event.stream != last.stream or event.is_captured != last.is_captured:
                last = event
                self.wait(event)
            elif event.event is not None:
                self._idle.append(event.event)
                event.event = None

    def is_capturing(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())

    def collect_times(self) -> None:
        """Blocks until the timing events are done; in a capture, which forbids that, leaves them to the next call."""
        if (self._copying or self._waiting) and self.is_capturing():
            return
        for timer, traffic in self._copying:
            traffic.copy_seconds += timer.seconds()
        for timer, traffic in self._waiting:
            traffic.wait_seconds += timer.seconds()
        self._copying.clear()
        self._waiting.clear()

    def synchronize(self) -> None:
        """Synchronizes the streams that copy.

        The copies of a captured step belong to its replay, on the stream that replays: the stream of the capture is
        behind those of graphckpt, and whoever replays a capture made by hand does so on the current stream as a rule.
        """
        current = torch.cuda.current_stream(self._device)
        for stream in (self._offload_stream, self._reload_stream, self._streams.capture, current):
            stream.synchronize()

    def _issue(
        self,
        stream: torch.cuda.Stream,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        traffic: Traffic | None,
    ) -> list[CopyEvent]:
        is_captured = self.is_capturing()
        current = torch.cuda.current_stream(self._device)
        if current == self._last:
            current = self._last  # one object, as comparing two takes longer
        elif self._last is not None and not is_captured:
            # This compute stream has not waited for the copies that the last one waited for: host memory that is free
            # for the last stream may still be read. Within one compute stream, the fork below is enough.
            self._offload_stream.wait_stream(self._reload_stream)
            self._reload_stream.wait_stream(self._offload_stream)
        self._last = current
        # One event for all copies: `wait_event` waits for what is recorded when it is called, not for later records.
        self._fork.record(current)
        stream.wait_event(self._fork)
        if is_captured:
            traffic = None
        events = []
        try:
            # `torch.cuda.stream` takes 15 us, mostly to look up the current device.
            is_current = torch.cuda.current_device() == self._device.index
            with unseen_by_modes(), _StreamSwitch(stream, current) if is_current else torch.cuda.stream(stream):
                for source, target in zip(sources, targets, strict=True):
                    timer = None if traffic is None else _StreamTimer(stream)
                    target.copy_(source, non_blocking=True)
                    if timer is not None and traffic is not None:
                        timer.stop()
                        self._copying.append((timer, traffic))
                    event = self._idle.pop() if self._idle else torch.cuda.Event()
                    event.record(stream)
                    events.append(CopyEvent(event, current, is_captured, traffic))
        except BaseException:
            current.wait_stream(stream)  # the caller drops the memory of copies that have started
            raise
        return events


@final
class _StreamSwitch:
    def __init__(self, stream: torch.cuda.Stream, back: torch.cuda.Stream) -> None:
        self._stream = stream
        self._back = back

    def __enter__(self) -> None:
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self._back)
