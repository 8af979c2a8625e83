"""Stands in for a device's copy engines: threads that copy between two parts of host memory."""

from __future__ import annotations

import _thread
import time
import weakref
from collections import deque
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, final

import torch

from graphckpt._compat import unseen_by_modes
from graphckpt.stores import Host
from graphckpt.stores.host.copy_engine import CopyEngine, CopyEvent, HostBuffer
from graphckpt.stores.host.host import HostStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphckpt.stores.base import Traffic
    from graphckpt.stores.byte_store import ByteStore

_POLL_SECONDS = 1e-4
_POISON = 0xA5  # bytes of a target between the moment its copy is issued and the moment it is made


@dataclass(frozen=True)
class FakeHost(Host):
    """Offloads the tensors of any device, and copies through ``copies``."""

    copies: CopyEngine | None = None

    def byte_store_for(self, device: torch.device, note: Callable[[str], None]) -> ByteStore | None:
        assert self.copies is not None
        return HostStore(device, self.copies, self.in_flight_bytes)


@final
class Copy(CopyEvent):
    """One copy. Moments are in seconds, of ``time.perf_counter``; 0 if they have not come."""

    __slots__ = (
        "_source", "_target", "ended_at", "error", "is_done", "issued_at", "joined_at", "number", "started_at",
        "traffic", "what",
    )  # fmt: skip

    def __init__(
        self, what: str, number: int, source: torch.Tensor, target: torch.Tensor, traffic: Traffic | None
    ) -> None:
        self.what = what
        """``"out"`` or ``"back"``."""
        self.number = number
        self.traffic = traffic
        self.issued_at = time.perf_counter()
        self.started_at = self.ended_at = self.joined_at = 0.0
        self.is_done = False
        self.error: str | None = None
        self._source, self._target = _Loose(source), _Loose(target)

    def make(self) -> None:
        """CopyEngine, unless one of the two has been given back."""
        self.started_at = time.perf_counter()
        source = target = None
        try:
            source, target = self._source.hold(), self._target.hold()
            if source is None or target is None:
                gone = "source" if source is None else "target"
                self.error = f"copy {self.what} {self.number}: its {gone} was freed before it was made"
            else:
                target.copy_(source)
        except Exception as error:  # whoever waits for the copy would wait for ever
            self.error = f"copy {self.what} {self.number}: {error}"
        finally:
            del source, target  # whoever joins may look at who holds them
            self.ended_at = time.perf_counter()
            self.is_done = True


@final
class ThreadCopies(CopyEngine):
    """CopyEngine CPU tensors as if they were a device's: in two threads, one for each way, late and in order.

    Like streams, the threads hold no references. A target is filled with garbage when its copy is issued, so that what
    is read without a join is seen.

    Args:
        delay: Returns the seconds to sleep before a copy.
        is_held: Whether copies wait until one of them, or one behind them, is joined: as late as can be.
    """

    def __init__(self, delay: Callable[[], float] | None = None, *, is_held: bool = False) -> None:
        self._settings: tuple[Any, ...] = delay, is_held
        self._lanes = {what: _Lane(delay, is_held) for what in ("out", "back")}
        self._watched: list[Copy] = []
        self.history: deque[Copy] = deque(maxlen=1_000)
        """The last copies, in the order of issue."""
        self.num_buffers = 0
        """Host buffers made so far."""
        self.live_bytes = 0
        """Bytes of those not given back."""
        self._stop = weakref.finalize(self, _stop, tuple(self._lanes.values()))

    def __deepcopy__(self, memo: dict[int, Any]) -> ThreadCopies:
        delay, is_held = self._settings
        return ThreadCopies(delay, is_held=is_held)

    @property
    def faults(self) -> list[str]:
        """Copies that could not be made, among the last ones."""
        return [copy.error for copy in self.history if copy.error is not None]

    def buffer(self, num_bytes: int) -> HostBuffer:
        """Takes plain memory."""
        with unseen_by_modes():
            flat = torch.empty(num_bytes, dtype=torch.uint8)
        self.num_buffers += 1
        self.live_bytes += num_bytes
        own = weakref.ref(self)

        def release() -> None:
            copies = own()
            if copies is not None:
                copies.live_bytes -= num_bytes

        return HostBuffer(flat, release)

    def offload(self, device_flat: torch.Tensor, host_flat: torch.Tensor, traffic: Traffic | None = None) -> CopyEvent:
        """Leaves it to the thread of the way out."""
        return self._issue("out", device_flat, host_flat, traffic)

    def reload(self, host_flat: torch.Tensor, device_flat: torch.Tensor, traffic: Traffic | None = None) -> CopyEvent:
        """Leaves it to the thread of the way back."""
        return self._issue("back", host_flat, device_flat, traffic)

    def wait(self, event: CopyEvent) -> None:
        """Waits until the copy is made."""
        assert isinstance(event, Copy)
        if not event.joined_at:
            self._lanes[event.what].wait(event)
            event.joined_at = time.perf_counter()

    def is_on_current_stream(self, event: CopyEvent) -> bool:
        """There is one compute stream."""
        return True

    def is_capturing(self) -> bool:
        """Nothing captures CPU tensors."""
        return False

    def collect_times(self) -> None:
        """Adds up what the threads have noted."""
        for copy in self._watched:
            self.wait(copy)
            if copy.traffic is not None:
                copy.traffic.copy_seconds += copy.ended_at - copy.started_at
        self._watched.clear()

    def synchronize(self) -> None:
        """Waits for both threads."""
        for lane in self._lanes.values():
            lane.finish()

    def close(self) -> None:
        """Ends the threads; the next copy starts them again."""
        _stop(tuple(self._lanes.values()))

    def _issue(self, what: str, source: torch.Tensor, target: torch.Tensor, traffic: Traffic | None) -> CopyEvent:
        with unseen_by_modes():
            target.fill_(_POISON)
        copy = self._lanes[what].issue(lambda number: Copy(what, number, source, target, traffic))
        self.history.append(copy)
        if traffic is not None:
            self._watched.append(copy)
        return copy


