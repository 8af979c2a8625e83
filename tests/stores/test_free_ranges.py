"""The places of a slab: they never overlap, and to find one takes the same time however many there are."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphckpt.stores.slab import FreeRanges
from graphckpt.stores.tensor_store import empty


def test_a_gap_is_filled_first_and_neighbours_join() -> None:
    """The plain case, to be read first."""
    ranges = FreeRanges()
    assert [ranges.allocate(10) for _ in range(5)] == [0, 10, 20, 30, 40]
    for begin in (10, 30, 20):
        ranges.free(begin, begin + 10)
    assert ranges.allocate(30) == 10
    ranges.free(40, 50)
    assert ranges.end == 40


@given(st.lists(st.tuples(st.sampled_from(("allocate", "free")), st.integers(0, 60), st.integers(1, 15)), max_size=60))
def test_ranges_are_those_of_a_set_of_numbers(calls: list[tuple[str, int, int]]) -> None:
    """Each call is that of a plain set, and the same calls return the same ranges once all are freed."""
    ranges = FreeRanges()

    def step() -> list[Any]:
        taken: dict[int, set[int]] = {}
        results: list[Any] = []
        for what, begin, size in calls:
            used = set().union(*taken.values())
            if what == "free" and taken:
                first = sorted(taken)[begin % len(taken)]
                ranges.free(first, max(taken.pop(first)) + 1)
            elif what == "allocate":
                first = next(at for at in itertools.count() if used.isdisjoint(range(at, at + size)))
                results.append(ranges.allocate(size))
                assert results[-1] == first
                taken[first] = set(range(first, first + size))
            assert ranges.end == max(set().union(*taken.values()), default=-1) + 1
        for first in sorted(taken, key=lambda first: hash((first, len(calls)))):
            ranges.free(first, max(taken[first]) + 1)
        assert ranges.end == 0
        return results

    assert step() == step()


def seconds_a_step(num_puts: int) -> float:
    ranges = FreeRanges()
    best = float("inf")
    for _ in range(6):
        began = time.process_time()
        begins = [ranges.allocate(1024) for _ in range(num_puts)]
        for begin in reversed(begins):
            ranges.free(begin, begin + 1024)
        best = min(best, (time.process_time() - began) / num_puts)
    return best


def test_a_put_takes_the_same_time_however_many_are_alive() -> None:
    """Eight times as many would take eight times as long if each looked at all that are alive."""
    assert seconds_a_step(1600) < 3 * seconds_a_step(200)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_empty_tensors_share_nothing(dtype: torch.dtype) -> None:
    first, second = empty(dtype, torch.device("cpu")), empty(dtype, torch.device("cpu"))
    first.set_(torch.ones(4, dtype=dtype).untyped_storage(), 0, (4,), (1,))
    assert second.numel() == 0
    assert second._version == 0
    assert first.dtype == second.dtype == dtype
    with torch.inference_mode():
        assert empty(dtype, torch.device("cpu")).numel() == 0
