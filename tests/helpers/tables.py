"""Chains as tables, drawn at random, for the tests of the solvers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from graphckpt.planning.frontier import COVERED, Frontier, Move, peak, seconds


@dataclass
class Table:
    """A chain whose moves stand in a table."""

    seconds: list[list[float]]
    moves: dict[tuple[int, int, Hashable], Move]
    base: int = 0
    fixed_peak: int = 0
    start: Hashable = 0
    asked: list[tuple[int, int, Hashable]] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        return len(self.seconds)

    def options(self, block: int) -> Sequence[float]:
        return self.seconds[block]

    def move(self, block: int, option: int, held: Hashable) -> Move | None:
        self.asked.append((block, option, held))
        return self.moves.get((block, option, held))


def random_table(
    seed: int,
    num_blocks: int,
    num_options: int,
    states: int = 2,
    *,
    coarse: bool = True,
    gaps: bool = True,
    longest: int = 1,
) -> Table:
    """Draws a chain. ``coarse`` numbers are small, so that ties are common; ``gaps`` forbid some options.

    Some options decide about up to ``longest`` blocks at once.
    """
    rng = np.random.default_rng(seed)
    most = 8 if coarse else 10**9
    tick = 2.0**-3 if coarse else 2.0**-32  # sums of these are exact
    moves: dict[tuple[int, int, Hashable], Move] = {}
    for block, option, held in product(range(num_blocks), range(num_options), range(states)):
        if gaps and option and rng.random() < 0.1:
            continue
        forward, kept, backward = (int(number) for number in rng.integers(0, most, 3))
        if rng.random() < 0.1:
            kept = -kept // 2
        length = 1 + (seed + 3 * block + option) % min(longest, num_blocks - block) if option else 1
        moves[block, option, held] = Move(forward, kept, backward, int(rng.integers(0, states)), length=length)
    return Table(
        [[int(t) * tick for t in rng.integers(0, most, num_options)] for _ in range(num_blocks)],
        moves,
        base=int(rng.integers(0, most)),
        fixed_peak=int(rng.integers(0, 2 * most)),
    )


def all_outcomes(chain: Table) -> list[tuple[float, int, tuple[int, ...]]]:
    """Returns seconds, peak and plan of every plan that is allowed; their least is the best."""
    begun: list[tuple[float, int, tuple[int, ...], int, Hashable]] = [
        (0.0, chain.fixed_peak, (), chain.base, chain.start)
    ]
    done = []
    while begun:
        spent, highest, plan, level, held = begun.pop()
        block = len(plan)
        if block == chain.num_blocks:
            done.append((spent, highest, plan))
            continue
        for option, took in enumerate(chain.seconds[block]):
            move = chain.moves.get((block, option, held))
            if move is not None:
                after = level + move.change
                high = max(highest, level + move.forward_peak, after + move.backward_peak)
                more = (option, *[COVERED] * (move.length - 1))
                begun.append((spent + took, high, plan + more, after, move.state))
    return done


def cheapest(chain: Table, budget: int) -> tuple[int, ...] | None:
    """Returns the fastest plan that fits."""
    return Frontier(chain).fastest(budget)


def least_peak(chain: Table) -> tuple[tuple[int, ...], int]:
    """Returns the plan with the lowest peak, and its peak."""
    plan = Frontier(chain).least_peak()
    return plan, peak(chain, plan)


def pareto(chain: Table, most: int = 64) -> list[tuple[int, float, tuple[int, ...]]]:
    """Returns peak, seconds and plan of those of which none is better in both."""
    return [(peak(chain, plan), seconds(chain, plan), plan) for plan in Frontier(chain).plans(most)]
