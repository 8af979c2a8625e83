"""Copies bytes between a device and host memory, asynchronously. It knows no handles and no groups."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import final

import torch

from graphckpt._compat import unseen_by_modes
from graphckpt.stores.base import Traffic
from graphckpt.stores.host.pinned import pin
from graphckpt.stores.streams import streams_of


@final
class HostBuffer:
    """Host memory that asynchronous copies can use.

    Args:
        flat: The bytes, as ``uint8``.
        release: Releases them. Runs once: in ``release``, or when the buffer is garbage-collected. At exit, where
            finalizers run in reverse order, it is left to the store, which waits for the copies first.
    """

    __slots__ = ("__weakref__", "flat", "is_captured", "release")

    def __init__(self, flat: torch.Tensor, release: Callable[[], None]) -> None:
        self.flat = flat
        self.release = weakref.finalize(self, release)
        self.release.atexit = False
        self.is_captured = False
        """A captured graph has its address; see Note [Captured buffers are not released]."""


class CopyEvent:
    """Marks the end of one copy."""

    __slots__ = ()


class CopyEngine(ABC):
    """Asynchronous copies, to host memory and back. Copies of one direction run in order.

    A copy starts when all work submitted to the current compute stream so far is done. Both tensors are flat ``uint8``
    and must stay allocated until :meth:`wait`: the engine holds no references.
    """

    @abstractmethod
    def buffer(self, num_bytes: int) -> HostBuffer:
        """Makes a buffer of exactly ``num_bytes``.

        Raises:
            MemoryError, RuntimeError: The memory cannot be allocated.
        """

    @abstractmethod
    def offload(self, device_flat: torch.Tensor, host_flat: torch.Tensor, traffic: Traffic | None = None) -> CopyEvent:
        """Starts a copy to the host. Its seconds are added to ``traffic`` by :meth:`collect_times`."""

    @abstractmethod
    def reload(self, host_flat: torch.Tensor, device_flat: torch.Tensor, traffic: Traffic | None = None) -> CopyEvent:
        """Starts a copy to the device."""

    @abstractmethod
    def wait(self, event: CopyEvent) -> None:
        """Makes the current compute stream, and the stream the copy started from, wait for it. May be called twice."""

    @abstractmethod
    def is_on_current_stream(self, event: CopyEvent) -> bool:
        """Whether the copy started from the current compute stream."""

    @abstractmethod
    def is_capturing(self) -> bool:
        """Whether the current stream is being captured."""

    @abstractmethod
    def collect_times(self) -> None:
        """Adds up the seconds of copies with ``traffic``, and of waits for them; blocks until those copies are done.

        Does nothing during a capture.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Blocks until all copies are done."""

    def close(self) -> None:  # noqa: B027  # optional
        """Ends threads."""


@final
class _CudaCopyEvent(CopyEvent):
    __slots__ = ("event", "is_captured", "stream", "traffic")

    def __init__(
        self, event: torch.cuda.Event, stream: torch.cuda.Stream, is_captured: bool, traffic: Traffic | None
    ) -> None:
        self.event: torch.cuda.Event | None = event
        self.stream = stream
        self.is_captured = is_captured
        self.traffic = traffic


@final
class _StreamTimer:
    """Two events on one stream."""

    __slots__ = ("_begin", "_end", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._begin, self._end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._begin.record(stream)

    def stop(self) -> None:
        self._end.record(self._stream)

    def seconds(self) -> float:
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1e3


@final
class CudaCopyEngine(CopyEngine):
    """Copies of one CUDA device, on the two streams that it has for them.

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
        """Allocates pinned memory; see ``pin``."""
        with torch.cuda.device(self._device), unseen_by_modes():
            return HostBuffer(*pin(num_bytes, torch.cuda.cudart(), self._clear_error, self._note))

    def offload(self, device_flat: torch.Tensor, host_flat: torch.Tensor, traffic: Traffic | None = None) -> CopyEvent:
        """Copies on the offload stream."""
        return self._issue(self._offload_stream, device_flat, host_flat, traffic)

    def reload(self, host_flat: torch.Tensor, device_flat: torch.Tensor, traffic: Traffic | None = None) -> CopyEvent:
        """Copies on the reload stream."""
        return self._issue(self._reload_stream, host_flat, device_flat, traffic)

    def wait(self, event: CopyEvent) -> None:
        """Makes streams wait; does not block the host."""
        assert isinstance(event, _CudaCopyEvent)
        recorded, event.event = event.event, None
        if recorded is None:
            return
        # A capture cannot wait for an event recorded outside of it, and need not: `torch.cuda.graph` synchronizes the
        # device before it begins. Nor can an eager stream wait for a captured event: that copy has not run.
        if event.is_captured == self.is_capturing():
            current = torch.cuda.current_stream(self._device)
            timer = _StreamTimer(current) if event.traffic is not None else None
            for stream in {event.stream, current}:
                stream.wait_event(recorded)
            if timer is not None and event.traffic is not None:
                timer.stop()
                self._waiting.append((timer, event.traffic))
        self._idle.append(recorded)

    def is_on_current_stream(self, event: CopyEvent) -> bool:
        """Compares streams."""
        assert isinstance(event, _CudaCopyEvent)
        return bool(event.stream == torch.cuda.current_stream(self._device))

    def is_capturing(self) -> bool:
        """Asks CUDA; does not block."""
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

        The copies of a captured step are part of its replay, on the stream that replays: the stream of the capture is
        behind those of graphckpt, and whoever replays a capture made by hand does so on the current stream as a rule.
        """
        current = torch.cuda.current_stream(self._device)
        for stream in (self._offload_stream, self._reload_stream, self._streams.capture, current):
            stream.synchronize()

    def _issue(
        self, stream: torch.cuda.Stream, source: torch.Tensor, target: torch.Tensor, traffic: Traffic | None
    ) -> CopyEvent:
        is_captured = self.is_capturing()
        current = torch.cuda.current_stream(self._device)
        if self._last is not None and current != self._last and not is_captured:
            # This compute stream has not waited for the copies that the last one waited for: host memory that is free
            # for the last stream may still be read. Within one compute stream, the fork below is enough.
            self._offload_stream.wait_stream(self._reload_stream)
            self._reload_stream.wait_stream(self._offload_stream)
        self._last = current
        self._fork.record(current)
        stream.wait_event(self._fork)
        timed = None if is_captured else traffic
        timer = _StreamTimer(stream) if timed is not None else None
        with torch.cuda.stream(stream), unseen_by_modes():
            target.copy_(source, non_blocking=True)
        if timer is not None and timed is not None:
            timer.stop()
            self._copying.append((timer, timed))
        event = self._idle.pop() if self._idle else torch.cuda.Event()
        event.record(stream)
        return _CudaCopyEvent(event, current, is_captured, timed)

    def _clear_error(self) -> None:
        """Clears the error of a failed call, which CUDA would report for the next kernel."""
        try:
            torch.empty(1, dtype=torch.uint8, device=self._device).fill_(0)
        except RuntimeError:
            return
