"""Writes the choice of options, with the times of both copy engines, as a mixed-integer programme. Needs scipy."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any, final

from graphckpt.extras import LazyPackage
from graphckpt.planning.levels import Chain, Move, Plan

if TYPE_CHECKING:
    import numpy as np

    from graphckpt.planning.offload_time import Timing
else:
    np = LazyPackage("numpy", "plan")

GAP = 0.005  # of the step's seconds
_UNITS = 1000.0  # of the budget, and of the step: HiGHS allows each row to be off by 1e-6, so a plan by 1e-9 of it
MOST_CHOICES = 120
"""Of blocks, options and states. With more, HiGHS found nothing within seconds that the dynamic programme had not."""
_NODE_WORK = 40_000  # columns times nodes for each second that is given
_CLOCK = 4  # times the seconds that are given, until the clock stops it

_Row = Mapping[int, float]


def solve_milp(
    chain: Chain, timing: Timing, budget: int, bound: float | None, limit_seconds: float
) -> tuple[Plan | None, list[str]]:
    """Returns a plan that is within 0.5 % of the fastest, or the best one that was found, and notes.

    ``None`` stands for none that is found, and for a programme with more than ``MOST_CHOICES``, which is not begun.

    Exact for ``slots=2, ahead=1``; with other windows some waits are taken for the worst that they can be, so that
    :func:`~graphckpt.planning.offload_time.schedule` has the last word.

    Args:
        chain: The step.
        timing: What the options take and move.
        budget: The bound on the peak, in bytes.
        bound: Seconds of a plan that fits: slower ones are not looked at. ``None``: none is known.
        limit_seconds: Stands for a number of nodes; the clock stops only what takes four times as long.
    """
    if not any(size > 0 for row in timing.moved_bytes for size in row):
        return None, []
    if chain.fixed_peak > budget:
        return None, []
    model = _Model(chain, timing, budget, bound)
    num_columns = len(model.lower)
    if sum(model.integral) > MOST_CHOICES:
        return None, []
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp  # noqa: PLC0415  # optional
        from scipy.sparse import csr_array  # noqa: PLC0415
    except ImportError:
        return None, ["without scipy, waits for copies are only searched near by · pip install 'graphckpt[plan]'"]
    data: list[float] = []
    columns: list[int] = []
    rows, low, high = [], [], []
    for number, (row, least, most) in enumerate(model.rows):
        data += row.values()
        columns += row.keys()
        rows += [number] * len(row)
        low.append(least)
        high.append(most)
    cost = np.zeros(num_columns)
    cost[model.end] = 1.0
    began = time.perf_counter()
    result = milp(
        cost,
        integrality=np.array(model.integral),
        bounds=Bounds(np.array(model.lower), np.array(model.upper)),
        constraints=LinearConstraint(csr_array((data, (rows, columns)), shape=(len(low), num_columns)), low, high),
        options={
            "mip_rel_gap": GAP,
            "node_limit": max(1, int(limit_seconds * _NODE_WORK / num_columns)),
            "time_limit": _CLOCK * limit_seconds,
        },
    )
    notes = []
    if time.perf_counter() - began >= _CLOCK * limit_seconds:
        notes.append("the search for a faster plan was stopped by the clock: another run may find another one")
    return (None if result.x is None else model.plan(result.x)), notes


@final
class _Model:
    """Columns and rows.

    A plan is a path of one option for each block through the chain's states: column ``(block, state, option)`` is 1 on
    the path. All else follows: levels, bytes of the last blocks that moved, and the ends of forwards, copies and
    backwards, each as late as what it waits for.
    """

    def __init__(self, chain: Chain, timing: Timing, budget: int, bound: float | None) -> None:
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.integral: list[int] = []
        self.rows: list[tuple[_Row, float, float]] = []
        self._timing = timing
        self._per_byte = _UNITS / max(1, budget)
        self._slowest = bound if bound is not None else _slowest(timing)
        self._per_second = _UNITS / max(self._slowest, 1e-9)
        self._late = _UNITS * (1 + 1e-7)
        self._moves = self._path(chain)
        self._memory(chain)
        self.end = self._times()

    def plan(self, solution: Any) -> Plan:
        """Reads the path."""
        return tuple(moves[max(moves, key=lambda column: float(solution[column]))][0] for moves in self._moves)

    def _column(self, low: float = 0.0, high: float = math.inf, *, integral: bool = False) -> int:
        self.lower.append(low)
        self.upper.append(high)
        self.integral.append(int(integral))
        return len(self.lower) - 1

    def _at_least(self, column: int, *terms: _Row, over: float = 0.0) -> None:
        """``column >= over + sum of terms``."""
        row: dict[int, float] = defaultdict(float)
        row[column] += 1.0
        for term in terms:
            for other, factor in term.items():
                row[other] -= factor
        self.rows.append((row, over, math.inf))

    def _path(self, chain: Chain) -> list[dict[int, tuple[int, Move]]]:
        into: dict[Hashable, dict[int, float]] = {chain.start: {}}
        moves_of: list[dict[int, tuple[int, Move]]] = []
        for block in range(chain.num_blocks):
            here: dict[int, tuple[int, Move]] = {}
            after: dict[Hashable, dict[int, float]] = defaultdict(dict)
            for held, entering in into.items():
                row = dict.fromkeys(entering, -1.0)
                for option in range(len(chain.options(block))):
                    move = chain.move(block, option, held)
                    if move is not None:
                        column = self._column(high=1.0, integral=True)
                        here[column] = option, move
                        row[column] = 1.0
                        after[move.held][column] = 1.0
                one = 0.0 if block else 1.0
                self.rows.append((row, one, one))
            moves_of.append(here)
            into = after
        return moves_of

    def _moved(self, block: int, factor: float = 1.0) -> dict[int, float]:
        """``factor`` if the block moves something, else 0."""
        sizes = self._timing.moved_bytes[block]
        return {column: factor for column, (option, _) in self._moves[block].items() if sizes[option] > 0}

    def _of_option(self, block: int, table: Any, factor: float) -> dict[int, float]:
        row = table[block]
        return {column: row[option] * factor for column, (option, _) in self._moves[block].items()}

    def _of_move(self, block: int, field: str) -> dict[int, float]:
        moves = self._moves[block].items()
        return {column: getattr(move, field) * self._per_byte for column, (_, move) in moves}

    def _memory(self, chain: Chain) -> None:
        timing, per_byte = self._timing, self._per_byte
        most = max(size for row in timing.moved_bytes for size in row) * per_byte
        waiting = timing.slots - 1
        window = max(waiting, timing.ahead)
        held = [self._column(high=0.0) for _ in range(window)]  # bytes of the last blocks that moved, the latest first
        level = self._column(chain.base * per_byte, chain.base * per_byte)
        for block, moves in enumerate(self._moves):
            self._at_most_budget({level: 1.0}, self._of_move(block, "forward_peak"), _ones(held[:waiting]))
            after = self._column(-math.inf)
            kept = self._of_move(block, "kept")
            self.rows.append(({after: 1.0, level: -1.0, **{c: -f for c, f in kept.items()}}, 0.0, 0.0))
            level = after
            self._at_most_budget({level: 1.0}, self._of_move(block, "backward_peak"), _ones(held))
            shifted = [self._column() for _ in range(window)]
            for place, column in enumerate(shifted):
                self._at_least(column, {held[place]: 1.0}, self._moved(block, -most))
                if place:
                    self._at_least(column, {held[place - 1]: 1.0}, self._moved(block, most), over=-most)
                else:
                    self._at_least(column, self._of_option(block, timing.moved_bytes, per_byte))
            held = shifted
            if block == len(self._moves) - 1:
                heads = {column: chain.head_peak(move.held) * per_byte for column, (_, move) in moves.items()}
                self._at_most_budget({level: 1.0}, heads, _ones(held[:waiting]))

    def _at_most_budget(self, *terms: _Row) -> None:
        row: dict[int, float] = defaultdict(float)
        for term in terms:
            for column, factor in term.items():
                row[column] += factor
        self.rows.append((row, -math.inf, _UNITS))

    def _times(self) -> int:
        timing, late, per_second = self._timing, self._late, self._per_second
        num_blocks = len(self._moves)
        out, back = per_second / timing.out_rate, per_second / timing.back_rate
        now, copied = self._column(high=0.0), []
        for block in range(num_blocks):
            computed = self._of_option(block, timing.forward_seconds, per_second)
            sizes = self._of_option(block, timing.moved_bytes, out)
            copied.append(self._column())
            self._at_least(copied[-1], {now: 1.0}, computed, sizes)
            if block:
                self._at_least(copied[-1], {copied[-2]: 1.0}, sizes)
            after = self._column(high=late)
            self._at_least(after, {now: 1.0}, computed)
            if block - timing.slots + 1 >= 0:
                awaited = copied[block - timing.slots + 1]
                self._at_least(after, {awaited: 1.0}, self._moved(block, late), over=-late)
            now = after
        begun = self._column(high=late)
        self._at_least(begun, {now: 1.0}, over=timing.head_seconds * per_second)
        now, above, came = begun, self._column(high=0.0), self._column(high=0.0)
        signals: dict[
            int, int
        ] = {}  # when backward came to a block that moves; `came` carries it past those that do not
        for block in reversed(range(num_blocks)):
            reload = self._of_option(block, timing.moved_bytes, back)
            back_end = self._column(high=late)
            self._at_least(back_end, {came: 1.0})
            if timing.slots == 1:  # the last block that moves has to come back as well
                self._at_least(back_end, {now: 1.0, above: -late}, reload)
            for moment in {came, begun, signals.get(block + timing.ahead, begun), *([] if timing.ahead else [now])}:
                self._at_least(back_end, {moment: 1.0, above: late}, reload, over=-late)
            signal = self._column(high=late)
            self._at_least(signal, {now: 1.0}, self._moved(block, late), over=-late)
            signals[block] = signal
            computed = self._of_option(block, timing.backward_seconds, per_second)
            after = self._column(high=late)
            self._at_least(after, {now: 1.0}, computed)
            self._at_least(after, {back_end: 1.0}, computed)
            here = self._column(high=1.0)  # 1 if this block or one above moves
            self._at_least(here, self._moved(block))
            self._at_least(here, {above: 1.0})
            self.rows.append(({here: -1.0, above: 1.0, **self._moved(block)}, 0.0, math.inf))
            now, above, came = after, here, back_end
        return now


def _ones(columns: list[int]) -> dict[int, float]:
    return dict.fromkeys(columns, 1.0)


def _slowest(timing: Timing) -> float:
    """More than any plan takes: each block at its slowest, and all copies one after the other."""
    total = timing.head_seconds
    tables = zip(timing.forward_seconds, timing.backward_seconds, timing.moved_bytes, strict=True)
    for forward, backward, sizes in tables:
        total += max(forward) + max(backward) + max(sizes) * (1 / timing.out_rate + 1 / timing.back_rate)
    return total
