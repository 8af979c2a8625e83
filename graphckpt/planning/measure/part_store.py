"""Partitions saved tensors over ranks while a step is measured, with a store of its own for each block.

A step under a plan has one store for all such blocks, which prefetches the parts of the next block while a block's
backward runs. Here each block has its own, so that a trace shows what the block alone does;
:func:`~graphckpt.planning.model.gathers.with_gathers` then adds what is prefetched.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any, final

import torch

from graphckpt.planning.measure.trace import Trace
from graphckpt.stores.base import Store, TensorGroup
from graphckpt.stores.partition import ShardedStore, parse_partition
from graphckpt.stores.partition import unsplit_bytes as whole_bytes
from graphckpt.stores.placement import Placement
from graphckpt.stores.tensor_store import Piece, TensorKey, WrappedKey, pieces_of

_MOST_RUNS = 3  # of a step that keeps something new each time


@final
class PartitionStore(Store):
    """Partitions saved tensors, with a store for each block, and records in a trace what blocks hold whole.

    Args:
        partition: a value of the flag ``partition``.
        min_elements: smaller tensors are not partitioned.
    """

    label = "part"

    def __init__(self, partition: Any, min_elements: int = 1024) -> None:
        self._partition = parse_partition(partition)
        self._min_elements = min_elements
        self._stores: dict[str, Store] = {}
        self._trace: Trace | None = None
        self._ahead_bytes: dict[int, int] = {}
        self.has_compared = False
        """Whether a tensor was kept whole until the ranks had compared it; they do so once for equal tensors."""

    def listen(self, trace: Trace | None) -> dict[int, int]:
        """Records in ``trace`` from now on; ``None`` stops recording.

        Returns, by the number of a call, the bytes that were recorded for the all-gather of its parts.
        """
        self._trace = trace
        found, self._ahead_bytes = self._ahead_bytes, {}
        return found

    def open_group(self, group: TensorGroup) -> TensorGroup | None:
        """Opens the group of one call."""
        if group.block not in self._stores:
            self._stores[group.block] = Placement(None, self._partition, min_elements=self._min_elements).store
        return self._stores[group.block].open_group(group)

    def put(self, tensor: torch.Tensor, group: TensorGroup | None) -> object:
        """Stores ``tensor`` and returns its key."""
        assert group is not None
        store = self._stores[group.block]
        return _PartitionKey(store, store.put(tensor, group), self._trace)

    def get(self, key: object) -> torch.Tensor | None:
        """Returns the stored tensor."""
        assert isinstance(key, _PartitionKey)
        return key.store.get(key.key)

    def close_group(self, group: TensorGroup | None) -> None:
        """Closes the group."""
        assert group is not None
        num_whole = len(_pieces(group, is_cut=False))
        with warnings.catch_warnings():  # an option that partitions little shows in its bytes
            warnings.filterwarnings("ignore", message=".*already sharded, left whole")
            self._stores[group.block].close_group(group)
        self.has_compared |= len(_pieces(group, is_cut=False)) < num_whole
        cut = _pieces(group, is_cut=True)
        sizes = [
            piece.store.gathered_bytes(piece.handle.num_bytes) for piece in cut if isinstance(piece.store, ShardedStore)
        ]
        if len(sizes) > 1:
            sizes.append(sum(piece.store.stored_bytes(piece.handle.num_bytes) for piece in cut))  # as one buffer
        if sizes and self._trace is not None:
            call = len(self._trace.calls) - 1
            self._ahead_bytes[call] = self._ahead_bytes.get(call, 0) + sum(sizes)


def settle(stores: Collection[PartitionStore], step: Callable[[], object]) -> None:
    """Runs a step until the ranks have compared all of its tensors; they do so equally often."""
    for _ in range(_MOST_RUNS):
        if not any(store.has_compared for store in stores):
            break
        for store in stores:
            store.has_compared = False
        step()


def _pieces(group: TensorGroup, *, is_cut: bool) -> list[Piece]:
    return [piece for piece in pieces_of(group) if (whole_bytes(piece.handle) is None) == is_cut]


@final
class _PartitionKey:
    """A key, and the tensors that its block holds whole."""

    __slots__ = ("__weakref__", "_held", "_trace", "key", "store")

    def __init__(self, store: Store, key: object, trace: Trace | None) -> None:
        self.store = store
        self.key = key
        self._trace = trace
        self._held = [] if trace is None else [trace.hold(tensor) for tensor in _whole(key)]

    def __del__(self) -> None:
        for held in self._held:
            assert self._trace is not None
            self._trace.release(held)


def _whole(key: object) -> Iterator[torch.Tensor]:
    """Yields the tensors of a key that are not partitioned."""
    if isinstance(key, torch.Tensor):
        yield key
    elif isinstance(key, WrappedKey):
        for inner in key.keys:
            yield from _whole(inner)
    elif isinstance(key, TensorKey):
        whole = whole_bytes(key.piece.handle)
        if whole is not None:
            yield whole
