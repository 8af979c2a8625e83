"""Tensors as pieces of their storages: views of one storage are kept once, and come back as views of one.

::

    storage   [----------------------------]
    views        q [--------]  k [--------]       one piece, if a view covers half of the storage or more;
    piece     [----------------------------]      else the run of bytes from the view's first to its last
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, final

import torch

from graphckpt.stores.empty import empty

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable

    from graphckpt.stores.base import Group
    from graphckpt.stores.byte_store import Place, Ticket
    from graphckpt.stores.version_guard import Edits

_ALIGN = 256  # bytes; a view keeps its address modulo this, so that kernels which look at alignment take the same path


@final
class Piece:
    """A run of bytes of one storage that a place holds. It is freed when the last key to it dies."""

    __slots__ = ("__weakref__", "_bin", "begin", "edits", "end", "landed", "place", "ticket", "untaken")

    def __init__(
        self, place: Place, ticket: Ticket, edits: Edits, begin: int, end: int, freed: deque[tuple[Place, Ticket]]
    ) -> None:
        self.place = place
        self.edits = edits
        self.ticket = ticket
        self.begin, self.end = begin, end
        self.untaken = 0
        """Keys that nobody has used yet: as long as there are any, bytes that came back stay."""
        self.landed: torch.Tensor | None = None
        """Where the bytes came back to."""
        self._bin = freed

    def __del__(self) -> None:
        self.ticket.release_own()
        self._bin.append((self.place, self.ticket))  # a destructor runs anywhere: what is to be done waits in the bin


@final
class GroupState:
    """What a :class:`~graphckpt.stores.tensor_store.PlacedStore` knows about one group."""

    __slots__ = ("fixed", "has_begun", "is_asked_for", "is_sealed", "pieces")

    def __init__(self) -> None:
        self.fixed: frozenset[int] | None = None
        """``id`` of each storage that is never moved; ``None`` until the first tensor."""
        self.has_begun = False
        """Its bytes have been sent for."""
        self.is_asked_for = False
        """Backward wants one of its tensors."""
        self.is_sealed = False
        """The call is over: nothing more comes in."""
        self.pieces: dict[int, weakref.ref[Piece]] = {}
        """By ``id``; a piece that is gone may have left its reference behind."""


def pieces_of(group: Group) -> list[Piece]:
    """Returns the pieces of a group that are still kept, in the order of the puts."""
    return [piece for ref in group.state.pieces.values() if (piece := ref()) is not None]


@final
class Key:
    """How to make a tensor out of a piece."""

    __slots__ = ("_is_taken", "_offset", "dtype", "group", "piece", "size", "stride")

    def __init__(self, piece: Piece, tensor: torch.Tensor, group: Group) -> None:
        self._is_taken = True  # an interrupt here leaves a key that nobody has
        self.piece = piece
        self.group = group
        self.dtype = tensor.dtype
        self.size, self.stride = tensor.size(), tensor.stride()
        self._offset = tensor.storage_offset() * tensor.element_size() - piece.begin
        piece.untaken += 1
        self._is_taken = False

    def view_of(self, storage: torch.UntypedStorage, begin: int) -> torch.Tensor:
        """Returns the tensor, out of bytes that begin at ``begin``."""
        offset = (begin + self._offset) // self.dtype.itemsize
        return empty(self.dtype, storage.device).set_(storage, offset, self.size, self.stride)

    def mark_taken(self) -> None:
        """Somebody has taken the tensor; once all have who can, the piece need not hold its bytes."""
        if not self._is_taken:
            self._is_taken = True
            self.piece.untaken -= 1
        if self.piece.untaken <= 0:
            self.piece.landed = None

    def __del__(self) -> None:
        if not self._is_taken:
            self.mark_taken()


@final
class WrappedKey:
    """The keys of the tensors inside of a wrapper such as a DTensor."""

    __slots__ = ("_context", "_keys", "_kind", "_others", "_size", "_stride")

    def __init__(self, tensor: Any, keep: Callable[[torch.Tensor], object]) -> None:
        names, self._context = tensor.__tensor_flatten__()
        self._kind: Any = type(tensor)
        self._size, self._stride = tensor.size(), tensor.stride()
        parts = {name: getattr(tensor, name) for name in names}
        self._keys = {name: keep(part) for name, part in parts.items() if isinstance(part, torch.Tensor)}
        self._others = {name: part for name, part in parts.items() if name not in self._keys}  # such as a DeviceMesh

    @property
    def keys(self) -> list[object]:
        """The keys."""
        return list(self._keys.values())

    def join(self, take: Callable[[object], torch.Tensor | None]) -> torch.Tensor | None:
        """Returns the wrapper around what ``take`` gives for each key."""
        inner: dict[str, Any] = {name: take(key) for name, key in self._keys.items()}
        if any(value is None for value in inner.values()):
            return None
        inner |= self._others
        tensor: torch.Tensor = self._kind.__tensor_unflatten__(inner, self._context, self._size, self._stride)
        return tensor


@final
class KnownStorages:
    """The pieces that are kept of each living storage, to find the one that holds a view already."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[_StorageRef, list[weakref.ref[Piece]]]] = {}
        table = self._known

        def forget(dead: weakref.ref[torch.UntypedStorage]) -> None:
            assert isinstance(dead, _StorageRef)
            known = table.get(dead.number)
            if known is not None and known[0] is dead:
                del table[dead.number]

        self._forget = forget

    def find(self, tensor: torch.Tensor, place: Place) -> Piece | None:
        """Returns the piece in ``place`` that holds all bytes of ``tensor`` as they are now."""
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
                and piece.place is place
                and not piece.edits.seen()
                and piece.edits.would_show(tensor)
            ):
                return piece
        return None

    def add(self, tensor: torch.Tensor, piece: Piece) -> None:
        """Remembers a new piece of the storage of ``tensor``."""
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
    """Knows the ``id`` of its storage still when that is gone."""

    __slots__ = ("number",)

    number: int


def bytes_to_move(tensor: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """Returns the bytes that keep ``tensor``, flat, and where they begin and end in its storage.

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
    """Returns the first byte of the storage that ``tensor`` covers, and the one behind its last."""
    begin, element_size = int(tensor.storage_offset()), tensor.element_size()
    if tensor.is_contiguous():
        return begin * element_size, (begin + tensor.numel()) * element_size
    last = begin + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return begin * element_size, (last + 1) * element_size
