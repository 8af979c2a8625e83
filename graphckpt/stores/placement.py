"""Resolves the flags `offload`, `partition` and `contiguous` of a block to its store."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

from graphckpt.errors import ConfigError
from graphckpt.stores.base import DeviceStore, Offload, Store, TensorGroup, parse_offload
from graphckpt.stores.partition import ShardedStore, group_for, parse_partition
from graphckpt.stores.slab import SlabStore
from graphckpt.stores.tensor_store import TensorStore

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from graphckpt.stores.base import ByteStore


@final
@dataclass(frozen=True)
class Placement:
    """Where blocks store saved tensors. Blocks with one placement share its store, which holds a shared tensor once."""

    offload: Offload | None = None
    partition: Any = None
    contiguous: bool = False
    min_elements: int = 1024

    @property
    def is_plain(self) -> bool:
        return self.offload is None and self.partition is None and not self.contiguous

    # A frozen dataclass permits this: `cached_property` writes to `__dict__`. Equality and hash compare the fields
    # alone.
    @cached_property
    def store(self) -> Store:
        """The store of all blocks with this placement; created on first use."""
        if self.is_plain:
            return DeviceStore()
        target = None if self.offload is None else self.offload.name
        parts = target, self.contiguous and "slab", self.partition is not None and "part"
        label = " ".join(part for part in parts if part)
        return TensorStore(label, self._byte_store_for, min_elements=self.min_elements)

    def __deepcopy__(self, memo: dict[int, Any]) -> Placement:
        # Through `memo`, so that copies of blocks that share this store share one, too.
        copied: Placement = memo.setdefault(id(self), replace(self))
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy has a new, empty store.
        return Placement, (self.offload, self.partition, self.contiguous, self.min_elements)

    def _byte_store_for(self, device: torch.device, is_shard: bool, group: TensorGroup) -> ByteStore | None:
        # Partition is the outermost: each rank passes its slice on to the store of `offload` or `contiguous`. The other
        # way round every rank would offload all bytes before it drops most of them.
        store = self.offload.byte_store_for(device, group.note) if self.offload is not None else None
        if self.contiguous:
            if store is not None:
                group.note("contiguous: offloaded tensors are contiguous already")
            store = store or SlabStore(device)
        if self.partition is None:
            return store
        if is_shard:
            group.note("partition: sharded tensors are not partitioned again")
            return store
        ranks = group_for(self.partition, group)
        return store if ranks is None else ShardedStore(ranks, device, store)


def placement_of(fields: Mapping[str, Any]) -> Placement:
    """Resolves the fields ``offload``, ``partition``, ``contiguous`` and ``min_elements`` of a block."""
    return Placement(
        offload=parse_offload(fields.get("offload")),
        partition=parse_partition(fields.get("partition")),
        contiguous=parse_contiguous(fields.get("contiguous")),
        min_elements=parse_min_elements(fields.get("min_elements", 1024)),
    )


def parse_contiguous(value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"expected a bool or None, got {value!r} · fix: use True, False or None")
    return bool(value)


def parse_min_elements(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"expected a non-negative int, got {value!r} · fix: use a number of elements")
    return value
