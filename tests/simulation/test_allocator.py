"""The simulated caching allocator: its rules, properties of random sequences, and a second, plain implementation."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.layer_stacks import linear_layers
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import graphckpt
from graphckpt.simulation.allocations import AllocationLog, Replay, fits, least_capacity, replay
from graphckpt.simulation.allocator import AllocatorRules, CachingAllocator, CapacityError, SegmentBlock
from graphckpt.units import format_bytes

MIB = 2**20
EXPANDABLE = AllocatorRules(expandable_segments=True)
UNSPLIT = AllocatorRules(max_split_bytes=32 * MIB)
RULES = (AllocatorRules(), EXPANDABLE, UNSPLIT)


@pytest.mark.parametrize(
    ("num_bytes", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_sizes_of_segments(num_bytes: int, segment: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(num_bytes)
    assert allocator.reserved_bytes == segment


def test_the_rest_of_a_large_segment_is_split_off_above_a_mebibyte() -> None:
    allocator = CachingAllocator()
    allocator.allocate(11 * MIB)  # of a segment of 12 MiB
    assert allocator.allocated_bytes == 12 * MIB
    allocator = CachingAllocator()
    allocator.allocate(9 * MIB)  # of a segment of 20 MiB
    assert allocator.allocated_bytes == 9 * MIB
    allocator.allocate(10 * MIB)  # which takes the rest, as 1 MiB is not split off
    assert allocator.allocated_bytes == allocator.reserved_bytes == 20 * MIB


def test_small_and_large_sizes_and_streams_and_captures_do_not_share_segments() -> None:
    allocator = CachingAllocator()
    for options in ({}, {"stream": 1}, {"private_pool": 1}):
        allocator.allocate(512, **options)
        allocator.allocate(2 * MIB, **options)
    assert allocator.reserved_bytes == 3 * 22 * MIB


def test_free_segments_are_released_where_there_is_no_memory_for_another_one() -> None:
    allocator = CachingAllocator(capacity=64 * MIB)
    block = allocator.allocate(40 * MIB)
    with pytest.raises(CapacityError):
        allocator.allocate(50 * MIB)
    allocator.free(block)
    allocator.allocate(50 * MIB)
    assert allocator.reserved_bytes == 50 * MIB
    assert allocator.num_retries == 2


def test_a_split_segment_is_not_released() -> None:
    allocator = CachingAllocator(capacity=64 * MIB)
    block, _ = allocator.allocate(30 * MIB), allocator.allocate(8 * MIB)
    allocator.free(block)
    part = allocator.allocate(25 * MIB)
    assert part.size == 25 * MIB
    assert allocator.reserved_bytes == 50 * MIB
    with pytest.raises(CapacityError):
        allocator.allocate(40 * MIB)


def test_large_blocks_are_not_split_with_a_largest_size() -> None:
    allocator = CachingAllocator(UNSPLIT, capacity=100 * MIB)
    block = allocator.allocate(64 * MIB)
    allocator.free(block)
    allocator.allocate(24 * MIB)
    assert allocator.reserved_bytes == 88 * MIB, "a block above 32 MiB is not for smaller ones"
    allocator.allocate(40 * MIB)
    assert allocator.reserved_bytes == 64 * MIB, "nor for one that is more than 20 MiB smaller: it is released"
    assert not allocator.num_retries


def test_an_expandable_segment_grows_by_pages() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    first = allocator.allocate(30 * MIB)
    assert allocator.reserved_bytes == 40 * MIB
    allocator.allocate(30 * MIB)
    assert allocator.reserved_bytes == 60 * MIB
    allocator.free(first)
    allocator.release_free_segments()
    assert allocator.reserved_bytes == 40 * MIB, "one page is free as a whole"
    allocator.allocate(20 * MIB)
    assert allocator.reserved_bytes == 60 * MIB
    allocator.allocate(10 * MIB)
    assert allocator.reserved_bytes == 60 * MIB


def test_rules_of_the_environment() -> None:
    assert AllocatorRules.of_environment({}) == AllocatorRules()
    values = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert AllocatorRules.of_environment(values) == EXPANDABLE
    assert AllocatorRules.of_environment({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:32"}) == UNSPLIT
    text = "garbage_collection_threshold:0.8,max_split_size_mb:many"
    assert AllocatorRules.of(text) == AllocatorRules(ignored=("garbage_collection_threshold",))


SIZES = st.sampled_from([1, 512, 513, 4000, MIB, MIB + 1, 3 * MIB, 9 * MIB, 10 * MIB, 15 * MIB, 33 * MIB, 70 * MIB])
ACTIONS = st.lists(st.one_of(SIZES, st.integers(-8, -1), st.just(0)), max_size=60)
"""A size is allocated, a negative number frees a block, and 0 releases free segments."""


def run(allocator: CachingAllocator | PlainAllocator, actions: list[int]) -> list[tuple[int, int]]:
    """Returns reserved and allocated bytes after each action; -1 where an allocation does not fit."""
    blocks: list[Any] = []
    levels = []
    for action in actions:
        try:
            if action > 0:
                blocks.append(allocator.allocate(action))
            elif action < 0 and blocks:
                allocator.free(blocks.pop(action % len(blocks)))
            elif action == 0:
                allocator.release_free_segments()
        except CapacityError:
            levels.append((-1, -1))
        levels.append((allocator.reserved_bytes, allocator.allocated_bytes))
    return levels


@pytest.mark.parametrize("rules", RULES)
@given(actions=ACTIONS)
def test_blocks_never_overlap_and_sums_are_right(rules: AllocatorRules, actions: list[int]) -> None:
    allocator = CachingAllocator(rules, capacity=400 * MIB)
    blocks: list[SegmentBlock] = []
    for action in actions:
        if action > 0:
            try:
                blocks.append(allocator.allocate(action))
            except CapacityError:
                continue
            assert blocks[-1].size >= action
        elif action < 0 and blocks:
            allocator.free(blocks.pop(action % len(blocks)))
        elif action == 0:
            allocator.release_free_segments()
        used = [(block.address, block.size) for block in blocks]
        free = [(address, size) for pool in allocator._pools.values() for size, address in pool.free]
        ranges = sorted(used + free)
        assert all(begin + size <= after for (begin, size), (after, _) in pairwise(ranges))
        assert sum(size for _, size in used) == allocator.allocated_bytes
        assert sum(size for _, size in ranges) == allocator.reserved_bytes <= 400 * MIB
        ends = {begin + size for begin, size in free}
        for begin, _ in free:  # neighbours are merged
            assert begin not in ends
    for block in blocks:
        allocator.free(block)
    allocator.release_free_segments()
    assert allocator.allocated_bytes == allocator.reserved_bytes == 0


class PlainAllocator:
    """The same rules on lists: a segment is a list of ``[size, is_free]``, which is searched from its begin."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.segments: list[tuple[bool, list[list[Any]]]] = []

    @property
    def reserved_bytes(self) -> int:
        return sum(block[0] for _, blocks in self.segments for block in blocks)

    @property
    def allocated_bytes(self) -> int:
        return sum(block[0] for _, blocks in self.segments for block in blocks if not block[1])

    def allocate(self, num_bytes: int) -> list[Any]:
        size = (num_bytes + 511) // 512 * 512
        is_small = size <= MIB
        options = [b for small, blocks in self.segments if small == is_small for b in blocks if b[1] and b[0] >= size]
        block = min(options, key=lambda b: b[0], default=None)
        if block is None:
            segment = (
                2 * MIB if is_small else 20 * MIB if size < 10 * MIB else (size + 2 * MIB - 1) // MIB // 2 * 2 * MIB
            )
            if self.reserved_bytes + segment > self.capacity:
                self.release_free_segments()
            if self.reserved_bytes + segment > self.capacity:
                raise CapacityError(size, self.reserved_bytes + segment)
            block = [segment, True]
            self.segments.append((is_small, [block]))
        blocks = next(blocks for _, blocks in self.segments if any(b is block for b in blocks))
        rest = block[0] - size
        if rest >= 512 if is_small else rest > MIB:
            block[0] = size
            blocks.insert(1 + next(n for n, b in enumerate(blocks) if b is block), [rest, True])
        block[1] = False
        return block

    def free(self, block: list[Any]) -> None:
        block[1] = True
        for _, blocks in self.segments:
            merged: list[list[Any]] = []
            for each in blocks:
                if merged and merged[-1][1] and each[1]:
                    merged[-1][0] += each[0]
                else:
                    merged.append(each)
            blocks[:] = merged

    def release_free_segments(self) -> None:
        self.segments = [(small, b) for small, b in self.segments if len(b) > 1 or not b[0][1]]


