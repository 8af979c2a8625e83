"""Counts the bytes that are saved for backward at a time, by block. A storage counts once, for its first block."""

from __future__ import annotations

import weakref
from collections import defaultdict
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
    """Sums what is saved. See Note [One storage, one object] in ``live_memory.py``.

    Args:
        total: The sum.
    """

    def __init__(self, total: Total) -> None:
        self._shares: defaultdict[str, Share] = defaultdict(lambda: Share(total))
        self._saved: dict[int, _Saved] = {}
        self._owned: set[_Saved] = set()  # also those whose storage is gone and whose number another one has

    def of_block(self, block: str) -> int:
        """Returns what is saved for a block when most is saved in all."""
        return self._shares[block].at_largest if block in self._shares else 0

    def ignore(self, tensor: torch.Tensor) -> None:
        """Excludes the tensor's storage."""
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
        """Takes back what was added for ``owner``."""
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
