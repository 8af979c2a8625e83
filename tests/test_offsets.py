"""Packing of ranges: nothing that is alive at once overlaps, and a stack is packed without a gap."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from graphckpt.stores.ranges import ALIGN, Lifetime, SlabPlan, aligned, lower_bound, plan_offsets

SIZES = st.integers(1, 5000)


def overlaps(one: Lifetime, other: Lifetime) -> bool:
    return one[1] < other[2] and other[1] < one[2]


@st.composite
def any_trace(draw: st.DrawFn) -> list[Lifetime]:
    ranges = draw(st.lists(st.tuples(SIZES, st.integers(0, 40), st.integers(1, 40)), max_size=30))
    return [(size, begin, begin + length) for size, begin, length in ranges]


@st.composite
def stack_trace(draw: st.DrawFn) -> list[Lifetime]:
    """Puts and frees, each free of what was put last, as forward and backward of a chain do it."""
    open_ranges: list[tuple[int, int]] = []
    done: list[Lifetime] = []
    moment = 0
    for size in draw(st.lists(st.one_of(st.none(), SIZES), max_size=40)):
        if size is not None:
            open_ranges.append((size, moment))
        elif open_ranges:
            done.append((*open_ranges.pop(), moment))
        moment += 1
    while open_ranges:
        done.append((*open_ranges.pop(), moment))
        moment += 1
    return done


def test_the_step_of_a_chain() -> None:
    forward_backward = [(1000, 0, 5), (2000, 1, 4), (3000, 2, 3)]
    assert plan_offsets(forward_backward) == ([0, 1024, 3072], 6144)


@given(any_trace())
def test_what_is_alive_at_once_does_not_overlap(trace: list[Lifetime]) -> None:
    offsets, slab = plan_offsets(trace)
    for i, one in enumerate(trace):
        assert offsets[i] % ALIGN == 0
        assert offsets[i] + one[0] <= slab
        for j in range(i):
            if overlaps(one, trace[j]):
                assert offsets[i] + one[0] <= offsets[j] or offsets[j] + trace[j][0] <= offsets[i]
    assert lower_bound(trace) <= slab <= sum(aligned(size) for size, _, _ in trace)


@given(stack_trace())
def test_a_stack_takes_no_more_than_what_is_alive(trace: list[Lifetime]) -> None:
    assert plan_offsets(trace)[1] == lower_bound(trace)


Step = list[tuple[str, int]]


@st.composite
def step_trace(draw: st.DrawFn) -> Step:
    """``("put", size)`` and ``("free", which of those that are alive)``."""
    return draw(st.lists(st.one_of(st.tuples(st.just("put"), SIZES), st.tuples(st.just("free"), st.integers(0, 5)))))


def play(slab: SlabPlan, step: Step) -> tuple[int, int]:
    """Runs a step; returns how many puts there were and how many had a place. Checks that no two in use overlap."""
    slab.begin_step()
    alive: dict[int, tuple[int, int]] = {}
    held: list[int] = []
    placed = total = 0
    for what, value in step:
        if what == "put":
            number, offset = slab.put(value)
            held.append(number)
            total += 1
            if offset is not None:
                placed += 1
                assert offset + value <= slab.num_bytes
                for low, high in alive.values():
                    assert high <= offset or offset + value <= low
                alive[number] = offset, offset + value
        elif held:
            number = held.pop(value % len(held))
            alive.pop(number, None)
            slab.free(number)
    for number in reversed(held):
        slab.free(number)
    return total, placed


@given(st.lists(step_trace(), min_size=1, max_size=5))
def test_a_step_that_was_seen_has_a_place_for_all(steps: list[Step]) -> None:
    slab = SlabPlan()
    for step in steps:
        play(slab, step)
        total, placed = play(slab, step)
        assert placed == total
        size = slab.num_bytes
        play(slab, step)
        assert slab.num_bytes == size


def test_a_step_of_an_old_shape_has_its_place_still() -> None:
    slab = SlabPlan()
    short: Step = [("put", 300), ("put", 500), ("free", 1), ("free", 0)]
    long: Step = [("put", 3000), ("put", 5000), ("free", 1), ("free", 0)]
    for step in (short, long):
        assert play(slab, step)[1] == 0
    for step in (short, long, long, short):
        assert play(slab, step) == (2, 2)
    slab.begin_step()
    assert slab.num_bytes == 8192


def test_what_outlives_its_step_keeps_its_place() -> None:
    slab = SlabPlan()
    play(slab, [("put", 1000), ("free", 0)])
    slab.begin_step()
    leaked, offset = slab.put(1000)
    assert offset == 0
    slab.begin_step()
    assert slab.put(1000)[1] is None  # nobody has freed it
    slab.free(leaked)
    slab.begin_step()
    assert slab.put(1000)[1] == 0
