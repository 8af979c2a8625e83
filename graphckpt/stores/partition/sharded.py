"""Stores one slice per rank of tensors that are equal on all ranks of a group, and all-gathers them for backward."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import final

import torch

from graphckpt._compat import assert_on_device
from graphckpt.errors import StoreError
from graphckpt.stores.base import TensorGroup
from graphckpt.stores.byte_store import ByteHandle, ByteStore, Tier
from graphckpt.stores.partition.ranks import PendingGather, RankGroup
from graphckpt.stores.partition.replica_check import ReplicaCheck, probe

# Note [Same calls on all ranks]
# Collectives match by their order. Which groups are gathered, and when, follows from what a step saves and requests, so
# ranks that run the same blocks on the same shapes issue the same all-gathers. That they do is checked on the first
# call of each block and sequence of sizes, by messages that cannot get out of order (`RankGroup.exchange`). From then
# on each rank compares a few words of what it gathers with what it saved: ranks may get other data later, or run in
# another order.

_ALIGN = 16  # bytes; slices begin where vectorised kernels may load


@final
class _ShardedHandle(ByteHandle):
    """Bytes as this rank stores them: whole, until the ranks have compared them."""

    __slots__ = ("__weakref__", "_gather", "_run", "inner", "is_split", "probe", "slice", "whole")

    def __init__(self, data: torch.Tensor) -> None:
        super().__init__(data.numel())
        self.whole: torch.Tensor | None = data
        """All bytes, an alias of the tensor's own memory."""
        self.is_split = False
        self.slice: torch.Tensor | None = None
        """This rank's bytes, if no inner store holds them."""
        self.inner: ByteHandle | None = None
        """The inner store's handle: to this rank's bytes, or to all of them."""
        self.probe: torch.Tensor | int = 0
        """The sum of a few words of the whole."""
        self._gather: PendingGather | None = None
        self._run = 0

    @property
    def is_gathering(self) -> bool:
        """Whether an all-gather of the slices is in progress."""
        return self._gather is not None

    def set_gather(self, gather: PendingGather, run: int) -> None:
        """Sets the all-gather in progress, and the position of the bytes in it."""
        self._gather, self._run = gather, run

    def wait(self) -> torch.Tensor:
        """Returns the gathered bytes, without the padding of the slices."""
        gather, self._gather = self._gather, None
        assert gather is not None
        return gather.take(self._run)[: self.num_bytes]

    def release(self) -> None:
        """Drops the slice; an all-gather in progress holds its own reference."""
        self.slice = self.whole = None

    def drop(self) -> None:
        """Drops all bytes."""
        if self._gather is not None:
            self._gather.drop(self._run)
        self._gather = self.whole = self.slice = self.inner = None


@final
class _GroupCheck:
    """The tensors of one group to compare between ranks when the group is closed."""

    __slots__ = ("key", "unknown")

    def __init__(self, block: str) -> None:
        self.key = hash(block)
        self.unknown: list[tuple[int, _ShardedHandle]] = []

    def next_key(self, num_bytes: int) -> int:
        """Returns a hash of the block and the sizes of its pieces up to this one."""
        self.key = hash((self.key, num_bytes))
        return self.key


