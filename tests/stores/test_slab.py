"""The places of a slab: they never overlap, and to find one takes the same time however many there are."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphckpt.stores.empty import empty
from graphckpt.stores.slab.slab_plan import Ranges, SlabPlan

SIZES = st.lists(st.integers(1, 2000), min_size=1, max_size=40)


def test_ranges_that_overlap_are_refused() -> None:
    """The plain case, to be read first."""
    ranges = Ranges()
    assert ranges.add(100, 200)
    assert not ranges.add(199, 300)
    assert not ranges.add(0, 101)
    assert not ranges.add(120, 130)
    assert ranges.add(200, 300)
    assert ranges.add(0, 100)
    ranges.remove(100, 200)
    assert ranges.gap(100) == 100
    assert ranges.gap(101) == 300


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 15), st.booleans()), max_size=60))
def test_ranges_are_those_of_a_set_of_numbers(steps: list[tuple[int, int, bool]]) -> None:
    ranges, taken = Ranges(), {}
    for begin, size, removes in steps:
        if removes and taken:
            first = min(taken)
            ranges.remove(first, max(taken[first]) + 1)
            del taken[first]
        wanted = set(range(begin, begin + size))
        is_free = all(wanted.isdisjoint(numbers) for numbers in taken.values())
        assert ranges.add(begin, begin + size) == is_free
        if is_free:
            taken[begin] = wanted
        gap = ranges.gap(size)
        assert all(set(range(gap, gap + size)).isdisjoint(numbers) for numbers in taken.values())


@given(SIZES, SIZES, st.randoms())
def test_puts_never_overlap_in_or_off_plan(planned: list[int], other: list[int], dice: object) -> None:
    slab = SlabPlan()
    for sizes in (planned, planned, other, planned, other):
        slab.begin_step()
        alive: dict[int, tuple[int, int]] = {}
        for size in sizes:
            number, begin = slab.put(size, slab.num_bytes)
            if begin is None:
                begin = slab.put_in_gap(number, size, slab.num_bytes)
            if begin is not None:
                assert begin + size <= slab.num_bytes
                assert all(begin + size <= low or high <= begin for low, high in alive.values())
                alive[number] = begin, begin + size
            if alive and dice.random() < 0.3:  # type: ignore[attr-defined]
                gone = dice.choice(list(alive))  # type: ignore[attr-defined]
                del alive[gone]
                slab.free(gone)
        for number in list(alive):
            slab.free(number)


def seconds_a_put(num_puts: int) -> float:
    slab = SlabPlan()
    best = float("inf")
    for _ in range(6):
        slab.begin_step()
        began = time.process_time()
        numbers = [slab.put(1000)[0] for _ in range(num_puts)]
        best = min(best, (time.process_time() - began) / num_puts)
        for number in numbers:
            slab.free(number)
    return best


def test_a_put_takes_the_same_time_however_many_are_alive() -> None:
    """Eight times as many would take eight times as long if each looked at all that are alive."""
    assert seconds_a_put(1600) < 3 * seconds_a_put(200)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_empty_tensors_share_nothing(dtype: torch.dtype) -> None:
    first, second = empty(dtype, torch.device("cpu")), empty(dtype, torch.device("cpu"))
    first.set_(torch.ones(4, dtype=dtype).untyped_storage(), 0, (4,), (1,))
    assert second.numel() == 0
    assert second._version == 0
    assert first.dtype == second.dtype == dtype
    with torch.inference_mode():
        assert empty(dtype, torch.device("cpu")).numel() == 0
