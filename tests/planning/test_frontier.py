"""The dynamic programme, held against all plans of small chains."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from helpers.tables import Table, all_outcomes, cheapest, least_peak, pareto, random_table

from graphckpt.errors import ConfigError
from graphckpt.planning.frontier import Frontier, Move, levels, peak, seconds


def keep_or_recompute(num_blocks: int) -> Table:
    """Keeps 10 bytes a block in 2 seconds, or 1 byte in 3 seconds and 10 in backward; the head takes 5."""
    moves = {}
    for block in range(num_blocks):
        head = 15 if block == num_blocks - 1 else 12  # which follows the last forward
        moves[block, 0, 0] = Move(forward_peak=head, change=10, backward_peak=2, state=0)
        moves[block, 1, 0] = Move(forward_peak=12, change=1, backward_peak=12, state=0)
    return Table([[2.0, 3.0]] * num_blocks, moves, base=100, fixed_peak=110)


def test_an_example_to_read_first() -> None:
    chain = keep_or_recompute(3)
    assert levels(chain, (1, 0, 0)) == [112, 113, 126, 123, 113, 113, 110]  # three forwards, three backwards, the rest
    assert seconds(chain, (1, 0, 0)) == 7
    assert cheapest(chain, 135) == (0, 0, 0)
    assert cheapest(chain, 134) == (0, 1, 0)  # (1, 0, 0) has the same peak, 126, and comes later in order
    assert cheapest(chain, 125) == (1, 1, 0)
    assert least_peak(chain) == ((1, 1, 1), 115)
    assert cheapest(chain, 114) is None
    assert pareto(chain) == [
        (115, 9.0, (1, 1, 1)),
        (117, 8.0, (1, 1, 0)),
        (126, 7.0, (0, 1, 0)),
        (135, 6.0, (0, 0, 0)),
    ]


@pytest.mark.parametrize("longest", [1, 4])
@pytest.mark.parametrize("seed", range(40))
def test_the_result_is_that_of_trying_all_plans(seed: int, longest: int) -> None:
    sizes = np.random.default_rng(seed)
    num_blocks, num_options = (int(size) for size in sizes.integers(1, 6, 2))
    chain = random_table(seed, num_blocks, num_options, coarse=seed % 2 == 0, longest=longest)
    outcomes = all_outcomes(chain)
    peaks = sorted({highest for _, highest, _ in outcomes})
    front = Frontier(chain)
    for budget in [peaks[0] - 1, *peaks[:: max(1, len(peaks) // 20)], peaks[-1] + 1]:
        fits = [row for row in outcomes if row[1] <= budget]
        assert front.fastest(budget) == (min(fits)[2] if fits else None)
    assert cheapest(chain, peaks[-1]) == min(outcomes)[2]
    first = min(row for row in outcomes if row[1] == peaks[0])[2]
    assert least_peak(chain) == (first, peaks[0])


@pytest.mark.parametrize("seed", range(20))
def test_peak_and_seconds_are_those_of_a_walk_by_hand(seed: int) -> None:
    chain = random_table(seed, 4, 3, longest=3)
    for spent, highest, plan in all_outcomes(chain):
        assert (seconds(chain, plan), peak(chain, plan)) == (spent, highest)


@pytest.mark.parametrize("seed", range(20))
def test_the_front_holds_all_plans_that_none_beats(seed: int) -> None:
    chain = random_table(seed, 4, 4)
    pairs = {(highest, spent) for spent, highest, _ in all_outcomes(chain)}
    unbeaten = sorted(one for one in pairs if not any(o != one and o[0] <= one[0] and o[1] <= one[1] for o in pairs))
    assert [(highest, time) for highest, time, _ in pareto(chain, most=10**6)] == unbeaten


@pytest.mark.parametrize("most_labels", [64, 16])
@pytest.mark.parametrize("seed", range(4))
def test_a_large_chain_keeps_its_budget_and_is_never_slower_with_more(seed: int, most_labels: int) -> None:
    chain = random_table(seed, 30, 6, states=3, coarse=False, gaps=False)
    front = Frontier(chain, most_labels)
    assert not front.is_exact
    floor = peak(chain, front.least_peak())
    assert floor == least_peak(chain)[1]  # thinning leaves it
    ceiling = max(peak(chain, (option,) * 30) for option in range(6))
    times = []
    for budget in np.linspace(floor, ceiling, 40).astype(int):
        plan = front.fastest(int(budget))
        assert plan is not None
        assert peak(chain, plan) <= budget
        times.append(seconds(chain, plan))
    assert all(later <= earlier for earlier, later in pairwise(times))


def test_equal_blocks_are_exact_however_many() -> None:
    chain = keep_or_recompute(100)
    front = Frontier(chain)
    assert front.is_exact
    for budget in (300, 500, 900):
        plan = front.fastest(budget)
        assert plan is not None
        recomputed = sum(plan)
        assert peak(chain, plan) <= budget
        assert peak(chain, (1,) * (recomputed - 1) + (0,) * (101 - recomputed)) > budget


def test_ties_do_not_depend_on_the_order_of_a_sum() -> None:
    chain = keep_or_recompute(3)
    chain.seconds = [[0.1, 0.1 + 1e-3], [0.2, 0.2 + 1e-3], [0.3, 0.3 + 1e-3]]
    assert cheapest(chain, 134) == (0, 1, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"fixed_peak": 5000},
        {"block": (1, Move(900, 1, 12, 0))},
        {"block": (2, Move(12, 1, 900, 0))},
    ],
    ids=["fixed", "forward", "backward"],
)
def test_nothing_is_below_the_floor_that_any_interval_sets(change: dict[str, object]) -> None:
    chain = keep_or_recompute(4)
    if "block" in change:
        block, move = change["block"]
        chain.moves[block, 0, 0] = chain.moves[block, 1, 0] = move
    else:
        vars(chain).update(change)
    plan, floor = least_peak(chain)
    assert cheapest(chain, floor - 1) is None
    assert peak(chain, plan) == floor > 900


def test_a_fixed_peak_above_all_others_leaves_the_fastest_plan() -> None:
    chain = keep_or_recompute(4)
    chain.fixed_peak = 5000
    assert least_peak(chain)[0] == (0, 0, 0, 0)
    assert pareto(chain) == [(5000, 8.0, (0, 0, 0, 0))]


def test_a_state_without_a_way_on_is_avoided() -> None:
    chain = keep_or_recompute(2)
    chain.moves[0, 0, 0] = Move(12, 10, 2, state=1)  # the next block allows nothing in this state
    assert cheapest(chain, 10**6) == (1, 0)


def test_a_chain_that_allows_nothing_says_so() -> None:
    chain = keep_or_recompute(2)
    del chain.moves[1, 0, 0], chain.moves[1, 1, 0]
    with pytest.raises(ConfigError, match=r"no plan of the chain is allowed · fix"):
        cheapest(chain, 10**6)
    with pytest.raises(ConfigError, match=r"block 1: option 0 is not allowed after 0 · fix"):
        peak(chain, (0, 0))


def test_each_move_is_asked_for_once() -> None:
    chain = random_table(0, 10, 4, gaps=False)
    front = Frontier(chain)
    assert len(chain.asked) == len(set(chain.asked))
    front.fastest(10**9)
    assert len(chain.asked) == len(set(chain.asked))
