"""Stores tensors as bytes in byte stores, and prefetches them for backward."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any, final

import torch
from torch import nn

from graphckpt._compat import what_is_not_plain
from graphckpt.stores.base import Store, TensorGroup
from graphckpt.stores.byte_store import ByteHandle, ByteStore
from graphckpt.stores.prefetch_order import PrefetchOrder
from graphckpt.stores.storage_pieces import (
    GroupState,
    KnownStorages,
    Piece,
    TensorKey,
    WrappedKey,
    bytes_to_move,
    pieces_of,
)
from graphckpt.stores.version_guard import VersionGuard

_PLAIN = (torch.Tensor, nn.Parameter)


@final
class TensorStore(Store):
    """Stores tensors in byte stores, which may differ by device.

    When backward first requests a tensor of a group, the whole group is prefetched, then the group that is likely to be
    requested next, and the one after that is announced.

    Args:
        label: The name of the store in tables.
        byte_store_for: Returns the byte store for the tensors of a device, or ``None`` if they stay. Its second
            argument is whether they are inner tensors of a subclass other than a replicated DTensor; its third is the
            first group that uses the store.
        min_elements: Smaller tensors stay.
    """

    def __init__(
        self,
        label: str,
        byte_store_for: Callable[[torch.device, bool, TensorGroup], ByteStore | None],
        *,
        min_elements: int = 1024,
    ) -> None:
        self._label = label
        self._byte_store_for = byte_store_for
        self._min_elements = min_elements
        self._byte_stores: dict[tuple[torch.device, bool], tuple[ByteStore | None, list[str]]] = {}
        self._known = KnownStorages()
        self._groups: list[weakref.ref[TensorGroup]] = []
        self._order = PrefetchOrder()
        self._freed: deque[tuple[ByteStore, ByteHandle]] = deque()
        self._num_alive = 0
        self._lock = threading.RLock()  # backward runs in threads of its own, one for each device

    @property
    def label(self) -> str:
        """The names of the byte stores in use, for tables; before the first ``put``, the requested one."""
        if not self._byte_stores:
            return self._label
        labels = dict.fromkeys("device" if store is None else store.label for store, _ in self._byte_stores.values())
        return " + ".join(labels)

    @property
    def num_alive(self) -> int:
        """How many pieces are stored; none after a step."""
        with self._lock:
            self._free_dropped()
            if self._num_alive and all(ref() is None for ref in self._groups):
                self._num_alive = 0  # an interrupt ended the constructor or destructor of a piece
            return self._num_alive

    def open_group(self, group: TensorGroup) -> TensorGroup:
        """Begins the tensors of one call of a block."""
        with self._lock:
            if not self.num_alive and all((g := ref()) is None or g.state.is_closed for ref in self._groups):
                self._groups.clear()
                self._order.begin_step()
                for store in self._open_stores():
                    store.begin_step()
            group.number, group.state = len(self._groups), GroupState()
            self._groups.append(weakref.ref(group))
        return group

    def put(self, tensor: torch.Tensor, group: TensorGroup | None, *, is_shard: bool = False) -> object:
        """Stores ``tensor`` and returns its key, or an alias if it stays where it is."""
        assert group is not None
        kind = what_is_not_plain(tensor)
        if kind is not None:
            group.note(f"{kind} tensors stay on the device: only plain tensors can be moved")
            return tensor.detach()
        if hasattr(tensor, "__tensor_flatten__") and not isinstance(tensor, nn.Parameter):
            wait = getattr(tensor, "trigger_wait", None)
            if wait is not None:  # an AsyncCollectiveTensor, which may not have completed
                return self.put(wait(), group, is_shard=is_shard)
            is_shard = is_shard or not _is_replicated(tensor)
            return WrappedKey(tensor, lambda inner: self.put(inner, group, is_shard=is_shard))
        if self._stays(tensor, group):
            return tensor.detach()
        with self._lock:
            store = self._store_of(tensor.device, is_shard, group)
            if store is None:
                return tensor.detach()
            if tensor.is_conj() or tensor.is_neg():
                tensor = tensor.detach().resolve_conj().resolve_neg()
            piece = self._known.find(tensor, store) or self._new_piece(tensor, store, group)
            pieces = group.state.pieces
            known = pieces.get(id(piece))
            if known is None or known() is not piece:
                pieces.pop(id(piece), None)  # of a freed piece; the order is that of `put`
                pieces[id(piece)] = weakref.ref(piece)
            return TensorKey(piece, tensor, group)

    def get(self, key: object) -> torch.Tensor | None:
        """Returns the stored tensor, without autograd history; ``None`` if it was modified in place since."""
        if isinstance(key, torch.Tensor):
            return key
        if isinstance(key, WrappedKey):
            return key.rebuild(self.get)
        assert isinstance(key, TensorKey)
        piece = key.piece
        if piece.guard.is_mutated():
            return None
        with self._lock:
            self._free_dropped()
            self._prefetch_from(key.group)
            flat = piece.reloaded
            if flat is None:  # whether a view of it is still alive is not checked: that may differ between ranks
                flat = self._reload(piece, key.group)
            tensor = key.view_of(flat.untyped_storage(), int(flat.storage_offset()))
            key.mark_read()
            return tensor

    def close_group(self, group: TensorGroup | None) -> None:
        """Closes ``group``: the forward of its block has ended, and no more tensors are added."""
        assert group is not None
        group.state.is_closed = True
        with self._lock:
            self._free_dropped()
            for store in {piece.store: None for piece in pieces_of(group)}:
                store.close_group(group)

    def close(self) -> None:
        """Releases files, threads and pinned memory, unless something is still stored. A later ``put`` starts anew."""
        with self._lock:
            if self.num_alive:
                return
            for store in self._open_stores():
                store.close()
            self._byte_stores.clear()

    def _stays(self, tensor: torch.Tensor, group: TensorGroup) -> bool:
        if (
            tensor.numel() < max(1, self._min_elements)
            or type(tensor) is not torch.Tensor
            or tensor.device.type == "meta"
        ):
            return True
        state = group.state
        if state.unmoved is None:  # in each call: under FSDP a module has other parameters in every forward
            state.unmoved = frozenset(id(t.untyped_storage()) for t in group.own() if type(t) in _PLAIN)
        return id(tensor.untyped_storage()) in state.unmoved

    def _open_stores(self) -> list[ByteStore]:
        return [store for store, _ in self._byte_stores.values() if store is not None]

    def _store_of(self, device: torch.device, is_shard: bool, group: TensorGroup) -> ByteStore | None:
        found = self._byte_stores.get((device, is_shard))
        if found is None:
            notes: list[str] = []
            store = self._byte_store_for(device, is_shard, TensorGroup(group.block, group.own, notes.append))
            found = self._byte_stores[device, is_shard] = store, notes
        store, notes = found
        for note in notes:
            group.note(note)
        return store

    def _new_piece(self, tensor: torch.Tensor, store: ByteStore, group: TensorGroup) -> Piece:
        data, begin, end = bytes_to_move(tensor)
        traffic = group.traffic
        started = perf_counter() if traffic is not None else 0.0
        handle = store.put(data, group)
        if traffic is not None:
            traffic.wait_seconds += perf_counter() - started
        piece = Piece(store, handle, VersionGuard(tensor), begin, end, self._freed)
        if traffic is not None:
            traffic.count(store.tier, store.stored_bytes(end - begin), piece)
        self._num_alive += 1
        self._known.add(tensor, piece)
        return piece

    def _reload(self, piece: Piece, group: TensorGroup) -> torch.Tensor:
        traffic = group.traffic
        started = perf_counter() if traffic is not None else 0.0
        flat = piece.store.get(piece.handle, group)
        if traffic is not None:
            traffic.wait_seconds += perf_counter() - started
        piece.reloaded = flat
        return flat

    def _prefetch_from(self, group: TensorGroup) -> None:
        """On the first tensor of a group: prefetches the rest of it, and the next group while this one is used."""
        state = group.state
        if state.is_requested:
            return
        state.is_requested = True
        self._order.record(group.number)
        self._prefetch(group)
        ahead = self._next_group(group)
        if ahead is not None:
            self._prefetch(ahead)
            later = self._next_group(ahead)
            if later is not None:
                for store, handles in _handles(later).items():
                    store.hint(handles, later)

    def _prefetch(self, group: TensorGroup) -> None:
        if not group.state.is_prefetched:
            group.state.is_prefetched = True
            for store, handles in _handles(group).items():
                store.prefetch(handles, group)

    def _next_group(self, group: TensorGroup) -> TensorGroup | None:
        """Returns the group that backward likely needs next, or the last one before it that is still to be used."""
        number = self._order.next_after(group.number)
        while 0 <= number < len(self._groups):
            found = self._groups[number]()
            if found is not None and not found.state.is_requested and pieces_of(found):
                return found
            number -= 1
        return None

    def _free_dropped(self) -> None:
        while self._freed:
            store, handle = self._freed.popleft()
            self._num_alive -= 1
            store.free(handle)


def _is_replicated(tensor: Any) -> bool:
    """Whether ``tensor`` is a DTensor that every rank of its mesh holds in full."""
    placements = getattr(tensor, "placements", None)
    return placements is not None and all(placement.is_replicate() for placement in placements)


def _handles(group: TensorGroup) -> dict[ByteStore, list[ByteHandle]]:
    handles: dict[ByteStore, list[ByteHandle]] = {}
    for piece in pieces_of(group):
        if piece.reloaded is None:  # else it was reloaded for another group
            handles.setdefault(piece.store, []).append(piece.handle)
    return handles
