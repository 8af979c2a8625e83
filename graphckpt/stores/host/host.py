"""Moves tensors to pinned host memory and back, beside the computation."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import torch

from graphckpt._compat import at_end_of_backward
from graphckpt.errors import ConfigError
from graphckpt.stores.byte_store import Place, Ticket
from graphckpt.stores.host.copy_engine import Copies, CudaCopies, Mark
from graphckpt.stores.host.pinned_pool import HostMemory, Spot
from graphckpt.stores.offload import Offload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from graphckpt.stores.base import Group


_STAYS = (
    "offload: tensors that exist only in the captured step, such as an attention mask, stay on the device (host memory "
    "cannot be pinned in a capture)"
)


@dataclass(frozen=True)
class Host(Offload):
    """Host memory.

    Args:
        in_flight_bytes: Device memory that may wait for its copy to end. ``None``: what one block keeps, so that a
            block's copies run while the next block computes.

    Raises:
        ConfigError: ``in_flight_bytes`` is no number of bytes.
    """

    name: ClassVar[str] = "cpu"

    in_flight_bytes: int | None = None

    def __post_init__(self) -> None:
        value = self.in_flight_bytes
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise ConfigError(f"in_flight_bytes {value!r}: is no number of bytes · fix: use an int from 0 up, or None")

    def place_for(self, device: torch.device, note: Callable[[str], None]) -> Place | None:
        """Returns a place for CUDA tensors."""
        if device.type == "cuda":
            return HostPlace(device, CudaCopies(device, note), self.in_flight_bytes)
        if device.type == "cpu":
            note("offload to 'cpu' does nothing: its tensors live in host memory already")
        else:
            note(f"offload to 'cpu' does nothing: it is built for CUDA, and these tensors are on {device}")
        return None


@final
class _Moved(Ticket):
    __slots__ = ("coming", "data", "going", "group_number", "landed", "landing", "spot")

    def __init__(self, data: torch.Tensor, spot: Spot | None, group_number: int) -> None:
        super().__init__(data.numel())
        self.spot = spot
        """Its room in host memory; ``None`` if it stays on the device."""
        self.group_number = group_number
        self.data: torch.Tensor | None = data
        """The tensor's own memory, held until the copy out of it is joined."""
        self.going: Mark | None = None
        self.landing: torch.Tensor | None = None
        """Where the bytes come back to, until somebody takes them."""
        self.coming: Mark | None = None
        self.landed: weakref.ref[torch.UntypedStorage] | None = None
        """Where they came back to."""

    @property
    def is_here(self) -> bool:
        """Whether the bytes are on the device, or on their way to it."""
        return (
            self.data is not None or self.landing is not None or (self.landed is not None and self.landed() is not None)
        )


# Note [Memory waits for a join, not for a query]
# The caching allocator gives memory to the next tensor as soon as the last reference is gone, in the order of the
# compute stream. So a tensor that a copy still reads is held until the compute stream has been told to wait for that
# copy. When, is decided by counting groups or bytes, never by asking an event: in a capture one may not ask, and all
# steps are to use the same memory at the same moment. `record_stream` would put off every free to the end of a capture.


