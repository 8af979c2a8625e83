"""Ranks that do not agree, are late or die: one error on the others, within the limit, that says what and where."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.layer_stacks import stack_of
from helpers.ranks import launch, say_done
from torch import nn

import graphckpt
from graphckpt import StoreError
from graphckpt.stores import Partition, Placement, TensorGroup

LIMIT_SECONDS = 2.0


X = torch.ones(64, 32)


@contextmanager
def cut_layers(pattern: str, partition: Any, **more: Any) -> Iterator[tuple[nn.Module, graphckpt.Handle]]:
    """Layers of which those that the pattern selects are recomputed from what is cut over the ranks."""
    torch.manual_seed(0)
    model = stack_of(lambda: nn.Sequential(nn.Linear(32, 32)), 3)
    with graphckpt.apply(
        model, {pattern: {"activation_checkpointing": True, "partition": partition, **more}}
    ) as handle:
        yield model, handle


def assert_empty(handle: graphckpt.Handle) -> None:
    assert all(wrapper.placement.store.num_alive == 0 for wrapper in handle._wrappers if wrapper.placement)


def fresh() -> Partition:
    """A group that no earlier failure has touched."""
    return Partition(dist.new_group(), timeout_seconds=LIMIT_SECONDS)


def fails(run: Callable[[], Any], *words: str) -> None:
    """The call raises an error that holds all words, well before gloo's own limit."""
    started = time.monotonic()
    with pytest.raises(StoreError) as caught:
        run()
    message = str(caught.value)
    assert all(word in message for word in (*words, "partition: ", " · fix: ")), message
    assert time.monotonic() - started < LIMIT_SECONDS + 10
    del caught
    gc.collect()  # a traceback holds its frames, and these the tensors


def faults(rank: int, folder: str) -> None:
    other_policies(rank)
    other_blocks(rank)
    other_sizes(rank)
    never_comes(rank)
    goes_on_without_it(rank)
    stops_in_backward(rank)
    no_longer_equal(rank)
    dies(rank, folder)


def other_policies(rank: int) -> None:
    with cut_layers("1", fresh(), contiguous=rank == 1) as (model, handle):
        fails(lambda: model(X), "1: ", "'part on cpu", "'slab part on cpu", "rank 0", "rank 1")
        assert_empty(handle)


def other_blocks(rank: int) -> None:
    with cut_layers(str(rank), fresh()) as (model, _):
        fails(lambda: model(X), f"{rank}: ", "the same block on all ranks", "'0' on rank 0 and '1' on rank 1")


def other_sizes(rank: int) -> None:
    store: Any = Placement(partition=fresh()).store
    group = store.open_group(TensorGroup("block", lambda: (), lambda _: None))
    key = store.put(torch.ones(2000 + 500 * rank), group)
    fails(lambda: store.close_group(group), "block: ", "[8000]", "[10000]")
    assert torch.equal(store.get(key), torch.ones(2000 + 500 * rank))


def never_comes(rank: int) -> None:
    """The second run of shapes that all ranks have seen needs no word; other shapes do, and one rank has none."""
    with cut_layers("2", fresh()) as (model, _):
        model(X).sum().backward()
        if rank == 0:
            fails(lambda: model(torch.ones(65, 32)), "2: ", "rank 1 did not join at this block", "within 2 s")
    meet()


def goes_on_without_it(rank: int) -> None:
    """A rank that does not cut at all is missed as well."""
    partition = fresh()
    with cut_layers("0", partition if rank == 1 else None) as (model, _):
        if rank == 1:
            fails(lambda: model(X), "0: ", "rank 0 did not join")
        else:
            model(X).sum().backward()
    meet()


def stops_in_backward(rank: int) -> None:
    """Forward ran on both ranks; one of them does not gather."""
    with cut_layers("[01]", fresh()) as (model, handle):
        loss = model(X).sum()
        if rank == 0:
            fails(loss.backward, "1: ", "over 2 ranks [0, 1] within 2 s", "timeout_seconds")
        del loss
        assert_empty(handle)
    meet()


def no_longer_equal(rank: int) -> None:
    """A first batch may be equal on all ranks, such as one of ones, and the next ones not."""
    with cut_layers("[01]", fresh()) as (model, _):
        for _ in range(2):
            model(X).sum().backward()
        loss = model(X + rank).sum()
        fails(loss.backward, "1: ", "differ from those that this rank saved", "the same data")
        del loss
    meet()


def dies(rank: int, folder: str) -> None:
    """One rank is killed between its forward and its backward."""
    with cut_layers("[01]", True) as (model, _):
        model(X).sum().backward()
        loss = model(X).sum()
        if rank == 1:
            say_done(rank, folder)
            os._exit(0)
        fails(loss.backward, "1: ", "over 2 ranks [0, 1]", "rank is gone")


def meet() -> None:
    """Waits until both ranks are here, by words: a collective after a failed one may be taken for it."""
    store: Any = dist.distributed_c10d._get_default_store()
    number = store.add("meetings", 1)
    wanted = number + number % 2
    deadline = time.monotonic() + 30
    while store.add("meetings", 0) < wanted:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.multi_process
@pytest.mark.slow
def test_ranks_fail_together(tmp_path: Path) -> None:
    launch(faults, 2, tmp_path, str(tmp_path))
