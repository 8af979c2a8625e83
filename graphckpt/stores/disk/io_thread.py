r"""The thread that writes and reads one file, and the queues between it and the step.

::

    put --> unwritten (held in memory, bounded) --> written --> requested --> loaded (read ahead, bounded) --> get
                 \______________ requested before it is written: no read is needed ______________________/^

Note [One thread, so ranges can be reused at once]: all writes and reads of a file are done by one thread, in order. A
freed range may be assigned to the next ``put`` while the thread is still busy with the old bytes: it starts on the new
ones only after that.
"""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import closing, suppress
from time import perf_counter
from typing import TYPE_CHECKING, final

from graphckpt.errors import StoreError
from graphckpt.stores.disk.extents import Extents
from graphckpt.stores.disk.file import failure_message
from graphckpt.stores.disk.handle import DiskHandle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from graphckpt.stores.base import TensorGroup
    from graphckpt.stores.disk.transfer import Transfer

_POLL = 1.0  # seconds after which a waiting thread checks that the I/O thread is alive
_PATIENCE = 10.0  # seconds that a stop waits for the thread: a hanging disk must not hang the program


@final
class IoThread:
    """Writes and reads in its own thread, until it fails or is stopped.

    Args:
        transfer: Copies the bytes. It is closed with its file.
        in_flight_bytes: Bound on the bytes held because they are not written yet, and a second bound of the same size
            on the bytes that were read and not returned yet. A larger tensor is handled alone.

    Raises:
        StoreError: From all methods but ``free`` and ``stop``, once the thread has failed. The file is closed then.
    """

    def __init__(self, transfer: Transfer, in_flight_bytes: int) -> None:
        self.failure: str | None = None
        self.pid = os.getpid()
        self._transfer = transfer
        self._bound = in_flight_bytes
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # the I/O thread waits for it; see Note [Waits of a step]
        self._progress = threading.Lock()
        self._progress.acquire()
        self._is_in_method = False
        self._is_stopped = False
        self._extents = Extents()
        self._alive: set[DiskHandle] = set()
        self._writes: dict[DiskHandle, None] = {}  # dicts as queues: handles are also removed from the middle
        self._reads: dict[DiskHandle, None] = {}
        self._urgent: DiskHandle | None = None
        self._unwritten_bytes = 0
        self._loaded_bytes = 0  # including those being read
        self._thread = threading.Thread(target=self._work, name="graphckpt disk", daemon=True)

    # ---- called by the step's threads

    # Note [Waits of a step]: a KeyboardInterrupt may end any method here at any instruction. Locks are acquired and
    # released in C code alone, as those of `threading.Condition` are not, so that none stays locked; `is_disturbed`
    # reports a method that was ended halfway, and a new thread replaces this one.

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def is_disturbed(self) -> bool:
        """Whether an exception has ended a method called by the step's threads, or the thread is not running."""
        return self._is_in_method or bool(self._alive) or not self._thread.is_alive()

    def put(self, data: torch.Tensor, group: TensorGroup) -> DiskHandle:
        """Queues a write; blocks while the bound is exceeded."""
        num_bytes = data.numel()
        ready = self._transfer.mark()
        with self._lock:
            self._is_in_method = True
            self._wait(lambda: self._fits(self._unwritten_bytes, num_bytes), group)
            handle = DiskHandle(self, data, group, self._extents.allocate(num_bytes), ready)
            self._alive.add(handle)
            self._writes[handle] = None
            self._unwritten_bytes += num_bytes
            self._changed.notify_all()
            self._is_in_method = False
            return handle

    def prefetch(self, handles: Sequence[DiskHandle]) -> None:
        """Queues reads of bytes that are not in memory and not queued."""
        with self._lock:
            self._is_in_method = True
            for handle in handles:
                if handle.borrowed() is None:
                    self._request(handle)
            self._is_in_method = False

    def get(self, handle: DiskHandle, group: TensorGroup) -> torch.Tensor:
        """Returns the bytes; blocks until they are read."""
        with self._lock:
            self._is_in_method = True
            flat = handle.data
            if flat is None:
                self._request(handle)
                self._urgent = handle
                self._changed.notify_all()
                try:
                    self._wait(lambda: handle.loaded is not None, group)
                finally:
                    self._urgent = None
                flat, handle.loaded = handle.loaded, None
                assert flat is not None
                self._loaded_bytes -= handle.num_bytes
                self._changed.notify_all()
            handle.is_requested = False
            handle.borrowed = weakref.ref(flat.untyped_storage())
            self._is_in_method = False
            return flat

    def free(self, handle: DiskHandle) -> None:
        """Frees the range, and removes what is queued for it."""
        with self._lock:
            if self.failure is not None or handle not in self._alive:
                return
            was_in_method, self._is_in_method = (
                self._is_in_method,
                True,
            )  # garbage collection within another method frees
            self._alive.remove(handle)
            self._extents.free(handle.offset, handle.num_bytes)  # Note [One thread, so ranges can be reused at once]
            if handle in self._writes:
                del self._writes[handle]
                self._unwritten_bytes -= handle.num_bytes
            self._reads.pop(handle, None)
            if handle.loaded is not None:
                self._loaded_bytes -= handle.num_bytes
            handle.drop()
            self._changed.notify_all()
            self._is_in_method = was_in_method

    def stop(self) -> None:
        """Ends the thread, which closes the file. Does not raise."""
        if self.pid != os.getpid():  # a forked child has no such thread, and the lock may never be released
            self._transfer.file.close()
            return
        folder = self._transfer.file.folder
        self._fail(
            f"offload: the file in {folder} was closed before its bytes were read · fix: run backward before closing"
        )
        if self._thread.ident is None:  # it was never started
            self._transfer.close()
            self._transfer.file.close()
        elif threading.current_thread() is not self._thread:  # the garbage collector runs in any thread
            self._thread.join(_PATIENCE)
            if not self._thread.is_alive():
                self._transfer.file.close()  # again, in case the thread did not get to it

    # ---- with the lock held

    def _request(self, handle: DiskHandle) -> None:
        if handle.is_requested or handle.is_freed:
            return
        handle.is_requested = True
        if handle.data is None:
            handle.target, handle.stream = self._transfer.target(handle.num_bytes)
            handle.ready = self._transfer.mark()
            self._reads[handle] = None
            self._changed.notify_all()
        elif self._writes.pop(handle, self) is None:
            self._writes[handle] = None  # last, as it is likely to be freed before it is written

    def _wait(self, is_so: Callable[[], bool], group: TensorGroup) -> None:
        while self.failure is None and not is_so():
            try:
                self._lock.release()
                self._progress.acquire(timeout=_POLL)
            finally:
                self._lock.acquire()
            if self.failure is None and not self._thread.is_alive():
                self._fail(
                    failure_message(group.block, "move", 0, self._transfer.file.folder, "the I/O thread has died")
                )
        if self.failure is not None:
            raise StoreError(self.failure)

    def _fits(self, held_bytes: int, num_bytes: int) -> bool:
        return not held_bytes or held_bytes + num_bytes <= self._bound

    def _next_read(self) -> DiskHandle | None:
        if self._urgent is not None and self._urgent in self._reads:
            return self._urgent
        first = next(iter(self._reads), None)
        return first if first is not None and self._fits(self._loaded_bytes, first.num_bytes) else None

    # ---- called by the thread

    def _work(self) -> None:
        doing, handle = "start with", None
        try:
            while not self._is_stopped:
                doing, handle = self._next_job()
                if handle is not None:
                    (self._read if doing == "read" else self._write)(handle)
                    self._transfer.count(handle.num_bytes)
                handle = None  # no reference is held while idle
        except BaseException as error:  # of any kind: no other thread may wait for this one any more
            block, num_bytes = (handle.block, handle.num_bytes) if handle is not None else ("", 0)
            self._fail(failure_message(block, doing, num_bytes, self._transfer.file.folder, error))
        finally:
            with suppress(Exception):
                self._transfer.close()
            self._transfer.file.close()

    def _next_job(self) -> tuple[str, DiskHandle | None]:
        with self._changed:
            while not self._is_stopped:
                handle = self._next_read()
                if handle is not None:
                    del self._reads[handle]
                    self._loaded_bytes += handle.num_bytes
                    return "read", handle
                handle = next(iter(self._writes), None)
                if handle is not None:
                    del self._writes[handle]
                    return "write", handle
                self._changed.wait()
        return "stop", None

    def _write(self, handle: DiskHandle) -> None:
        started = perf_counter()
        data = handle.data
        if data is not None:
            with closing(self._transfer.save(data, handle.offset, handle.ready)) as chunks:
                for _ in chunks:
                    if handle.is_freed or self._is_stopped:
                        break
        del data
        with self._changed:
            self._unwritten_bytes -= handle.num_bytes
            if handle.is_requested:
                handle.loaded = handle.data
                self._loaded_bytes += handle.num_bytes
            handle.data = handle.ready = None
            self._count(handle, started)

    def _read(self, handle: DiskHandle) -> None:
        started = perf_counter()
        flat = None
        with closing(self._transfer.load(handle.num_bytes, handle.offset, handle.target, handle.ready)) as parts:
            for flat in parts:  # noqa: B007 - the tensor is the same each time
                if handle.is_freed or self._is_stopped:
                    break
        with self._changed:
            if handle.is_freed:
                self._loaded_bytes -= handle.num_bytes
            else:
                handle.loaded = flat
            handle.target = handle.ready = None
            self._count(handle, started)

    def _count(self, handle: DiskHandle, started: float) -> None:
        if handle.traffic is not None:
            handle.traffic.copy_seconds += perf_counter() - started
        self._wake_step()

    def _wake_step(self) -> None:
        """Wakes a method that waits for the thread."""
        with suppress(RuntimeError):  # it is awake already
            self._progress.release()

    def _fail(self, text: str) -> None:
        with self._lock:
            self._is_stopped = True
            self.failure = self.failure or text
            self._writes.clear()
            self._reads.clear()
            while self._alive:
                self._alive.pop().drop()
            self._changed.notify_all()
            self._wake_step()
