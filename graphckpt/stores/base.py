"""The contract of a store: it takes a tensor, returns a key, and returns the same tensor for the key."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, final

from graphckpt.stores.high_water import Share, Total

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch


TIERS = ("device", "host", "disk")


@final
class Traffic:
    """What one block stores during a recorded step. Bytes are those of this rank.

    Args:
        totals: The sums of all blocks, by tier.
    """

    __slots__ = ("_ends", "_shares", "copy_seconds", "wait_seconds")

    def __init__(self, totals: Mapping[str, Total] | None = None) -> None:
        self._shares = {tier: Share(Total() if totals is None else totals[tier]) for tier in TIERS}
        self._ends: dict[int, _End] = {}
        self.copy_seconds = 0.0
        """Time of the copies in both directions, whether or not they overlapped with computation."""
        self.wait_seconds = 0.0
        """Time that the step waited for them."""

    @property
    def bytes_at(self) -> dict[str, int]:
        """The bytes at each tier when all blocks together stored most there."""
        return {tier: share.at_largest for tier, share in self._shares.items()}

    def count(self, tier: str, num_bytes: int, owner: object) -> None:
        """Counts bytes that are stored at ``tier`` while ``owner`` is alive."""
        self._shares[tier].add(num_bytes)
        end = _End(owner, _drop)
        end.traffic, end.tier, end.num_bytes = self, tier, num_bytes
        self._ends[id(end)] = end


class _End(weakref.ref[Any]):
    """A weak reference to what holds stored bytes."""

    __slots__ = ("num_bytes", "tier", "traffic")

    traffic: Traffic
    tier: str
    num_bytes: int


def _drop(end: weakref.ref[Any]) -> None:
    assert isinstance(end, _End)
    end.traffic._ends.pop(id(end), None)
    end.traffic._shares[end.tier].drop(end.num_bytes)


@final
class TensorGroup:
    """The tensors saved by one call of a block. They are offloaded together and prefetched together. Data only.

    Args:
        block: Path of the block, for messages.
        own: Returns the block's parameters and buffers, which are never moved.
        note: Adds a note about the block to ``explain()``.
        traffic: Where to count, while the step is recorded.
    """

    __slots__ = ("__weakref__", "block", "note", "number", "own", "state", "traffic")

    def __init__(
        self,
        block: str,
        own: Callable[[], Sequence[torch.Tensor]],
        note: Callable[[str], None],
        traffic: Traffic | None = None,
    ) -> None:
        self.block = block
        self.own = own
        self.note = note
        self.traffic = traffic
        self.number = 0
        """Position among the groups of the step."""
        self.state: Any = None
        """Bookkeeping of the store that opened the group. An attribute, as a look-up per tensor costs more."""


class Store(ABC):
    """Holds the saved tensors of blocks between forward and backward.

    ``get(put(x))`` equals ``x`` in every bit, with its shape, stride, dtype and device. What ``put`` returns is freed
    when its last reference is gone.
    """

    @property
    @abstractmethod
    def label(self) -> str:
        """The name of the store in tables."""

    @abstractmethod
    def open_group(self, group: TensorGroup) -> TensorGroup | None:
        """Begins the tensors of one call of a block; ``None`` if this store has no groups."""

    @abstractmethod
    def put(self, tensor: torch.Tensor, group: TensorGroup | None) -> object:
        """Stores ``tensor`` and returns its key, or an alias of it if it stays where it is."""

    @abstractmethod
    def get(self, key: object) -> torch.Tensor | None:
        """Returns the stored tensor, without autograd history; ``None`` if it was modified in place since."""

    @abstractmethod
    def close_group(self, group: TensorGroup | None) -> None:
        """Ends the original forward of the block: no more tensors join the group."""

    def close(self) -> None:  # noqa: B027  # there may be nothing to release
        """Releases files, threads and pinned memory, unless something is still stored. A later ``put`` starts anew."""
