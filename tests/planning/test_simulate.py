"""A walk over intervals that are looked up is the walk entry by entry."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from graphckpt.planning.memory_model import Change, EventSeq, LiveState
from graphckpt.planning.program import EventKind, PrivateRun

SIZES = (10, 7, 3)


def test_an_example_to_read_first():
    interval = [
        PrivateRun(5, 2),
        Change(EventKind.BORN, 1, 10),
        Change(EventKind.HELD, 1, 10),
        Change(EventKind.GONE, 1, 10),
    ]
    walked = {}
    state = LiveState(100)
    state.advance(EventSeq(interval, walked))
    assert (state.level, state.peak) == (112, 112)
    state.advance(EventSeq([Change(EventKind.RELEASED, 1, 10)], walked))
    assert (state.level, state.peak) == (102, 112)


changes = st.builds(lambda kind, s: Change(kind, s, SIZES[s]), st.sampled_from(EventKind), st.integers(0, 2))
runs = st.builds(lambda above, change: PrivateRun(max(above, change, 0), change), st.integers(0, 9), st.integers(-5, 9))
intervals = st.lists(st.lists(changes | runs, max_size=6), min_size=1, max_size=6)


@given(intervals, st.sets(st.integers(0, 2)), st.sets(st.integers(0, 2)), st.data())
def test_it_is_the_walk_entry_by_entry(intervals, others, held, data):
    walked = {}
    steps = [EventSeq(interval, walked) for interval in intervals]
    order = data.draw(st.lists(st.integers(0, len(intervals) - 1), max_size=12))
    state = LiveState(50, others, held)
    level = peak = 50
    others, holders = set(others), Counter(held)
    for number in order:
        state.advance(steps[number])
        for step in intervals[number]:
            if isinstance(step, PrivateRun):
                peak, level = max(peak, level + step.peak), level + step.change
                continue
            before = step.storage in others or holders[step.storage] > 0
            if step.kind in (EventKind.BORN, EventKind.GONE):
                (others.add if step.kind is EventKind.BORN else others.discard)(step.storage)
            else:
                holders[step.storage] += 1 if step.kind is EventKind.HELD else -1
            after = step.storage in others or holders[step.storage] > 0
            level += step.num_bytes * (after - before)
            peak = max(peak, level)
    assert (state.level, state.peak) == (level, peak)


def test_equal_intervals_share_what_they_lead_to(monkeypatch):
    count, walk = [], EventSeq._simulate
    monkeypatch.setattr(EventSeq, "_simulate", lambda steps, holders: count.append(steps) or walk(steps, holders))
    walked, state = {}, LiveState()
    for storage in range(100):
        state.advance(
            EventSeq([PrivateRun(9, 1), Change(EventKind.BORN, storage, 4), Change(EventKind.HELD, storage, 4)], walked)
        )
    assert (state.level, state.peak, len(count)) == (500, 504, 1)
