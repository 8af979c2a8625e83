"""Values of `partition`, cases without effect, and the arithmetic of slices and checksums; in one process."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import graphckpt
from graphckpt import ConfigError
from graphckpt.stores import Partition, Placement, TensorGroup, Traffic, parse_partition
from graphckpt.stores.base import ByteHandle, ByteStore
from graphckpt.stores.partition import _CHUNK, PendingGather, RankGroup, ShardedStore, checksum


def test_values_of_the_flag() -> None:
    assert parse_partition(None) is None
    assert parse_partition(False) is None
    assert parse_partition(True) == Partition(True, 300.0)
    given_whole = Partition(timeout_seconds=5)
    assert parse_partition(given_whole) is given_whole
    for wrong in (4, "tp", [0, 1], 1.0):
        with pytest.raises(ConfigError, match=r"expected a process group or a device mesh, got .* · fix: use True"):
            parse_partition(wrong)
    for wrong in (0, -1.0, True, float("nan")):
        with pytest.raises(ConfigError, match=r"timeout_seconds: expected a positive number, got .* · fix"):
            Partition(timeout_seconds=wrong)


def test_without_other_ranks_it_does_nothing_and_says_why() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with graphckpt.apply(model, {"*": {"activation_checkpointing": True, "partition": True}}) as handle:
        x = torch.randn(32, 64, requires_grad=True)
        model(x).sum().backward()
        rows = handle.explain(show=False).rows
    assert [row.note for row in rows] == ["partition has no effect: torch.distributed is not initialized"] * 2
    store: Any = Placement(partition=True).store
    notes: list[str] = []
    tensor = torch.randn(2000)
    key = store.put(tensor, store.open_group(TensorGroup("block", lambda: (), notes.append)))
    assert key.data_ptr() == tensor.data_ptr()
    assert notes == ["partition has no effect: torch.distributed is not initialized"]


def ranks_of(size: int, rank: int) -> Any:
    group: Any = SimpleNamespace(size=lambda: size, rank=lambda: rank)
    made = RankGroup.__new__(RankGroup)
    made.process_group, made.size, made.rank = group, size, rank
    made.members, made.limit = list(range(size)), timedelta(seconds=1)
    return made


@given(num_bytes=st.lists(st.integers(1, 300), min_size=1, max_size=4), size=st.integers(2, 9))
def test_slices_join_to_the_whole(num_bytes: list[int], size: int) -> None:
    """Each rank holds one slice of every piece, all of equal length; laid side by side they are the pieces."""
    pieces = [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in num_bytes]
    shards = [ShardedStore(ranks_of(size, rank), torch.device("cpu"), None) for rank in range(size)]
    slices = [[shard._slice_of(piece) for piece in pieces] for shard in shards]
    lengths = [[part.numel() for part in row] for row in slices]
    assert lengths == [[shards[0].stored_bytes(n) for n in num_bytes]] * size
    assert all(length % 16 == 0 and (length - 16) * size < n for length, n in zip(lengths[0], num_bytes, strict=True))
    arrival = PendingGather.__new__(PendingGather)
    arrival._ranks, arrival._block, arrival._lengths, arrival._runs = ranks_of(size, 0), "block", lengths[0], []
    arrival._output = torch.cat([part for row in slices for part in row])
    arrival._work = SimpleNamespace(wait=lambda: True)
    runs = [arrival.take(index) for index in range(len(pieces))]
    assert all(torch.equal(run[: piece.numel()], piece) for run, piece in zip(runs, pieces, strict=True))
    assert all(run.storage_offset() == 0 for run in runs)
    assert arrival._runs == [None] * len(pieces)
    assert arrival._output is None


class Beneath(ByteStore):
    """A place that writes down what is asked of it."""

    label = "beneath"
    tier = "host"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.kept: dict[ByteHandle, torch.Tensor] = {}

    def put(self, data: torch.Tensor, group: TensorGroup) -> ByteHandle:
        handle = ByteHandle(data.numel())
        self.kept[handle] = data.clone()
        return handle

    def get(self, handle: ByteHandle, group: TensorGroup) -> torch.Tensor:
        self.calls.append(f"get {handle.num_bytes}")
        return self.kept[handle].clone()

    def free(self, handle: ByteHandle) -> None:
        del self.kept[handle]

    def prefetch(self, handles: Sequence[ByteHandle], group: TensorGroup) -> None:
        self.calls.append(f"prefetch {[handle.num_bytes for handle in handles]}")

    def close_group(self, group: TensorGroup) -> None:
        self.calls.append("close group")

    def begin_step(self) -> None:
        self.calls.append("begin step")

    def stored_bytes(self, num_bytes: int) -> int:
        return num_bytes + 1

    def close(self) -> None:
        self.calls.append("close")


def test_a_place_beneath_holds_slices_and_whole_pieces() -> None:
    """It is told two groups ahead to bring slices to the device, and holds what differs whole."""
    beneath = Beneath()
    shard = ShardedStore(ranks_of(2, 1), torch.device("cpu"), beneath)
    shard._compare_ranks = lambda pieces, group: [True, False]  # type: ignore[method-assign]
    sent: list[list[torch.Tensor]] = []
    pieces = [torch.arange(100, dtype=torch.uint8), torch.arange(50, dtype=torch.uint8)]

    def gather(slices: Sequence[torch.Tensor], block: str) -> Any:
        sent.append(list(slices))
        return SimpleNamespace(take=lambda run: pieces[run], drop=lambda run: None)

    object.__setattr__(shard, "_ranks", SimpleNamespace(rank=1, size=2, gather=gather))
    traffic = Traffic()
    group = TensorGroup("block", lambda: (), lambda _: None, traffic)
    shard.begin_step()
    handles = [shard.put(piece, group) for piece in pieces]
    assert beneath.kept == {}
    shard.close_group(group)
    assert [kept.tolist() for kept in beneath.kept.values()] == [[*range(64, 100), *[0] * 28], list(range(50))]
    assert (shard.tier, shard.label, shard.stored_bytes(100)) == ("host", "beneath part", 65)
    assert traffic.bytes_at["host"] == (50 + 1) - (32 + 1), "what the front end has counted too little"
    shard.hint(handles, group)
    shard.prefetch(handles, group)
    assert [[part.numel() for part in slices] for slices in sent] == [[64]]
    assert torch.equal(shard.get(handles[0], group), pieces[0])
    assert torch.equal(shard.get(handles[1], group), pieces[1])
    for handle in handles:
        shard.free(handle)
    assert beneath.kept == {}
    shard.close()
    assert beneath.calls == [
        "begin step",
        "close group",
        "prefetch [64, 50]",
        "prefetch [64, 50]",
        "get 64",
        "get 50",
        "close",
    ]


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_each_piece_is_freed_once_its_slice_is_stored(is_offloaded: bool) -> None:
    beneath = Beneath()
    shard = ShardedStore(ranks_of(2, 1), torch.device("cpu"), beneath if is_offloaded else None)
    shard._compare_ranks = lambda pieces, group: [True] * len(pieces)  # type: ignore[method-assign]
    group = TensorGroup("block", lambda: (), lambda _: None)
    pieces = [torch.ones(4096, dtype=torch.uint8) for _ in range(3)]
    storages = [weakref.ref(piece.untyped_storage()) for piece in pieces]
    slice_of, alive = shard._slice_of, []

    def counting(data: torch.Tensor) -> torch.Tensor:
        alive.append(sum(storage() is not None for storage in storages))
        return slice_of(data)

    shard._slice_of = counting  # type: ignore[method-assign]
    handles = [shard.put(pieces.pop(), group) for _ in range(3)]
    shard.close_group(group)
    assert len(handles) == 3
    assert alive == [3, 2, 1]


@pytest.mark.parametrize("num_bytes", [1, 7, 8, 9, 4096, 8 * _CHUNK, 8 * _CHUNK + 8, 24 * _CHUNK + 5])
def test_checksum_sees_each_bit_and_where_it_stands(num_bytes: int) -> None:
    torch.manual_seed(0)
    data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    seen = {int(checksum(data))}
    assert int(checksum(data.clone())) in seen
    places = sorted({0, num_bytes // 2, num_bytes - 1, min(num_bytes - 1, 8 * _CHUNK - 1)})
    for place in places:
        for bit in (1, 128):
            other = data.clone()
            other[place] ^= bit
            seen.add(int(checksum(other)))
    assert len(seen) == 1 + 2 * len(places)


def test_checksum_sees_tensors_that_changed_places() -> None:
    """Rows that two ranks hold in another order, zeros of another length, and signs that moved are not equal."""
    rows = torch.randn(64, 64)
    sign = torch.zeros(64, 64)
    variants = [rows, rows.flip(0), rows.flip(1), rows.roll(1, 0), rows.t().contiguous(), -rows]
    variants += [torch.zeros(n) for n in (1, 2, 3, 64, 65)]
    for place in ((0, 1), (1, 1), (63, 63), (5, 0)):
        moved = sign.clone()
        moved[place] = -0.0
        variants.append(moved)
    sums = [int(checksum(tensor.view(torch.uint8).flatten())) for tensor in variants]
    assert len(set(sums)) == len(sums)