class HostPlace(Place):
    """Host memory for the tensors of one device. See Note [Memory waits for a join, not for a query].

    Bytes that are still on the device when backward wants them, as those of the last block are, are not brought back:
    they are there.
    """

    where: ClassVar[str] = "host"

    def __init__(self, device: torch.device, copies: Copies, in_flight_bytes: int | None) -> None:
        self.label = Host.name
        self._device = device
        self._copies = copies
        self._memory = HostMemory(copies)
        self._most_bytes_going = in_flight_bytes
        self._bytes_going = 0
        self._going: dict[_Moved, None] = {}
        self._coming: dict[_Moved, None] = {}
        self._lent: dict[int, list[_Moved]] = {}  # by group, what backward has taken before its copy out was joined
        self._num_alive = 0
        self._is_closing = False
        self._is_backward_watched = False
        self._lock = threading.RLock()  # the end of backward calls from a thread of its own
        self._shut = weakref.finalize(self, _shut, copies, self._memory)

    @property
    def host_bytes(self) -> int:
        """Host memory that is held."""
        return self._memory.num_bytes

    def put(self, data: torch.Tensor, group: Group) -> Ticket:
        """Sends the bytes off."""
        with self._lock:
            self._is_backward_watched = False
            spot = self._memory.put(data.numel(), group.block)
            ticket = _Moved(data, spot, group.number)
            if spot is None:
                group.note(_STAYS)
                self._num_alive += 1
                return ticket
            try:
                ticket.going = self._copies.out(data, spot.flat, group.traffic)
            except BaseException:
                self._memory.free(spot)
                raise
            self._num_alive += 1
            self._going[ticket] = None
            self._bytes_going += ticket.num_bytes
            while self._most_bytes_going is not None and self._bytes_going > self._most_bytes_going:
                self._let_go(next(iter(self._going)))
            return ticket

    def seal(self, group: Group) -> None:
        """Lets go of the groups before, unless a number of bytes says when."""
        with self._lock:
            if self._most_bytes_going is None:
                for ticket in [other for other in self._going if other.group_number != group.number]:
                    self._let_go(ticket)

    def begin(self, tickets: Sequence[Ticket], group: Group) -> None:
        """Sends for the bytes."""
        with self._lock:
            self._watch_backward()
            for ticket in tickets:
                assert isinstance(ticket, _Moved)
                if not ticket.is_here:
                    self._send_for(ticket, group)

    def take(self, ticket: Ticket, group: Group) -> torch.Tensor:
        """Lets the compute stream wait for the bytes."""
        assert isinstance(ticket, _Moved)
        with self._lock:
            self._watch_backward()
            for number in [number for number in self._lent if number != group.number]:
                for other in self._lent.pop(number):
                    if other in self._going:
                        self._let_go(other)
            flat = ticket.data
            if flat is None:
                flat = self._land(ticket, group)
            elif ticket.going is not None:
                self._lent.setdefault(ticket.group_number, []).append(ticket)
            ticket.landed = weakref.ref(flat.untyped_storage())
            return flat

    def free(self, ticket: Ticket) -> None:
        """Gives the room in host memory back, and what came back unasked."""
        assert isinstance(ticket, _Moved)
        with self._lock:
            if ticket in self._going:
                self._let_go(ticket)
            self._drop_landing(ticket)
            if ticket.spot is not None:
                self._memory.free(ticket.spot)
            ticket.data = None
            self._num_alive -= 1
            if not self._num_alive:
                self._copies.read_clocks()
                if self._is_closing:
                    self._shut()

    def begin_step(self) -> None:
        """Sizes the slab, if the last step did not find room in it."""
        with self._lock:
            self._is_backward_watched = False
            self._memory.begin_step()

    def close(self) -> None:
        """Gives the host memory back, once nothing in it is kept."""
        with self._lock:
            self._is_closing = True
            if not self._num_alive:
                self._shut()

    def _send_for(self, ticket: _Moved, group: Group) -> None:
        assert ticket.spot is not None
        landing = torch.empty(ticket.num_bytes, dtype=torch.uint8, device=self._device)
        ticket.coming = self._copies.back(ticket.spot.flat, landing, group.traffic)
        ticket.landing = landing
        self._coming[ticket] = None

    def _land(self, ticket: _Moved, group: Group) -> torch.Tensor:
        if ticket.coming is not None and not self._copies.is_home(ticket.coming):
            self._drop_landing(ticket)  # its memory is the other stream's, which may use it again while this one reads
        if ticket.landing is None:
            self._send_for(ticket, group)
        flat = ticket.landing
        assert flat is not None
        self._drop_landing(ticket)
        return flat

    def _let_go(self, ticket: _Moved) -> None:
        """The copy out is joined: the compute stream may use the tensor's memory again."""
        assert ticket.going is not None
        self._copies.join(ticket.going)
        ticket.data = ticket.going = None
        del self._going[ticket]
        self._bytes_going -= ticket.num_bytes

    def _drop_landing(self, ticket: _Moved) -> None:
        if ticket.coming is not None:
            self._copies.join(ticket.coming)
        self._coming.pop(ticket, None)
        ticket.landing = ticket.coming = None

    def _watch_backward(self) -> None:
        """Has all copies joined when this backward is over: a capture must not end with one that is not."""
        if self._is_backward_watched:
            return
        self._is_backward_watched = at_end_of_backward(self._join_all)
        if not self._is_backward_watched:
            self._join_all()

    def _join_all(self) -> None:
        with self._lock:
            self._is_backward_watched = False
            self._lent.clear()
            for ticket in list(self._going):
                self._let_go(ticket)
            for ticket in self._coming:
                assert ticket.coming is not None
                self._copies.join(ticket.coming)  # what nobody took stays: the next backward may want it
            self._copies.read_clocks()


def _shut(copies: Copies, memory: HostMemory) -> None:
    try:
        copies.finish()
        copies.close()
    finally:
        memory.release()
