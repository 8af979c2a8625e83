"""Counts the bytes that are saved for backward at a time, by block, and predicts those under other policies.

A storage counts once, for its first block. The prediction starts from a recorded step, of which some blocks would keep
everything::

    recorded      |--forward--|                |--recomputation--|--backward--|
    saved tensor   =====                         ==========================      two storages: one each
    kept           =====================================================         the first; the second is not allocated

While the recorded step discards a tensor that the plain step would save, autograd holds a placeholder in its place. So
the tensor would be freed in the plain step when the placeholder is.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, final

import torch

from graphckpt.ledger.live_memory import storages_of
from graphckpt.stores.base import Share, Total


class _Owner(weakref.ref[Any]):
    """A weak reference to what autograd or a block holds while a storage is saved."""

    __slots__ = ("owned", "saved")

    saved: _Saved
    owned: set[_Saved]


class _Saved:
    __slots__ = ("num_bytes", "owners", "share", "storage")

    def __init__(self, storage: torch.UntypedStorage, share: Share | None) -> None:
        self.storage = weakref.ref(storage)
        self.num_bytes = storage.nbytes()
        self.share = share
        """``None`` if it is not counted."""
        self.owners: dict[int, _Owner] = {}  # by id: weak references compare by what they refer to

    def drop(self, owner: _Owner) -> bool:
        """Removes an owner. Returns whether it was the last one."""
        self.owners.pop(id(owner), None)
        if not self.owners:
            owner.owned.discard(self)
        return not self.owners


@final
class SavedBytes:
    """Sums what is saved. See Note [One storage, one object] in ``live_memory.py``."""

    def __init__(self, total: Total) -> None:
        self._shares: defaultdict[str, Share] = defaultdict(lambda: Share(total))
        self._saved: dict[int, _Saved] = {}
        self._owned: set[_Saved] = set()  # also those whose storage is gone and whose number another one has

    def of_block(self, block: str) -> int:
        return self._shares[block].at_largest if block in self._shares else 0

    def ignore(self, tensor: torch.Tensor) -> None:
        for storage in storages_of(tensor):
            self._saved[id(storage)] = _Saved(storage, None)

    def add(self, block: str, tensor: torch.Tensor, owner: object) -> None:
        """Counts the tensor's storage for ``block``, if it is new, until all its owners are gone."""
        for storage in storages_of(tensor):
            saved = self._saved.get(id(storage))
            if saved is None or saved.storage() is not storage or (saved.share is not None and not saved.owners):
                saved = self._saved[id(storage)] = _Saved(storage, self._shares[block])
                self._shares[block].add(saved.num_bytes)
                self._owned.add(saved)
            if saved.share is not None:
                try:
                    reference = _Owner(owner, _drop)
                except TypeError:  # hooks of the caller may pack a tuple, as those of `save_on_cpu` do
                    reference = _Owner(storage, _drop)
                reference.saved, reference.owned = saved, self._owned
                saved.owners[id(reference)] = reference

    def remove(self, tensor: torch.Tensor, owner: object) -> None:
        for storage in storages_of(tensor):
            saved = self._saved.get(id(storage))
            if saved is None or saved.storage() is not storage or saved.share is None:
                continue
            for reference in [ref for ref in saved.owners.values() if ref() is owner]:
                if saved.drop(reference):
                    saved.share.add(-saved.num_bytes)


def _drop(owner: weakref.ref[Any]) -> None:
    assert isinstance(owner, _Owner)
    saved = owner.saved
    if saved.drop(owner) and saved.share is not None:
        saved.share.drop(saved.num_bytes)


# ---- other policies


@dataclass(slots=True)
class Hold:
    """Something that holds a storage for backward."""

    block: str | None
    """The block; ``None`` if no policy changes what it saves."""
    end: int | None = None
    """The number of changes by then; ``None`` if it outlives the step."""
    begin: int = 0
    """The number of changes when it began."""
    saved_by: str | None = None
    """The block that really saves the tensor; ``None`` for what the plain step alone would save."""


@dataclass(frozen=True, slots=True)
class Origin:
    block: str
    phase: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    source: str


@dataclass(slots=True)
class StorageLife:
    """A storage, from its allocation to its end, in numbers of changes since the step began."""

    begin: int
    num_bytes: int
    recomputed_by: str | None = None
    """The outermost block in whose recomputation it was allocated."""
    end: int | None = None
    last_use: int = 0
    """By an op that is not a recomputed one."""
    is_resized: bool = False
    """Whether it ended because its size changed, so that nothing could have held it."""
    saved: list[Hold] = field(default_factory=list)
    """What holds it in the plain step."""
    kept: list[Hold] = field(default_factory=list)
    """The blocks that keep it for a recomputation."""
    origin: Origin | None = None
    """What allocated it; ``None`` until a tensor is seen that uses it."""
    kind: str = ""
    """See :attr:`graphckpt.ledger.record.TensorLife.kind`."""
    is_old: bool = False
    """Whether it existed before the step."""


def levels_if_kept(lives: Iterable[StorageLife], num_changes: int, is_kept: Callable[[str], bool]) -> list[int]:
    """Returns the live bytes after each change of the step if the blocks in ``is_kept`` kept everything.

    >>> first = StorageLife(0, 8, end=1, saved=[Hold("h.0", end=3)])
    >>> again = StorageLife(2, 8, recomputed_by="h.0", end=3)
    >>> levels_if_kept([first, again], 4, lambda block: False), levels_if_kept([first, again], 4, lambda block: True)
    ([8, 0, 8, 0], [8, 8, 8, 0])
    """
    changes = [0] * (num_changes + 1)
    for life in lives:
        if life.recomputed_by is None or not is_kept(life.recomputed_by):
            changes[min(life.begin, num_changes)] += life.num_bytes
            changes[min(_end(life, is_kept, num_changes), num_changes)] -= life.num_bytes
    return list(accumulate(changes))[:num_changes]


def _end(life: StorageLife, is_kept: Callable[[str], bool], num_changes: int) -> int:
    def ends(holds: Iterable[Hold]) -> list[int]:
        return [num_changes if hold.end is None else hold.end for hold in holds]

    def is_changed(hold: Hold) -> bool:
        return hold.block is not None and is_kept(hold.block)

    end = num_changes if life.end is None else life.end
    if life.is_resized:
        return end
    dropped = [hold for hold in life.kept if is_changed(hold)]
    if dropped and end <= max(ends(dropped)):  # only for the recomputation was it alive that long
        others = [hold for hold in life.kept if not is_changed(hold)]
        real = [hold for hold in life.saved if hold.block is None]
        end = max([life.last_use + 1, *ends(others), *ends(real)])
    return max([end, *ends(hold for hold in life.saved if is_changed(hold))])
