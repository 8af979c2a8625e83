r"""One file, the thread that writes and reads it, and the queues between that thread and the step.

::

    put --> unwritten (held in memory, bounded) --> written --> asked for --> landed (read ahead, bounded) --> take
                 \________________ asked for or taken: no read is needed _______________________________/^

Note [One thread, so ranges can be reused at once]: all writes and reads of a file are done by one thread, in turn. A
range that is given back may go to the next ``put`` while the thread is still busy with the old bytes: it begins with
the new ones only after that.
"""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import closing, suppress
from time import perf_counter
from typing import TYPE_CHECKING, final

from graphckpt.errors import StoreError
from graphckpt.stores.disk.extents import Regions
from graphckpt.stores.disk.file import what_failed
from graphckpt.stores.disk.handle import DiskTicket

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from graphckpt.stores.base import Group
    from graphckpt.stores.disk.transfer import Lane

_POLL = 1.0  # seconds after which a waiting thread looks whether there is still somebody to wait for
_PATIENCE = 10.0  # seconds that a stop waits for the thread: a disk that hangs must not hang the program


@final
class Spool:
    """Writes what is put, and reads what is asked for, in a thread of its own, until it fails or is stopped.

    Args:
        lane: Carries the bytes. The spool closes it, and its file.
        in_flight_bytes: Bound on bytes that are held because they are not written yet, and, apart from that, on bytes
            that have been read and not taken. One piece that is bigger passes alone.

    Raises:
        StoreError: From all but ``free`` and ``stop``, once the thread has failed. The file is closed then.
    """

    def __init__(self, lane: Lane, in_flight_bytes: int) -> None:
        self.failure: str | None = None
        self.pid = os.getpid()
        self._lane = lane
        self._bound = in_flight_bytes
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # for the thread to wait for; see Note [Waits of a step]
        self._moved = threading.Lock()
        self._moved.acquire()
        self._is_within = False
        self._is_stopped = False
        self._regions = Regions()
        self._alive: set[DiskTicket] = set()
        self._writes: dict[DiskTicket, None] = {}  # dicts as queues: tickets also leave from the middle
        self._reads: dict[DiskTicket, None] = {}
        self._urgent: DiskTicket | None = None
        self._unwritten_bytes = 0
        self._landed_bytes = 0  # and those being read
        self._thread = threading.Thread(target=self._work, name="graphckpt disk", daemon=True)

    # ---- for the step's threads

    # Note [Waits of a step]: a KeyboardInterrupt may end any method here at any instruction. Locks are taken and given
    # back by C code alone, as `threading.Condition` is not, so that none stays locked; and what such a method leaves
    # half done, `is_disturbed` tells, after which a new spool takes the place of this one.

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def is_disturbed(self) -> bool:
        """Returns whether an exception has ended one of the methods for the step's threads, or nothing has started."""
        return self._is_within or bool(self._alive) or not self._thread.is_alive()

    def put(self, data: torch.Tensor, group: Group) -> DiskTicket:
        """Queues a write, after a wait until there is room within the bound."""
        num_bytes = data.numel()
        ready = self._lane.mark()
        with self._lock:
            self._is_within = True
            self._wait(lambda: self._fits(self._unwritten_bytes, num_bytes), group)
            ticket = DiskTicket(self, data, group, self._regions.take(num_bytes), ready)
            self._alive.add(ticket)
            self._writes[ticket] = None
            self._unwritten_bytes += num_bytes
            self._changed.notify_all()
            self._is_within = False
            return ticket

    def begin(self, tickets: Sequence[DiskTicket]) -> None:
        """Queues reads of what is not in memory and not queued."""
        with self._lock:
            self._is_within = True
            for ticket in tickets:
                if ticket.lent() is None:
                    self._want(ticket)
            self._is_within = False

    def take(self, ticket: DiskTicket, group: Group) -> torch.Tensor:
        """Returns the bytes, after a wait until they are here."""
        with self._lock:
            self._is_within = True
            flat = ticket.data
            if flat is None:
                self._want(ticket)
                self._urgent = ticket
                self._changed.notify_all()
                try:
                    self._wait(lambda: ticket.landed is not None, group)
                finally:
                    self._urgent = None
                flat, ticket.landed = ticket.landed, None
                assert flat is not None
                self._landed_bytes -= ticket.num_bytes
                self._changed.notify_all()
            ticket.is_wanted = False
            ticket.lent = weakref.ref(flat.untyped_storage())
            self._is_within = False
            return flat

    def free(self, ticket: DiskTicket) -> None:
        """Gives the range back, and forgets what is queued for it."""
        with self._lock:
            if self.failure is not None or ticket not in self._alive:
                return
            was_within, self._is_within = self._is_within, True  # a collection of garbage within another method frees
            self._alive.remove(ticket)
            self._regions.give_back(
                ticket.offset, ticket.num_bytes
            )  # Note [One thread, so ranges can be reused at once]
            if ticket in self._writes:
                del self._writes[ticket]
                self._unwritten_bytes -= ticket.num_bytes
            self._reads.pop(ticket, None)
            if ticket.landed is not None:
                self._landed_bytes -= ticket.num_bytes
            ticket.let_go()
            self._changed.notify_all()
            self._is_within = was_within

    def stop(self) -> None:
        """Ends the thread, which closes the file. Does not raise."""
        if self.pid != os.getpid():  # a forked child has no such thread, and the lock may be held for ever
            self._lane.file.close()
            return
        folder = self._lane.file.folder
        self._fail(f"offload: the file in {folder} is closed, and its bytes are gone · fix: run backward before that")
        if self._thread.ident is None:  # it has never started
            self._lane.close()
            self._lane.file.close()
        elif threading.current_thread() is not self._thread:  # the collector of garbage runs in any thread
            self._thread.join(_PATIENCE)
            if not self._thread.is_alive():
                self._lane.file.close()  # again, in case that the thread did not come to it

    # ---- with the lock held

    def _want(self, ticket: DiskTicket) -> None:
        if ticket.is_wanted or ticket.is_freed:
            return
        ticket.is_wanted = True
        if ticket.data is None:
            ticket.target, ticket.stream = self._lane.target(ticket.num_bytes)
            ticket.ready = self._lane.mark()
            self._reads[ticket] = None
            self._changed.notify_all()
        elif self._writes.pop(ticket, self) is None:
            self._writes[ticket] = None  # last, as it is likely to be freed before its turn comes

    def _wait(self, is_so: Callable[[], bool], group: Group) -> None:
        while self.failure is None and not is_so():
            try:
                self._lock.release()
                self._moved.acquire(timeout=_POLL)
            finally:
                self._lock.acquire()
            if self.failure is None and not self._thread.is_alive():
                self._fail(what_failed(group.block, "move", 0, self._lane.file.folder, "its thread has died"))
        if self.failure is not None:
            raise StoreError(self.failure)

    def _fits(self, held_bytes: int, num_bytes: int) -> bool:
        return not held_bytes or held_bytes + num_bytes <= self._bound

    def _next_read(self) -> DiskTicket | None:
        if self._urgent is not None and self._urgent in self._reads:
            return self._urgent
        first = next(iter(self._reads), None)
        return first if first is not None and self._fits(self._landed_bytes, first.num_bytes) else None

    # ---- for the thread

    def _work(self) -> None:
        doing, ticket = "begin with", None
        try:
            while not self._is_stopped:
                doing, ticket = self._next_job()
                if ticket is not None:
                    (self._read if doing == "read" else self._write)(ticket)
                    self._lane.passed(ticket.num_bytes)
                ticket = None  # nothing is held while there is nothing to do
        except BaseException as error:  # whatever it is: nobody may wait for this thread any more
            block, num_bytes = (ticket.block, ticket.num_bytes) if ticket is not None else ("", 0)
            self._fail(what_failed(block, doing, num_bytes, self._lane.file.folder, error))
        finally:
            with suppress(Exception):
                self._lane.close()
            self._lane.file.close()

    def _next_job(self) -> tuple[str, DiskTicket | None]:
        with self._changed:
            while not self._is_stopped:
                ticket = self._next_read()
                if ticket is not None:
                    del self._reads[ticket]
                    self._landed_bytes += ticket.num_bytes
                    return "read", ticket
                ticket = next(iter(self._writes), None)
                if ticket is not None:
                    del self._writes[ticket]
                    return "write", ticket
                self._changed.wait()
        return "stop", None

    def _write(self, ticket: DiskTicket) -> None:
        started = perf_counter()
        data = ticket.data
        if data is not None:
            with closing(self._lane.save(data, ticket.offset, ticket.ready)) as chunks:
                for _ in chunks:
                    if ticket.is_freed or self._is_stopped:
                        break
        del data
        with self._changed:
            self._unwritten_bytes -= ticket.num_bytes
            if ticket.is_wanted:
                ticket.landed = ticket.data
                self._landed_bytes += ticket.num_bytes
            ticket.data = ticket.ready = None
            self._count(ticket, started)

    def _read(self, ticket: DiskTicket) -> None:
        started = perf_counter()
        flat = None
        with closing(self._lane.load(ticket.num_bytes, ticket.offset, ticket.target, ticket.ready)) as parts:
            for flat in parts:  # noqa: B007 - the tensor is the same each time
                if ticket.is_freed or self._is_stopped:
                    break
        with self._changed:
            if ticket.is_freed:
                self._landed_bytes -= ticket.num_bytes
            else:
                ticket.landed = flat
            ticket.target = ticket.ready = None
            self._count(ticket, started)

    def _count(self, ticket: DiskTicket, started: float) -> None:
        if ticket.traffic is not None:
            ticket.traffic.copy_seconds += perf_counter() - started
        self._tell_step()

    def _tell_step(self) -> None:
        """Wakes a method that waits for the thread."""
        with suppress(RuntimeError):  # it is told already
            self._moved.release()

    def _fail(self, text: str) -> None:
        with self._lock:
            self._is_stopped = True
            self.failure = self.failure or text
            self._writes.clear()
            self._reads.clear()
            while self._alive:
                self._alive.pop().let_go()
            self._changed.notify_all()
            self._tell_step()
