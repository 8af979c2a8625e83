"""What the flag takes, when it does nothing, and the arithmetic of slices and checksums; in one process."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import graphckpt
from graphckpt import ConfigError
from graphckpt.stores import Group, Partition, Placement, parse_partition
from graphckpt.stores.ranks import Arrival, Ranks
from graphckpt.stores.replicas import _CHUNK, checksum
from graphckpt.stores.shard import Shard


def test_values_of_the_flag() -> None:
    assert parse_partition(None) is None
    assert parse_partition(False) is None
    assert parse_partition(True) == Partition(True, 300.0)
    given_whole = Partition(timeout_seconds=5)
    assert parse_partition(given_whole) is given_whole
    for wrong in (4, "tp", [0, 1], 1.0):
        with pytest.raises(ConfigError, match="names no ranks · fix: use True, a ProcessGroup, a DeviceMesh"):
            parse_partition(wrong)
    for wrong in (0, -1.0, True, float("nan")):
        with pytest.raises(ConfigError, match="no time to wait · fix: give seconds above 0"):
            Partition(timeout_seconds=wrong)


def test_without_other_ranks_it_does_nothing_and_says_why() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with graphckpt.apply(model, {"*": {"activation_checkpointing": True, "partition": True}}) as handle:
        x = torch.randn(32, 64, requires_grad=True)
        model(x).sum().backward()
        rows = handle.explain(show=False).rows
    assert [row.note for row in rows] == ["partition: does nothing, torch.distributed is not initialised"] * 2
    store: Any = Placement(partition=True).store
    notes: list[str] = []
    tensor = torch.randn(2000)
    key = store.put(tensor, store.open(Group("block", lambda: (), notes.append)))
    assert key.data_ptr() == tensor.data_ptr()
    assert notes == ["partition: does nothing, torch.distributed is not initialised"]


def ranks_of(size: int, rank: int) -> Any:
    group: Any = SimpleNamespace(size=lambda: size, rank=lambda: rank)
    made = Ranks.__new__(Ranks)
    made.process_group, made.size, made.rank = group, size, rank
    made.members, made.limit = list(range(size)), timedelta(seconds=1)
    return made


@settings(deadline=None)
@given(num_bytes=st.lists(st.integers(1, 300), min_size=1, max_size=4), size=st.integers(2, 9))
def test_slices_join_to_the_whole(num_bytes: list[int], size: int) -> None:
    """Each rank holds one slice of every piece, all of equal length; laid side by side they are the pieces."""
    pieces = [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in num_bytes]
    shards = [Shard(ranks_of(size, rank), torch.device("cpu"), None) for rank in range(size)]
    slices = [[shard._slice_of(piece) for piece in pieces] for shard in shards]
    lengths = [[part.numel() for part in row] for row in slices]
    assert lengths == [[shards[0].stored_bytes(n) for n in num_bytes]] * size
    assert all(length % 16 == 0 and (length - 16) * size < n for length, n in zip(lengths[0], num_bytes, strict=True))
    arrival = Arrival.__new__(Arrival)
    arrival._ranks, arrival._block, arrival._lengths, arrival._runs = ranks_of(size, 0), "block", lengths[0], []
    arrival._whole = torch.cat([part for row in slices for part in row])
    arrival._work = SimpleNamespace(wait=lambda: True)
    runs = [arrival.take(index) for index in range(len(pieces))]
    assert all(torch.equal(run[: piece.numel()], piece) for run, piece in zip(runs, pieces, strict=True))
    assert all(run.storage_offset() == 0 for run in runs)
    assert arrival._runs == [None] * len(pieces)
    assert arrival._whole is None


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
