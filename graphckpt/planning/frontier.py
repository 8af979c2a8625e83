"""Chooses an option for each block of a chain under a bound on the peak. Integers and numpy only."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from math import fsum
from typing import TYPE_CHECKING, Protocol, final

from graphckpt.errors import ConfigError
from graphckpt.extras import LazyPackage

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    _Labels = tuple[NDArray[np.int64], NDArray[np.int64]]
else:
    np = LazyPackage("numpy", "plan")

ChainPlan = tuple[int, ...]
"""The option of each block; ``COVERED`` if the option of an earlier block includes it."""

COVERED = -1


@final
@dataclass(frozen=True, slots=True)
class Move:
    """The effect of an option of one or several consecutive blocks on the memory level, in bytes."""

    forward_peak: int
    """Highest level in the block's forward and in what follows it before the next block, above the level before it."""
    change: int
    """How much the block's forward raises the level; may be 0 or negative."""
    backward_peak: int
    """Highest level in the block's backward, above the level after its forward."""
    state: Hashable
    """The state for the next block: what the effect of its options depends on."""
    length: int = 1
    """The number of blocks that the option includes: this one, and those after it."""


class Chain(Protocol):
    """A step as a chain of blocks with options."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def start(self) -> Hashable: ...

    @property
    def base(self) -> int: ...

    @property
    def fixed_peak(self) -> int:
        """The peak of the intervals that no option changes, such as the optimizer, in bytes."""

    def options(self, block: int) -> Sequence[float]:
        """The seconds of each option of a block, forward and backward, of all blocks that it includes."""

    def move(self, block: int, option: int, state: Hashable) -> Move | None:
        """The effect of the option; ``None`` if it is not allowed here."""


def levels(chain: Chain, plan: Sequence[int], in_flight: Sequence[int] | None = None) -> list[int]:
    """Returns the highest level of each interval in bytes, in the order of time, and the fixed peak last.

    ::

        level |     F1 __             __ B1       F_i: level before block i + forward_peak
              |  F0 __|  |_____------|  |__ B0    B_i: level after block i + backward_peak
              |  __|  |__|           |__|  |__    so both follow from the options of blocks 0..i
              +------------------------------> time

    Args:
        chain: The step.
        plan: An option for each block.
        in_flight: Additional bytes of the forwards in their order, and of the backwards in theirs.
    """
    level = chain.base
    forward, backward = [], []
    for _, _, move in _walk(chain, plan):
        forward.append(level + move.forward_peak)
        level += move.change
        backward.append(level + move.backward_peak)
    rows = [*forward, *reversed(backward)]
    if in_flight is not None:
        rows = [high + more for high, more in zip(rows, in_flight, strict=True)]
    return [*rows, chain.fixed_peak]


def peak(chain: Chain, plan: Sequence[int], in_flight: Sequence[int] | None = None) -> int:
    """Returns the peak of a plan in bytes; the arguments are those of :func:`levels`."""
    return max(levels(chain, plan, in_flight))


def seconds(chain: Chain, plan: Sequence[int]) -> float:
    return fsum(chain.options(block)[option] for block, option, _ in _walk(chain, plan))


def _walk(chain: Chain, plan: Sequence[int]) -> Iterator[tuple[int, int, Move]]:
    state = chain.start
    for block, option in enumerate(plan):
        if option == COVERED:
            continue
        move = chain.move(block, option, state)
        if move is None:
            text = f"block {block}: option {option} is not allowed after {state!r}"
            raise ConfigError(f"{text} · fix: choose another one")
        yield block, option, move
        state = move.state


_TICK = 1e-12  # seconds; sums of integers do not depend on their order, so that equal plans are equal
_MOST_TICKS = 2**62  # fits an int64
_NOTHING = -(2**61)  # bytes that are needed after the last block


@final
class Frontier:
    """The Pareto-optimal plans of a chain, for any budget.

    A plan of blocks ``i`` to the end needs bytes above the level before block ``i``::

        need = max(forward_peak, change + backward_peak, change + need of the blocks after it)

    Less need and fewer seconds after block ``i`` are never worse, so only the Pareto-optimal pairs (labels) are kept:
    from the last block to the first, for each state. This does not depend on a budget.

    If a block has more than ``most_labels`` in a state, they are divided into that many bands along the curve, and the
    fastest of each band is kept with its need: no plan needs more than predicted, and a larger budget is never
    slower.
    """

    def __init__(self, chain: Chain, most_labels: int = 4096) -> None:
        self._chain = chain
        self.is_exact = True
        """Whether no label was dropped."""
        self._moves, ends = _reach(chain)
        self._labels: list[dict[Hashable, _Labels]] = [{} for _ in self._moves]
        end = np.full(1, _NOTHING, np.int64), np.zeros(1, np.int64)
        self._labels.append(dict.fromkeys(ends, end))
        for block, moves_of in reversed(list(enumerate(self._moves))):
            for state, moves in moves_of.items():
                labels = _merge([_before(move, ticks, self._labels[block + move.length]) for _, ticks, move in moves])
                if len(labels[0]) > most_labels:
                    self.is_exact = False
                    labels = _thin(labels, most_labels)
                self._labels[block][state] = labels
        needs, ticks = self._labels[0][chain.start]
        if not len(needs):
            raise ConfigError("no plan of the chain is allowed · fix: let each block have one option that always is")
        # Each plan needs the fixed peak as well: labels below it become one, the fastest of them.
        self._labels[0][chain.start] = _merge([(np.maximum(needs, chain.fixed_peak - chain.base), ticks)])

    def fastest(self, budget: int) -> ChainPlan | None:
        """Returns the plan of least seconds whose peak is at most ``budget`` bytes; ``None``: no plan fits.

        Of plans that take equally long it is the one with the lower peak, then the one that comes first in order.
        """
        needs, _ = self._labels[0][self._chain.start]
        label = int(np.searchsorted(needs, budget - self._chain.base, "right")) - 1
        return self._plan(label) if label >= 0 else None  # the fixed peak is in every need

    def least_peak(self) -> ChainPlan:
        return self._plan(0)

    def plans(self, count: int = 64) -> list[ChainPlan]:
        """Returns plans of which none is better in both peak and seconds, from the lowest peak up.

        Args:
            count: How many; if there are more, those at equal distances in bytes, the ends among them.
        """
        needs, _ = self._labels[0][self._chain.start]
        chosen = list(range(len(needs)))
        if len(needs) > count:
            marks = np.linspace(needs[0], needs[-1], max(2, count))
            chosen = sorted({int(np.searchsorted(needs, mark, "right")) - 1 for mark in marks})
        return [self._plan(label) for label in chosen]

    def _plan(self, label: int) -> ChainPlan:
        """Follows a label from the first block to the last, taking the first option that leads to its seconds."""
        chain = self._chain
        needs, all_ticks = self._labels[0][chain.start]
        limit, remaining = chain.base + int(needs[label]), int(all_ticks[label])
        level, state = chain.base, chain.start
        plan: list[int] = []
        while len(plan) < chain.num_blocks:
            for option, ticks, move in self._moves[len(plan)][state]:
                after = level + move.change
                if max(level + move.forward_peak, after + move.backward_peak) > limit:
                    continue
                # Needs rise and ticks fall along the labels: `searchsorted` takes them in reverse.
                needs, all_ticks = self._labels[len(plan) + move.length][move.state]
                position = len(needs) - 1 - int(np.searchsorted(all_ticks[::-1], remaining - ticks))
                if position >= 0 and all_ticks[position] == remaining - ticks and after + needs[position] <= limit:
                    plan += [option] + [COVERED] * (move.length - 1)
                    level, state, remaining = after, move.state, remaining - ticks
                    break
            else:
                raise AssertionError("no option leads to a label")
        return tuple(plan)


_Moves = list[dict[Hashable, list[tuple[int, int, Move]]]]


def _reach(chain: Chain) -> tuple[_Moves, Collection[Hashable]]:
    """Returns option, ticks and move by block and state, and the states after the last block."""
    all_moves: list[dict[Hashable, list[tuple[int, float, Move]]]] = []
    states: list[dict[Hashable, None]] = [{chain.start: None}, *({} for _ in range(chain.num_blocks))]
    slowest = []
    for block in range(chain.num_blocks):
        options = chain.options(block)
        moves_of: dict[Hashable, list[tuple[int, float, Move]]] = {}
        for state in states[block]:
            moves_of[state] = [
                (option, duration, move)
                for option, duration in enumerate(options)
                if (move := chain.move(block, option, state)) is not None
            ]
            for _, _, move in moves_of[state]:
                states[block + move.length][move.state] = None
        slowest.append(max((spent / m.length for moves in moves_of.values() for _, spent, m in moves), default=0.0))
        all_moves.append(moves_of)
    tick = max(_TICK, fsum(slowest) / _MOST_TICKS)
    return [
        {state: [(option, round(spent / tick), move) for option, spent, move in moves] for state, moves in each.items()}
        for each in all_moves
    ], states[-1]


def _before(move: Move, ticks: int, after: dict[Hashable, _Labels]) -> _Labels:
    needs, all_ticks = after[move.state]
    bound = max(move.forward_peak, move.change + move.backward_peak)
    first = max(0, int(np.searchsorted(needs, bound - move.change, "right")) - 1)  # those before need the bound as well
    return np.maximum(needs[first:] + move.change, bound), all_ticks[first:] + ticks


def _merge(parts: list[_Labels]) -> _Labels:
    """Returns the labels of which none is better in both, by need; their ticks fall."""
    nothing = np.empty(0, np.int64)
    needs = np.concatenate([nothing, *(labels[0] for labels in parts)])
    ticks = np.concatenate([nothing, *(labels[1] for labels in parts)])
    # A label stays if no label of less need is as fast, and of equal needs the fastest.
    order = np.argsort(needs)
    needs, ticks = needs[order], ticks[order]
    better = np.ones(len(needs), np.bool_)
    np.less(ticks[1:], np.minimum.accumulate(ticks)[:-1], out=better[1:])
    needs, ticks = needs[better], ticks[better]
    last_of_need = np.ones(len(needs), np.bool_)
    np.not_equal(needs[1:], needs[:-1], out=last_of_need[:-1])
    return needs[last_of_need], ticks[last_of_need]


def _thin(labels: _Labels, count: int) -> _Labels:
    """Keeps the fastest label of each band, and the one with the least need; bands are even in bytes plus seconds."""
    needs, ticks = labels
    along = (needs - needs[0]) / (needs[-1] - needs[0]) + (ticks[0] - ticks) / (ticks[0] - ticks[-1])
    band = np.floor(along * ((count - 2) / 2)).astype(np.int64)
    last_of_band = np.concatenate([band[1:] != band[:-1], [True]])
    last_of_band[0] = True
    return needs[last_of_band], ticks[last_of_band]
