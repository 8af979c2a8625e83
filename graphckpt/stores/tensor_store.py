"""Keeps tensors in places other than where they were made, and sends for them before backward wants them."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from graphckpt._compat import what_is_not_plain
from graphckpt.stores.base import Group, Store
from graphckpt.stores.byte_store import Place, Ticket
from graphckpt.stores.prefetch_order import Order
from graphckpt.stores.storage_pieces import GroupState, Key, KnownStorages, Piece, WrappedKey, bytes_to_move, pieces_of
from graphckpt.stores.version_guard import Edits

if TYPE_CHECKING:
    from collections.abc import Callable

_PLAIN = (torch.Tensor, nn.Parameter)


@final
class PlacedStore(Store):
    """Keeps tensors in places, which may differ by device.

    When backward first asks for a tensor of a group, the whole group is sent for, then the group that is likely to be
    asked for next, and the one after that is announced.

    Args:
        label: The name of the place in tables.
        place_for: Returns the place for the tensors of a device, or ``None`` if they stay. Its second argument says
            whether they are parts of a sharded tensor; its third is the group that asks first.
        min_elements: Smaller tensors stay.
    """

    def __init__(
        self,
        label: str,
        place_for: Callable[[torch.device, bool, Group], Place | None],
        *,
        min_elements: int = 1024,
    ) -> None:
        self._label = label
        self._place_for = place_for
        self._min_elements = min_elements
        self._places: dict[tuple[torch.device, bool], tuple[Place | None, list[str]]] = {}
        self._storages = KnownStorages()
        self._groups: list[weakref.ref[Group]] = []
        self._order = Order()
        self._freed: deque[tuple[Place, Ticket]] = deque()
        self._num_alive = 0
        self._lock = threading.RLock()  # backward runs in threads of its own, one for each device

    @property
    def place(self) -> str:
        """The names of the places in use, for tables; before there are any, what was asked for."""
        if not self._places:
            return self._label
        labels = dict.fromkeys("device" if place is None else place.label for place, _ in self._places.values())
        return " + ".join(labels)

    @property
    def num_alive(self) -> int:
        """How many pieces are kept now; none after a step."""
        with self._lock:
            self._empty_bin()
            if self._num_alive and all(ref() is None for ref in self._groups):
                self._num_alive = 0  # an interrupt has kept a piece from being made or freed
            return self._num_alive

    def open(self, group: Group) -> Group:
        """Begins what one call of a block keeps."""
        with self._lock:
            if not self.num_alive and all((g := ref()) is None or g.state.is_sealed for ref in self._groups):
                self._groups.clear()
                self._order.begin_step()
                for place in self._opened_places():
                    place.begin_step()
            group.number, group.state = len(self._groups), GroupState()
            self._groups.append(weakref.ref(group))
        return group

    def put(self, tensor: torch.Tensor, group: Group | None, *, is_part: bool = False) -> object:
        """Keeps ``tensor`` and returns the key to it; an alias, if it stays where it is."""
        assert group is not None
        kind = what_is_not_plain(tensor)
        if kind is not None:
            group.note(f"its {kind} tensors stay on the device: only plain ones can be moved")
            return tensor.detach()
        if hasattr(tensor, "__tensor_flatten__") and not isinstance(tensor, nn.Parameter):
            arrive = getattr(tensor, "trigger_wait", None)
            if arrive is not None:  # the result of a functional collective, whose bytes may not be there yet
                return self.put(arrive(), group, is_part=is_part)
            is_part = is_part or not _is_replicated(tensor)
            return WrappedKey(tensor, lambda inner: self.put(inner, group, is_part=is_part))
        if self._stays(tensor, group):
            return tensor.detach()
        with self._lock:
            place = self._place_of(tensor.device, is_part, group)
            if place is None:
                return tensor.detach()
            if tensor.is_conj() or tensor.is_neg():
                tensor = tensor.detach().resolve_conj().resolve_neg()
            piece = self._storages.find(tensor, place) or self._new_piece(tensor, place, group)
            pieces = group.state.pieces
            known = pieces.get(id(piece))
            if known is None or known() is not piece:
                pieces.pop(id(piece), None)  # of one that is gone; the order is that of the puts
                pieces[id(piece)] = weakref.ref(piece)
            return Key(piece, tensor, group)

    def get(self, key: object) -> torch.Tensor | None:
        """Returns the kept tensor, without autograd history; ``None`` if it was edited in place since."""
        if isinstance(key, torch.Tensor):
            return key
        if isinstance(key, WrappedKey):
            return key.join(self.get)
        assert isinstance(key, Key)
        piece = key.piece
        if piece.edits.seen():
            return None
        with self._lock:
            self._empty_bin()
            self._ask_for(key.group)
            flat = piece.landed
            if flat is None:  # if a view of it lives still is not asked: that may differ between ranks
                flat = self._take(piece, key.group)
            tensor = key.view_of(flat.untyped_storage(), int(flat.storage_offset()))
            key.mark_taken()
            return tensor

    def seal(self, group: Group | None) -> None:
        """The first run of the block is over."""
        assert group is not None
        group.state.is_sealed = True
        with self._lock:
            self._empty_bin()
            for place in {piece.place: None for piece in pieces_of(group)}:
                place.seal(group)

    def close(self) -> None:
        """Gives back files, threads and pinned memory, unless something is kept still. A later ``put`` begins anew."""
        with self._lock:
            if self.num_alive:
                return
            for place in self._opened_places():
                place.close()
            self._places.clear()

    def _stays(self, tensor: torch.Tensor, group: Group) -> bool:
        if (
            tensor.numel() < max(1, self._min_elements)
            or type(tensor) is not torch.Tensor
            or tensor.device.type == "meta"
        ):
            return True
        state = group.state
        if state.fixed is None:  # anew in each call: FSDP gives a module other parameters in every forward
            state.fixed = frozenset(id(t.untyped_storage()) for t in group.own() if type(t) in _PLAIN)
        return id(tensor.untyped_storage()) in state.fixed

    def _opened_places(self) -> list[Place]:
        return [place for place, _ in self._places.values() if place is not None]

    def _place_of(self, device: torch.device, is_part: bool, group: Group) -> Place | None:
        found = self._places.get((device, is_part))
        if found is None:
            notes: list[str] = []
            place = self._place_for(device, is_part, Group(group.block, group.own, notes.append))
            found = self._places[device, is_part] = place, notes
        place, notes = found
        for note in notes:
            group.note(note)
        return place

    def _new_piece(self, tensor: torch.Tensor, place: Place, group: Group) -> Piece:
        data, begin, end = bytes_to_move(tensor)
        traffic = group.traffic
        started = perf_counter() if traffic is not None else 0.0
        ticket = place.put(data, group)
        if traffic is not None:
            traffic.wait_seconds += perf_counter() - started
            traffic.bytes_at[place.where] += place.stored_bytes(end - begin)
        piece = Piece(place, ticket, Edits(tensor), begin, end, self._freed)
        self._num_alive += 1
        self._storages.add(tensor, piece)
        return piece

    def _take(self, piece: Piece, group: Group) -> torch.Tensor:
        traffic = group.traffic
        started = perf_counter() if traffic is not None else 0.0
        flat = piece.place.take(piece.ticket, group)
        if traffic is not None:
            traffic.wait_seconds += perf_counter() - started
        piece.landed = flat
        return flat

    def _ask_for(self, group: Group) -> None:
        """On the first tensor of a group: sends for the rest of it and for the next one, while this one is used."""
        state = group.state
        if state.is_asked_for:
            return
        state.is_asked_for = True
        self._order.asked(group.number)
        self._begin(group)
        ahead = self._next_group(group)
        if ahead is not None:
            self._begin(ahead)
            later = self._next_group(ahead)
            if later is not None:
                for place, tickets in _tickets(later).items():
                    place.announce(tickets, later)

    def _begin(self, group: Group) -> None:
        if not group.state.has_begun:
            group.state.has_begun = True
            for place, tickets in _tickets(group).items():
                place.begin(tickets, group)

    def _next_group(self, group: Group) -> Group | None:
        """Returns the group that backward will want after ``group``; where that is gone already, the one before it."""
        number = self._order.next_after(group.number)
        while 0 <= number < len(self._groups):
            found = self._groups[number]()
            if found is not None and not found.state.is_asked_for and pieces_of(found):
                return found
            number -= 1
        return None

    def _empty_bin(self) -> None:
        while self._freed:
            place, ticket = self._freed.popleft()
            self._num_alive -= 1
            place.free(ticket)


def _is_replicated(tensor: Any) -> bool:
    """Whether ``tensor`` is a DTensor that every rank of its mesh holds in full."""
    placements = getattr(tensor, "placements", None)
    return placements is not None and all(placement.is_replicate() for placement in placements)


def _tickets(group: Group) -> dict[Place, list[Ticket]]:
    tickets: dict[Place, list[Ticket]] = {}
    for piece in pieces_of(group):
        if piece.landed is None:  # else another group has had it brought back
            tickets.setdefault(piece.place, []).append(piece.ticket)
    return tickets
