"""Times with copies, held against a clock that ticks; searches, held against all plans."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from helpers.tables import Table, cheapest

from graphckpt.planning.frontier import Move, peak
from graphckpt.planning.search import CopyTiming, schedule_copies, search_offload


def a_timing(moved: list[list[int]], **settings: float) -> CopyTiming:
    """Blocks of 2 seconds forward and 3 backward, and of 5 backward with option 1; a byte is copied in a second."""
    forward, backward = [[2.0] * 3 for _ in moved], [[3.0, 5.0, 3.0] for _ in moved]
    settings = {"out_rate": 1.0, "back_rate": 1.0} | settings
    return CopyTiming(forward_seconds=forward, backward_seconds=backward, moved_bytes=moved, **settings)


def test_an_example_to_read_first() -> None:
    times = schedule_copies(a_timing([[0, 0, 3]] * 4), (2, 2, 2, 0))
    # block   0    1     2     3
    # runs   0-2  2-4   5-7  8-10    1 waits at its end for 0 to be out (5), 2 for 1 (8)
    # out    2-5  5-8   8-11         the last that moves is on the device still when backward wants it
    assert times.forward_ends == (2, 4, 7, 10)
    assert times.out_ends == {0: 5, 1: 8, 2: 11}
    # B3 runs 10-13, B2 13-16, and as it begins block 1 is loaded: 13-16; block 0 then: 16-19
    assert times.back_ends == {1: 16, 0: 19}
    assert times.backward_ends == (22, 19, 16, 13)
    assert times.in_flight == (0, 3, 3, 3, 3, 3, 3, 0)
    assert times.seconds == 22


class Clock:
    """Computes and copies in ticks of a second, as a host store would order it, with a queue for each engine."""

    def __init__(self, timing: CopyTiming, plan: tuple[int, ...]) -> None:
        self.sizes = [timing.moved_bytes[block][option] for block, option in enumerate(plan)]
        out_ticks, back_ticks = ([int(n / rate) for n in self.sizes] for rate in (timing.out_rate, timing.back_rate))
        self.on_device: set[int] = set()
        self.out: list[list[int]] = []
        self.back: list[list[int]] = []
        self.is_out: dict[int, int] = {}
        self.is_back: dict[int, int] = {}
        self.ends: dict[tuple[str, int], int] = {}
        self.in_flight: list[int] = []
        self.now = 0
        going: list[int] = []
        for block, option in enumerate(plan):
            self.run("forward", block, int(timing.forward_seconds[block][option]))
            if self.sizes[block]:
                self.out.append([block, out_ticks[block]])
                going.append(block)
                self.on_device.add(block)
                while len(going) > 1:
                    first = going.pop(0)
                    while first not in self.is_out:
                        self.tick()
                    self.on_device.remove(first)
        self.run("head", -1, 0)
        to_come = [block for block in range(len(plan)) if self.sizes[block]]
        for block in reversed(range(len(plan))):
            if self.sizes[block]:
                to_come.pop()
                for other in [block, *reversed(to_come[-1:])]:
                    if other not in self.on_device:
                        self.on_device.add(other)
                        self.back.append([other, back_ticks[other]])
                        self.is_back[other] = -1
                while self.is_back.get(block) == -1:
                    self.tick()
            self.run("backward", block, int(timing.backward_seconds[block][plan[block]]))
            self.on_device.discard(block)

    def run(self, kind: str, block: int, ticks: int) -> None:
        self.in_flight.append(sum(self.sizes[other] for other in self.on_device - {block}))
        for _ in range(ticks):
            self.tick()
        self.ends[kind, block] = self.now

    def tick(self) -> None:
        self.now += 1
        for queue, ended in ((self.out, self.is_out), (self.back, self.is_back)):
            if queue:
                queue[0][1] -= 1
                if not queue[0][1]:
                    ended[queue.pop(0)[0]] = self.now


def random_timing(rng: np.random.Generator, num_blocks: int, num_options: int, **settings: float) -> CopyTiming:
    def table(least: int, most: int) -> list[list[int]]:
        return [[int(x) for x in rng.integers(least, most, num_options)] for _ in range(num_blocks)]

    moved = [[size if number >= 2 else 0 for number, size in enumerate(row)] for row in table(1, 9)]
    settings = {"out_rate": 1.0, "back_rate": 1.0} | settings
    return CopyTiming(forward_seconds=table(1, 6), backward_seconds=table(1, 9), moved_bytes=moved, **settings)


@pytest.mark.parametrize("seed", range(80))
def test_times_are_those_of_a_clock_that_ticks(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_blocks = int(rng.integers(1, 9))
    out_rate, back_rate = rng.choice([1.0, 0.5, 0.25], 2)
    timing = random_timing(rng, num_blocks, 4, out_rate=out_rate, back_rate=back_rate)
    plan = tuple(int(option) for option in rng.integers(0, 4, num_blocks))
    times, clock = schedule_copies(timing, plan), Clock(timing, plan)
    assert times.forward_ends == tuple(clock.ends["forward", block] for block in range(num_blocks))
    assert times.backward_ends == tuple(clock.ends["backward", block] for block in range(num_blocks))
    *forward, last, head = clock.in_flight[: num_blocks + 1]  # after the last forward, what it holds itself counts too
    assert times.in_flight == (*forward, max(last, head), *clock.in_flight[num_blocks + 1 :])
    assert times.seconds == clock.now
    assert times.back_ends == clock.is_back
    assert clock.is_out.items() <= times.out_ends.items()  # the clock stops with the computation


def test_blocks_between_that_move_nothing_leave_bytes_in_flight() -> None:
    """See Note [The window counts blocks that move]."""
    times = schedule_copies(a_timing([[0, 0, 3]] * 4), (2, 0, 0, 0))
    assert times.in_flight == (0, 3, 3, 3, 3, 3, 3, 0)
    assert not times.back_ends


def a_chain(rng: np.random.Generator, num_blocks: int, most: int = 14) -> tuple[Table, CopyTiming]:
    """Keeps, recomputes, or moves; times and sizes near each other, so that copies are sometimes waited for."""
    moves, times, forward, backward, moved = {}, [], [], [], []
    for block in range(num_blocks):
        size, small = int(rng.integers(8, most)), int(rng.integers(0, 3))
        f, b = int(rng.integers(4, 9)), int(rng.integers(6, 13))
        forward.append([f, f, f])
        backward.append([b, b + f, b])
        times.append([f + b, f + b + f, f + b])
        moved.append([0, 0, size])
        for held in (0, 1):
            shared = 0 if held else 2
            moves[block, 0, held] = Move(size + 3, size, 4, 0)
            moves[block, 1, held] = Move(size + 3, small + shared, size + 4, 1)
            moves[block, 2, held] = Move(size + 3, 0, size + 4, 0)
    rate = float(rng.choice([0.8, 1.5, 3.0]))
    timing = CopyTiming(
        forward_seconds=forward,
        backward_seconds=backward,
        moved_bytes=moved,
        out_rate=rate,
        back_rate=rate,
    )
    return Table(times, moves, base=10, fixed_peak=12), timing


def best_of_all(chain: Table, timing: CopyTiming, budget: int) -> float:
    found = float("inf")
    for plan in product(range(3), repeat=chain.num_blocks):
        times = schedule_copies(timing, plan)
        if times.seconds < found and peak(chain, plan, times.in_flight) <= budget:
            found = times.seconds
    return found


def a_budget(chain: Table, rng: np.random.Generator) -> int:
    most, least = peak(chain, (0,) * chain.num_blocks), peak(chain, (1,) * chain.num_blocks)
    return int(least + rng.uniform(-0.1, 0.9) * (most - least))


@pytest.mark.parametrize("seed", range(16))
def test_an_improved_plan_fits_and_is_near_the_best(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    chain, timing = a_chain(rng, int(rng.integers(2, 5)))
    budget = a_budget(chain, rng)
    least = best_of_all(chain, timing, budget)
    given = cheapest(chain, budget)
    found = search_offload(chain, timing, budget, given)
    assert found == search_offload(chain, timing, budget, given)
    if found is None:
        assert least == float("inf")
        return
    times = schedule_copies(timing, found.plan)
    assert found.seconds == times.seconds
    assert found.peak == peak(chain, found.plan, times.in_flight) <= budget
    assert least <= found.seconds <= least * 1.005 + 1e-9
    times = schedule_copies(timing, given)
    if peak(chain, given, times.in_flight) <= budget:
        assert found.seconds <= times.seconds


@pytest.mark.parametrize("seed", range(6))
def test_no_plan_that_was_given_is_faster(seed: int) -> None:
    rng = np.random.default_rng(200 + seed)
    chain, timing = a_chain(rng, 12, most=60)
    given = search_offload(chain, timing, a_budget(chain, rng))
    assert given is not None
    found = search_offload(chain, timing, given.peak, given.plan, limit_seconds=0.0)
    assert found is not None
    assert found.peak <= given.peak
    assert found.seconds <= given.seconds