@given(actions=ACTIONS)
@example([33 * MIB, *[70 * MIB] * 4])  # more than there is
def test_a_plain_implementation_agrees(actions: list[int]) -> None:
    assert run(CachingAllocator(capacity=300 * MIB), actions) == run(PlainAllocator(300 * MIB), actions)


def log(*steps: list[tuple[int, int]]) -> AllocationLog:
    """Returns the log of storages, each with its bytes where it is born, and with 0 where it is freed."""
    sizes = {storage: num_bytes for step in steps for storage, num_bytes in step if num_bytes}
    entries = [[storage if num_bytes else ~storage for storage, num_bytes in step] for step in steps]
    return AllocationLog(entries, [sizes.get(storage, 0) for storage in range(max(sizes) + 1)])


def test_a_step_is_repeated_with_storages_of_its_own() -> None:
    two = log([(0, 512)], [(1, 4 * MIB), (2, 512)], [(1, 0), (3, 4 * MIB), (4, 512), (4, 0)])
    repeated = two.repeated(4)
    _, _, _, third, fourth = repeated.steps
    assert third == [~3, 5, 6, ~6]
    assert repeated.sizes[5:] == 2 * [4 * MIB, 512]
    assert fourth[0] == ~5, "what the second step frees of the first, each step frees of the one before it"
    many = replay(two, num_steps=50)
    assert many.reserved_bytes == replay(two).reserved_bytes
    assert many.allocated_bytes == 4 * MIB + 1024 + 512