@final
class ShardedStore(ByteStore):
    """Stores one slice per rank; bytes that are not equal on all ranks stay whole.

    Args:
        ranks: The ranks that share.
        device: The device of the tensors.
        inner: The byte store of the slices; ``None`` if they stay on the device.
    """

    def __init__(self, ranks: RankGroup, device: torch.device, inner: ByteStore | None) -> None:
        self._ranks = ranks
        self._inner = inner
        self.label = "part" if inner is None else f"{inner.label} part"
        self._replica_check = ReplicaCheck(ranks, f"{self.label} on {device.type} over ranks {ranks.members}")
        self._checks: weakref.WeakKeyDictionary[TensorGroup, _GroupCheck] = weakref.WeakKeyDictionary()

    @property
    def tier(self) -> Tier:
        """The kind of memory that holds the slices."""
        return "device" if self._inner is None else self._inner.tier

    def stored_bytes(self, num_bytes: int) -> int:
        """Returns the bytes of one slice."""
        return self._bytes_here(self._slice_bytes(num_bytes))

    @property
    def num_ranks(self) -> int:
        """Number of slices."""
        return self._ranks.size

    def gathered_bytes(self, num_bytes: int) -> int:
        """Returns the bytes of all slices of a piece."""
        return self._slice_bytes(num_bytes) * self._ranks.size

    def put(self, data: torch.Tensor, group: TensorGroup) -> ByteHandle:
        """Splits bytes known to be equal on all ranks; others stay whole until the group is closed."""
        handle = _ShardedHandle(data)
        call = self._checks.setdefault(group, _GroupCheck(group.block))
        key = call.next_key(handle.num_bytes)
        is_equal = self._replica_check.known(key)
        if is_equal is None:
            call.unknown.append((key, handle))
        else:
            self._store_slice(handle, group, is_equal=is_equal)
        return handle

    def close_group(self, group: TensorGroup) -> None:
        """Compares the group's new sizes between ranks, then splits what has stayed whole."""
        call = self._checks.pop(group, None)
        unknown = [] if call is None else [(k, t, t.whole) for k, t in call.unknown if t.whole is not None]
        if unknown:
            keys, handles, pieces = zip(*unknown, strict=True)
            equal = self._replica_check.check(keys, pieces, group)
            for handle, is_equal in zip(handles, equal, strict=True):
                self._store_slice(handle, group, is_equal=is_equal)
        if self._inner is not None:
            self._inner.close_group(group)

    def hint(self, handles: Sequence[ByteHandle], group: TensorGroup) -> None:
        """Prefetches this rank's bytes from the inner store, for the all-gather."""
        inner = [handle.inner for handle in _sharded(handles) if handle.inner is not None]
        if self._inner is not None and inner:
            self._inner.prefetch(inner, group)

    def prefetch(self, handles: Sequence[ByteHandle], group: TensorGroup) -> None:
        """Starts one all-gather for the whole group."""
        away = [handle for handle in _sharded(handles) if handle.whole is None and not handle.is_gathering]
        self.hint(away, group)
        split = [handle for handle in away if handle.is_split]
        if split:
            self._start_gather(split, group)

    def get(self, handle: ByteHandle, group: TensorGroup) -> torch.Tensor:
        """Returns the bytes, gathering them now if they were not prefetched (on every rank)."""
        assert isinstance(handle, _ShardedHandle)
        if handle.whole is not None:
            return handle.whole
        if not handle.is_split:
            return self._slice_of_handle(handle, group)
        if not handle.is_gathering:
            self._start_gather([handle], group)
        whole = handle.wait()
        self._compare(whole, handle, group)
        return whole

    def free(self, handle: ByteHandle) -> None:
        """Frees the slice."""
        assert isinstance(handle, _ShardedHandle)
        if self._inner is not None and handle.inner is not None:
            self._inner.free(handle.inner)
        handle.drop()

    def begin_step(self) -> None:
        """Begins a new step of the inner store."""
        if self._inner is not None:
            self._inner.begin_step()

    def close(self) -> None:
        """Closes the inner store."""
        if self._inner is not None:
            self._inner.close()

    def _store_slice(self, handle: _ShardedHandle, group: TensorGroup, *, is_equal: bool) -> None:
        """Stores this rank's slice, or all bytes if they are not equal on all ranks."""
        data = handle.whole
        assert data is not None
        if is_equal:
            own = self._slice_of(data)
            handle.is_split, handle.whole, handle.probe = True, None, probe(data)
        else:
            own = data
            if group.traffic is not None:  # `TensorStore` has counted a slice
                more = self._bytes_here(handle.num_bytes) - self.stored_bytes(handle.num_bytes)
                group.traffic.count(self.tier, more, handle)
        if self._inner is not None:
            handle.inner = self._inner.put(own, group)
            handle.whole = None
        elif is_equal:
            handle.slice = own

    def _slice_of(self, data: torch.Tensor) -> torch.Tensor:
        """Returns a copy of this rank's slice, padded with zeros."""
        num_bytes = self._slice_bytes(data.numel())
        part = data[self._ranks.rank * num_bytes :][:num_bytes]
        if part.numel() == num_bytes:
            return part.clone()
        own = data.new_zeros(num_bytes)
        own[: part.numel()] = part
        return own

    def _start_gather(self, handles: Sequence[_ShardedHandle], group: TensorGroup) -> None:
        gather = self._ranks.gather([self._slice_of_handle(handle, group) for handle in handles], group.block)
        for run, handle in enumerate(handles):
            handle.set_gather(gather, run)

    def _compare(self, whole: torch.Tensor, handle: _ShardedHandle, group: TensorGroup) -> None:
        """Checks that the ranks still save the same tensors: on the host for CPU tensors, else on the device."""
        ok = probe(whole) == handle.probe
        what = "gathered bytes differ from those that this rank saved: ranks save other tensors, or in another order"
        if isinstance(ok, torch.Tensor):
            assert_on_device(ok, f"{group.block}: partition: {what}")
        elif not ok:
            raise StoreError(
                f"{group.block}: partition: {what} · fix: partition only over ranks with the same data, such as"
                " tensor-parallel ranks, and run the same blocks in the same order on all of them"
            )

    def _slice_of_handle(self, handle: _ShardedHandle, group: TensorGroup) -> torch.Tensor:
        """Returns the bytes that this rank stores."""
        if handle.slice is not None:
            return handle.slice
        assert self._inner is not None
        assert handle.inner is not None
        return self._inner.get(handle.inner, group)

    def _slice_bytes(self, num_bytes: int) -> int:
        return -(-num_bytes // (self._ranks.size * _ALIGN)) * _ALIGN

    def _bytes_here(self, num_bytes: int) -> int:
        return num_bytes if self._inner is None else self._inner.stored_bytes(num_bytes)


def whole_bytes(handle: ByteHandle) -> torch.Tensor | None:
    """Returns all bytes, flat, if they are not split, or not yet."""
    return handle.whole if isinstance(handle, _ShardedHandle) else None


def _sharded(handles: Sequence[ByteHandle]) -> list[_ShardedHandle]:
    return [handle for handle in handles if isinstance(handle, _ShardedHandle)]