@final
class _Loose:
    """A flat tensor without a reference to its memory."""

    __slots__ = ("_begin", "_end", "_storage")

    def __init__(self, flat: torch.Tensor) -> None:
        self._storage = weakref.ref(flat.untyped_storage())
        self._begin = int(flat.storage_offset())
        self._end = self._begin + flat.numel()

    def hold(self) -> torch.Tensor | None:
        storage = self._storage()
        if storage is None:
            return None
        return torch.empty(0, dtype=torch.uint8).set_(storage)[self._begin : self._end]


@final
class _Lane:
    """A thread that makes copies in order.

    Nothing of ``threading`` is used: an interrupt within ``Thread.start`` or a ``Condition`` may leave a lock locked.
    """

    def __init__(self, delay: Callable[[], float] | None, is_held: bool) -> None:
        self._delay = delay
        self._is_held = is_held
        self._jobs: SimpleQueue[Copy | None] = SimpleQueue()
        self._num_issued = 0
        self._num_allowed = 0
        self._last: Copy | None = None
        self._is_working = _thread.allocate_lock()
        self._worker = 0

    def issue(self, make: Callable[[int], Copy]) -> Copy:
        number = self._num_issued
        self._num_issued = number + 1
        copy = make(number)
        self._jobs.put(copy)
        self._last = copy
        self._start()
        return copy

    def _start(self) -> None:
        """Starts the thread, if there is none: the garbage collector may end it at any moment, with a store."""
        if not self._is_working.locked():
            _thread.start_new_thread(self._work, ())

    def wait(self, copy: Copy) -> None:
        self.allow(copy.number)
        while not copy.is_done:
            self._start()
            time.sleep(_POLL_SECONDS)

    def allow(self, number: int) -> None:
        self._num_allowed = max(self._num_allowed, number + 1)

    def finish(self) -> None:
        if self._last is not None:
            self.wait(self._last)

    def stop(self) -> None:
        self.finish()
        while self._is_working.locked():  # several times: a thread that was started twice may begin only now
            self._jobs.put(None)
            if self._worker == _thread.get_ident():
                return  # the garbage collector may run this on the thread itself
            time.sleep(_POLL_SECONDS)
        while not self._jobs.empty():
            self._jobs.get()

    def _work(self) -> None:
        if not self._is_working.acquire(blocking=False):
            return
        try:
            self._worker = _thread.get_ident()
            while (copy := self._jobs.get()) is not None:
                while self._is_held and copy.number >= self._num_allowed:
                    time.sleep(_POLL_SECONDS)
                if self._delay is not None:
                    time.sleep(self._delay())
                copy.make()
        finally:
            self._is_working.release()


def _stop(lanes: tuple[_Lane, ...]) -> None:
    for lane in lanes:
        lane.stop()
