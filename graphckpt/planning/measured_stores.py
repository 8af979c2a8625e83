"""Stores of a step that is measured: they simulate offloading, and partition the tensors of each block alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final
from weakref import ref

import torch
from torch import nn

from graphckpt._compat import unseen_by_modes
from graphckpt.stores.base import Store, TensorGroup
from graphckpt.stores.partition import ShardedStore, parse_partition, unsplit_bytes
from graphckpt.stores.placement import Placement
from graphckpt.stores.tensor_store import Piece, pieces_of
from graphckpt.undo import Undo, scope

if TYPE_CHECKING:
    from graphckpt.planning.level_meter import LevelMeter
    from graphckpt.planning.step_clock import Blocks

_MIN_ELEMENTS = 1024  # of a tensor to offload, as in stores by default
_MOST_RUNS = 3  # of a step that keeps something new each time


class MeasuredStore(Store):
    """Counts what it moves in a meter, while it has one."""

    meter: LevelMeter | None = None


@scope
def metered(undo: Undo, blocks: Blocks, meter: LevelMeter, stores: Sequence[MeasuredStore]) -> Iterator[None]:
    """Reads the levels of the step within the ``with`` block, and what these stores of blocks move."""
    for store in stores:
        undo.append((setattr, (store, "meter", None)))
        store.meter = meter
    with meter.metering(blocks):
        yield


@final
class SimulatedStore(MeasuredStore):
    """Keeps tensors on the device, or simulates offloading them.

    Args:
        far_blocks: simulate offloading of these blocks while a meter reads: the bytes of a tensor do not count until
            it is reloaded. The copies here are synchronous, to pageable memory, and must not be timed: plans add the
            time of copies from the rates of the device.
    """

    label = "device"

    def __init__(self, far_blocks: Collection[str] = ()) -> None:
        self._far_blocks = frozenset(far_blocks)
        self._offloaded: dict[int, ref[_OffloadedStorage]] = {}

    def open_group(self, group: TensorGroup) -> TensorGroup:
        return group

    def put(self, tensor: torch.Tensor, group: TensorGroup | None) -> object:
        assert group is not None
        if (
            self.meter is None
            or group.block not in self._far_blocks
            or tensor.numel() < _MIN_ELEMENTS
            or isinstance(tensor, nn.Parameter)
            or any(tensor.untyped_storage() is other.untyped_storage() for other in group.tensors())
        ):
            return tensor.detach()
        storage = tensor.untyped_storage()  # which sparse tensors lack
        reference = self._offloaded.get(id(storage))
        # Several blocks may save one storage, which is offloaded once; an id may be that of a later storage.
        copy = reference() if reference is not None else None
        if copy is None or copy.storage() is not storage:
            copy = _OffloadedStorage(tensor)
            self._offloaded[id(storage)] = ref(copy)
            self.meter.far_bytes[self.meter.call] += copy.num_bytes
        layout = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        return _OffloadedView(copy, tensor.dtype, layout)

    def get(self, key: object) -> torch.Tensor | None:
        if isinstance(key, torch.Tensor):
            return key
        assert isinstance(key, _OffloadedView)
        key.flat = key.storage.reload()
        return key.flat.view(key.dtype).as_strided(*key.layout)

    def close_group(self, group: TensorGroup | None) -> None: ...  # blocks hold the tensors


@final
class _OffloadedStorage:
    """An offloaded storage: a copy that does not count until it is reloaded."""

    __slots__ = ("__weakref__", "_copy", "_device", "_reloaded", "num_bytes", "storage")

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.storage = ref(storage)
        self.num_bytes = storage.nbytes()
        self._device = tensor.device
        with unseen_by_modes():
            self._copy = None if storage.device.type == "meta" else storage.cpu().clone()
        self._reloaded: ref[torch.Tensor] | None = None

    def reload(self) -> torch.Tensor:
        flat = self._reloaded() if self._reloaded is not None else None
        if flat is None:
            flat = torch.empty(self.num_bytes, dtype=torch.uint8, device=self._device)
            if self._copy is not None:
                with unseen_by_modes():
                    flat.untyped_storage().copy_(self._copy)
            self._reloaded = ref(flat)
        return flat


@final
@dataclass(slots=True)
class _OffloadedView:
    storage: _OffloadedStorage
    dtype: torch.dtype
    layout: tuple[tuple[int, ...], tuple[int, ...], int]
    flat: torch.Tensor | None = None
    """The reloaded storage, which lives as long as one of its views."""


@final
class PartitionStore(MeasuredStore):
    """Partitions saved tensors, with a store for each block.

    A step under a plan has one store for all such blocks, which prefetches the parts of the next block while a block's
    backward runs. Here each block has one, so that levels show what the block alone does;
    :class:`~graphckpt.planning.search.PolicySearch` then adds what is prefetched.
    """

    label = "part"

    def __init__(self, partition: Any) -> None:
        self._partition = parse_partition(partition)
        self._stores: dict[str, Store] = {}
        self.has_compared = False
        """Whether a tensor was kept whole until the ranks had compared it; they do so once for equal tensors."""

    def open_group(self, group: TensorGroup) -> TensorGroup | None:
        if group.block not in self._stores:
            self._stores[group.block] = Placement(None, self._partition).store
        return self._stores[group.block].open_group(group)

    def put(self, tensor: torch.Tensor, group: TensorGroup | None) -> object:
        assert group is not None
        store = self._stores[group.block]
        return store, store.put(tensor, group)

    def get(self, key: object) -> torch.Tensor | None:
        assert isinstance(key, tuple)
        store, inner = key
        result: torch.Tensor | None = store.get(inner)
        return result

    def close_group(self, group: TensorGroup | None) -> None:
        assert group is not None
        num_whole = len(_pieces(group, is_cut=False))
        with warnings.catch_warnings():  # an option that partitions little shows in its bytes
            warnings.filterwarnings("ignore", message=".*already sharded, left whole")
            self._stores[group.block].close_group(group)
        self.has_compared |= len(_pieces(group, is_cut=False)) < num_whole
        parts = _pieces(group, is_cut=True)
        sizes = [p.store.gathered_bytes(p.handle.num_bytes) for p in parts if isinstance(p.store, ShardedStore)]
        if len(sizes) > 1:
            sizes.append(sum(p.store.stored_bytes(p.handle.num_bytes) for p in parts))  # copied into one buffer
        if sizes and self.meter is not None:
            self.meter.ahead_bytes[self.meter.call] += sum(sizes)


def settle(stores: Collection[PartitionStore], step: Callable[[], object]) -> None:
    """Runs a step until the ranks have compared all of its tensors; they do so equally often."""
    for _ in range(_MOST_RUNS):
        if not any(store.has_compared for store in stores):
            break
        for store in stores:
            store.has_compared = False
        step()


def _pieces(group: TensorGroup, *, is_cut: bool) -> list[Piece]:
    return [piece for piece in pieces_of(group) if (unsplit_bytes(piece.handle) is None) == is_cut]
