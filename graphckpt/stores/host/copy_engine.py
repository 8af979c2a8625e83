"""Copies bytes between a device and host memory, beside the computation. It knows no tickets and no groups."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, final

import torch

from graphckpt._compat import unseen_by_modes
from graphckpt.stores.host.pinned import pin
from graphckpt.stores.streams import streams_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphckpt.stores.base import Traffic


@final
class HostBuffer:
    """A run of host memory that copies can use while Python goes on.

    Args:
        flat: The bytes, as ``uint8``.
        release: Gives them back. Runs once: in ``release``, when the buffer is garbage, or at exit.
    """

    __slots__ = ("__weakref__", "flat", "is_captured", "release")

    def __init__(self, flat: torch.Tensor, release: Callable[[], None]) -> None:
        self.flat = flat
        self.release = weakref.finalize(self, release)
        self.is_captured = False
        """A captured graph has its address; see Note [What a graph has captured stays]."""


class Mark:
    """The end of one copy."""

    __slots__ = ()


class Copies(ABC):
    """Two lanes of copies, out to host memory and back. Those of one lane run in order, beside the other lane's.

    A copy starts when all has ended that the present compute stream was given before. Both its tensors are flat
    ``uint8`` and stay allocated until it is joined: the lanes hold no references.
    """

    @abstractmethod
    def buffer(self, num_bytes: int) -> HostBuffer:
        """Makes a buffer of exactly ``num_bytes``.

        Raises:
            MemoryError, RuntimeError: There is no such memory.
        """

    @abstractmethod
    def out(self, device_flat: torch.Tensor, host_flat: torch.Tensor, traffic: Traffic | None = None) -> Mark:
        """Copies to the host. ``traffic`` gets the seconds, later."""

    @abstractmethod
    def back(self, host_flat: torch.Tensor, device_flat: torch.Tensor, traffic: Traffic | None = None) -> Mark:
        """Copies to the device."""

    @abstractmethod
    def join(self, mark: Mark) -> None:
        """Lets the present compute stream, and the one that the copy started from, wait for it. Twice is once."""

    @abstractmethod
    def is_home(self, mark: Mark) -> bool:
        """Whether the present compute stream is the one that the copy started from."""

    @abstractmethod
    def is_capturing(self) -> bool:
        """Whether what is given to the device now is recorded into a graph."""

    @abstractmethod
    def read_clocks(self) -> None:
        """Hands out the seconds that watched copies took, and were waited for; waits for those, and only for those."""

    @abstractmethod
    def finish(self) -> None:
        """Waits until all copies have ended."""

    def close(self) -> None:  # noqa: B027  # most have nothing to do
        """Gives back threads."""


@final
class _Event(Mark):
    __slots__ = ("event", "is_captured", "stream", "traffic")

    def __init__(
        self, event: torch.cuda.Event, stream: torch.cuda.Stream, is_captured: bool, traffic: Traffic | None
    ) -> None:
        self.event: torch.cuda.Event | None = event
        self.stream = stream
        self.is_captured = is_captured
        self.traffic = traffic


@final
class _Clock:
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
class CudaCopies(Copies):
    """Copies of one CUDA device, on the two streams that it has for them.

    Events are recorded and waited for, never asked, and are used again once joined: all of it is legal in a capture.
    The compute stream is looked up at each use, since in a capture it is another one.
    """

    def __init__(self, device: torch.device, note: Callable[[str], None]) -> None:
        self._device = device
        self._note = note
        _, self._out, self._back = streams_of(device)
        self._fork = torch.cuda.Event()
        self._idle: list[torch.cuda.Event] = []
        self._copying: list[tuple[_Clock, Traffic]] = []
        self._waiting: list[tuple[_Clock, Traffic]] = []
        self._last: torch.cuda.Stream | None = None

    def buffer(self, num_bytes: int) -> HostBuffer:
        """Pins memory; see ``pin``."""
        with torch.cuda.device(self._device), unseen_by_modes():
            return HostBuffer(*pin(num_bytes, torch.cuda.cudart(), self._clear_error, self._note))

    def out(self, device_flat: torch.Tensor, host_flat: torch.Tensor, traffic: Traffic | None = None) -> Mark:
        """Copies on the stream of the way out."""
        return self._issue(self._out, device_flat, host_flat, traffic)

    def back(self, host_flat: torch.Tensor, device_flat: torch.Tensor, traffic: Traffic | None = None) -> Mark:
        """Copies on the stream of the way back."""
        return self._issue(self._back, host_flat, device_flat, traffic)

    def join(self, mark: Mark) -> None:
        """Waits on the device; Python goes on."""
        assert isinstance(mark, _Event)
        event, mark.event = mark.event, None
        if event is None:
            return
        # A capture can wait for no event from outside of it, and need not: `torch.cuda.graph` waits for the whole
        # device before it begins. Nor can an eager stream wait for a captured event: that copy has not run at all.
        if mark.is_captured == self.is_capturing():
            current = torch.cuda.current_stream(self._device)
            clock = _Clock(current) if mark.traffic is not None else None
            for stream in {mark.stream, current}:
                stream.wait_event(event)
            if clock is not None and mark.traffic is not None:
                clock.stop()
                self._waiting.append((clock, mark.traffic))
        self._idle.append(event)

    def is_home(self, mark: Mark) -> bool:
        """Compares streams."""
        assert isinstance(mark, _Event)
        return bool(mark.stream == torch.cuda.current_stream(self._device))

    def is_capturing(self) -> bool:
        """Asks CUDA; costs no wait."""
        return bool(torch.cuda.is_current_stream_capturing())

    def read_clocks(self) -> None:
        """Waits for the events behind watched copies."""
        for clock, traffic in self._copying:
            traffic.copy_seconds += clock.seconds()
        for clock, traffic in self._waiting:
            traffic.wait_seconds += clock.seconds()
        self._copying.clear()
        self._waiting.clear()

    def finish(self) -> None:
        """Waits for both streams."""
        self._out.synchronize()
        self._back.synchronize()

    def _issue(
        self, stream: torch.cuda.Stream, source: torch.Tensor, target: torch.Tensor, traffic: Traffic | None
    ) -> Mark:
        is_captured = self.is_capturing()
        current = torch.cuda.current_stream(self._device)
        if self._last is not None and current != self._last and not is_captured:
            # Another compute stream has not waited for what the last one has: a place in host memory that was free
            # for the last may still be read from. Within one compute stream the fork below says it all.
            self._out.wait_stream(self._back)
            self._back.wait_stream(self._out)
        self._last = current
        self._fork.record(current)
        stream.wait_event(self._fork)
        watched = None if is_captured else traffic
        clock = _Clock(stream) if watched is not None else None
        with torch.cuda.stream(stream), unseen_by_modes():
            target.copy_(source, non_blocking=True)
        if clock is not None and watched is not None:
            clock.stop()
            self._copying.append((clock, watched))
        event = self._idle.pop() if self._idle else torch.cuda.Event()
        event.record(stream)
        return _Event(event, current, is_captured, watched)

    def _clear_error(self) -> None:
        """Takes the error of a failed call off CUDA's record, which the next kernel would be blamed for."""
        try:
            torch.empty(1, dtype=torch.uint8, device=self._device).fill_(0)
        except RuntimeError:
            return
