"""Stores tensors as byte ranges of their storages: views of one storage are stored once and reloaded as views of one.

::

    storage   [----------------------------]
    views        q [--------]  k [--------]       one piece, if a view covers half of the storage or more;
    piece     [----------------------------]      else the bytes from the view's first to its last
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, final

import torch

from graphckpt.stores.base import TensorGroup
from graphckpt.stores.byte_store import ByteHandle, ByteStore
from graphckpt.stores.empty import empty
from graphckpt.stores.version_guard import VersionGuard

_ALIGN = 256  # bytes; views keep their address modulo this, so that kernels which check alignment take the same path


@final
class Piece:
    """A byte range of one storage in a byte store. It is freed when its last key is gone."""

    __slots__ = ("__weakref__", "_freed", "begin", "end", "guard", "handle", "num_unread", "reloaded", "store")

    def __init__(
        self,
        store: ByteStore,
        handle: ByteHandle,
        guard: VersionGuard,
        begin: int,
        end: int,
        freed: deque[tuple[ByteStore, ByteHandle]],
    ) -> None:
        self.store = store
        self.guard = guard
        self.handle = handle
        self.begin, self.end = begin, end
        self.num_unread = 0
        """Keys that were not read yet: until all were, reloaded bytes are held."""
        self.reloaded: torch.Tensor | None = None
        """The bytes, once they are reloaded."""
        self._freed = freed

    def __del__(self) -> None:
        if not hasattr(self, "_freed"):
            return  # an interrupt has ended `__init__`
        self.handle.release()
        self._freed.append((self.store, self.handle))  # freed later: a destructor runs in any thread, under any lock


@final
class GroupState:
    """Bookkeeping of :class:`~graphckpt.stores.tensor_store.TensorStore` for one group."""

    __slots__ = ("is_closed", "is_prefetched", "is_requested", "pieces", "unmoved")

    def __init__(self) -> None:
        self.unmoved: frozenset[int] | None = None
        """``id`` of each storage that is never moved; ``None`` until the first tensor."""
        self.is_prefetched = False
        """Its bytes are being reloaded."""
        self.is_requested = False
        """Backward has requested one of its tensors."""
        self.is_closed = False
        """The call is over: no more tensors join."""
        self.pieces: dict[int, weakref.ref[Piece]] = {}
        """By ``id``; references to freed pieces may remain."""


def pieces_of(group: TensorGroup) -> list[Piece]:
    """Returns the pieces of a group that are not freed, in the order of ``put``."""
    return [piece for ref in group.state.pieces.values() if (piece := ref()) is not None]


@final
class TensorKey:
    """The key of a plain tensor: how to view a piece as the tensor."""

    __slots__ = ("_is_read", "_offset", "dtype", "group", "piece", "size", "stride")

    def __init__(self, piece: Piece, tensor: torch.Tensor, group: TensorGroup) -> None:
        self._is_read = True  # so that an interrupt here leaves the count as it was
        self.piece = piece
        self.group = group
        self.dtype = tensor.dtype
        self.size, self.stride = tensor.size(), tensor.stride()
        self._offset = tensor.storage_offset() * tensor.element_size() - piece.begin
        piece.num_unread += 1
        self._is_read = False

    def view_of(self, storage: torch.UntypedStorage, begin: int) -> torch.Tensor:
        """Returns the tensor, as a view of ``storage`` from byte ``begin``."""
        offset = (begin + self._offset) // self.dtype.itemsize
        return empty(self.dtype, storage.device).set_(storage, offset, self.size, self.stride)

    def mark_read(self) -> None:
        """Records that the tensor was read; after the last key, the piece drops its reloaded bytes."""
        if not self._is_read:
            self._is_read = True
            self.piece.num_unread -= 1
        if self.piece.num_unread <= 0:
            self.piece.reloaded = None

    def __del__(self) -> None:
        if not getattr(self, "_is_read", True):  # an interrupt may have ended `__init__`
            self.mark_read()


@final
class WrappedKey:
    """The key of a wrapper subclass such as a DTensor: the keys of its inner tensors."""

    __slots__ = ("_class", "_context", "_keys", "_others", "_size", "_stride")

    def __init__(self, tensor: Any, put: Callable[[torch.Tensor], object]) -> None:
        names, self._context = tensor.__tensor_flatten__()
        self._class: Any = type(tensor)
        self._size, self._stride = tensor.size(), tensor.stride()
        parts = {name: getattr(tensor, name) for name in names}
        self._keys = {name: put(part) for name, part in parts.items() if isinstance(part, torch.Tensor)}
        self._others = {name: part for name, part in parts.items() if name not in self._keys}  # such as a DeviceMesh

    @property
    def keys(self) -> list[object]:
        """The keys of the inner tensors."""
        return list(self._keys.values())

    def rebuild(self, get: Callable[[object], torch.Tensor | None]) -> torch.Tensor | None:
        """Returns the wrapper around what ``get`` returns for each key."""
        inner: dict[str, Any] = {name: get(key) for name, key in self._keys.items()}
        if any(value is None for value in inner.values()):
            return None
        inner |= self._others
        tensor: torch.Tensor = self._class.__tensor_unflatten__(inner, self._context, self._size, self._stride)
        return tensor


@final
class KnownStorages:
    """The pieces of each living storage, to find one that covers a view already."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[_StorageRef, list[weakref.ref[Piece]]]] = {}
        table = self._known

        def forget(dead: weakref.ref[torch.UntypedStorage]) -> None:
            assert isinstance(dead, _StorageRef)
            known = table.get(dead.number)
            if known is not None and known[0] is dead:
                del table[dead.number]

        self._forget = forget

    def find(self, tensor: torch.Tensor, store: ByteStore) -> Piece | None:
        """Returns a piece in ``store`` that holds all bytes of ``tensor`` as they are now."""
        storage = tensor.untyped_storage()
        known = self._known.get(id(storage))
        if known is None or known[0]() is not storage:
            return None
        begin, end = _span(tensor)
        for ref in known[1]:
            piece = ref()
            if (
                piece is not None
                and piece.begin <= begin
                and end <= piece.end
                and piece.store is store
                and not piece.guard.is_mutated()
                and piece.guard.covers(tensor)
            ):
                return piece
        return None

    def add(self, tensor: torch.Tensor, piece: Piece) -> None:
        """Adds a new piece of the storage of ``tensor``."""
        storage = tensor.untyped_storage()
        number = id(storage)
        known = self._known.get(number)
        if known is None or known[0]() is not storage:
            ref = _StorageRef(storage, self._forget)
            ref.number = number
            self._known[number] = ref, [weakref.ref(piece)]
            return
        known[1][:] = [ref for ref in known[1] if ref() is not None]
        known[1].append(weakref.ref(piece))


class _StorageRef(weakref.ref[torch.UntypedStorage]):
    """A weak reference that still knows the ``id`` of its storage when that is gone."""

    __slots__ = ("number",)

    number: int


def bytes_to_move(tensor: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """Returns the bytes to store for ``tensor``, flat, and where they begin and end in its storage.

    >>> rows = torch.zeros(1000, 100)
    >>> [bytes_to_move(view)[1:] for view in (rows, rows.t(), rows[:, :50], rows[900:], rows[0].expand(9, 100))]
    [(0, 400000), (0, 400000), (0, 400000), (359936, 400000), (0, 400)]
    """
    storage = tensor.untyped_storage()
    begin, end = _span(tensor)
    begin -= begin % _ALIGN
    if 2 * (end - begin) >= storage.nbytes():
        begin, end = 0, storage.nbytes()
    data = empty(torch.uint8, tensor.device)
    return data.set_(storage, begin, (end - begin,), (1,)), begin, end


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the first byte of the storage that ``tensor`` covers, and the byte after the last."""
    begin, element_size = int(tensor.storage_offset()), tensor.element_size()
    if tensor.is_contiguous():
        return begin * element_size, (begin + tensor.numel()) * element_size
    last = begin + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return begin * element_size, (last + 1) * element_size