def test_least_capacity_is_where_later_steps_release_nothing() -> None:
    first = [(0, 30 * MIB), (0, 0), (1, 40 * MIB), (1, 0)]
    two = log([], first, [(2, 30 * MIB), (2, 0), (3, 40 * MIB), (3, 0)])
    assert replay(two).reserved_bytes == 70 * MIB
    least = least_capacity(two)
    assert fits(two, least)
    assert not fits(two, least - 2 * MIB)
    assert least < 42 * MIB
    assert replay(two, capacity=least).retries == (0, 1, 0, 0), "the first step releases what the later ones reuse"


def test_a_replay_is_the_same_from_what_it_reserves_to_what_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    first = [(0, 300 * MIB), (0, 0), (1, 400 * MIB), (1, 0)]
    two = log([(9, 200 * MIB)], first, [(2, 300 * MIB), (2, 0), (3, 400 * MIB), (3, 0)])
    limited = replay(two, capacity=800 * MIB)
    assert (limited.reserved_bytes, limited.refused_bytes) == (600 * MIB, 900 * MIB)
    assert all(replay(two, capacity=mib * MIB) == limited for mib in (600, 700, 899))
    assert replay(two, capacity=900 * MIB) != limited
    with pytest.raises(CapacityError) as error:
        replay(two, capacity=550 * MIB)
    assert error.value.refused_bytes == 600 * MIB
    capacities: list[int | None] = []

    def counting(log: AllocationLog, rules: AllocatorRules, capacity: int | None = None) -> Replay:
        capacities.append(capacity)
        return replay(log, rules, capacity)

    monkeypatch.setattr("graphckpt.simulation.allocations.replay", counting)
    assert least_capacity(two) == 600 * MIB
    assert len(capacities) == 2, "without a limit, and once between the 600 MiB in use and the 900 MiB it reserves"


def test_the_memory_of_a_captured_step_is_its_own() -> None:
    two = log([(0, 30 * MIB)], [(1, 12 * MIB), (1, 0)], [(2, 12 * MIB), (2, 0)])
    assert replay(two).reserved_bytes == 42 * MIB
    captured = replay(two, capture_after=2)
    assert captured.reserved_bytes == 42 * MIB, "what the warm-up has freed is released before the capture"
    live = log([(0, 30 * MIB)], [(1, 12 * MIB), (9, 2 * MIB), (1, 0)], [(2, 12 * MIB), (2, 0)])
    assert replay(live).reserved_bytes == 62 * MIB
    assert replay(live, capture_after=2).reserved_bytes == 62 * MIB


def test_the_page_of_a_plan_shows_what_the_device_will(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, Callable[[], object]]:
        model, x = linear_layers(3, 64, nn.ReLU), torch.zeros(4096, 64)
        return model, lambda: model(x).sum().backward()

    plan = graphckpt.plan(make, device="rtx3060", memory_budget="max", candidates=["full"])
    shown = f"shown by nvidia-smi: {format_bytes(plan.predicted_reserved_bytes + 512 * MIB)}"
    assert shown in " ".join(str(plan).split())
    assert shown in plan.plot(tmp_path / "plan.html").read_text(encoding="utf-8")
    assert plan.predicted_reserved_bytes > plan.predicted_peak_bytes
