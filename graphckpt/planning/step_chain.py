"""A measured step as a chain of blocks, in which the effect of an option depends on the block before at most."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Hashable, Mapping, Sequence
from itertools import takewhile
from math import fsum
from typing import final

from graphckpt.planning.frontier import COVERED, Move
from graphckpt.planning.intervals import Interval, Phase
from graphckpt.planning.levels import KEEP_NUMBER, Runs
from graphckpt.planning.measured_step import MeasuredStep
from graphckpt.rules.basic import Full

LENGTHS = (2, 3, 4, 5, 6, 8, 10, 12, 16)
"""Possible lengths of runs. For n blocks, runs of about sqrt(n) take the least memory: these suffice for 250."""


@final
class JoinedRuns:
    """The blocks that can be joined, and the seconds that it takes.

    Only the first block of a run saves its input; each later one frees its input, which is the result of the one
    before::

        backward of a run of 0, 1, 2     of 2:  recompute 0, recompute 1, then 2 as under `full`
                                         of 1:  as under `keep`, with the results that were recomputed
                                         of 0:  as under `keep`, with the results that were recomputed
    """

    def __init__(self, measured: MeasuredStep, *, joins: bool = True) -> None:
        full = (n for n, o in enumerate(measured.options) if joins and o.rule == Full() and not o.is_far)
        self.full = next(full, 0)
        """The option that each block of a run has in a plan: ``full`` without offload. 0 if there are no runs."""
        blocks = measured.model.block_of_call
        followers = set(blocks) - {block for call, block in enumerate(blocks) if call not in measured.joinable}
        self._can_follow = [bool(self.full) and block in followers for block in range(len(measured.names))]
        seconds = zip(measured.forward_seconds, measured.backward_seconds, strict=True)
        self.extra_seconds = [max(0.0, fwd[KEEP_NUMBER] + bwd[KEEP_NUMBER] - bwd[self.full]) for fwd, bwd in seconds]
        """By block: the extra seconds if others are joined to it, since all of it is recomputed then; the
        recomputation of ``full`` stops at the last tensor that backward needs."""

    def seconds(self, runs: Runs) -> float:
        return fsum(self.extra_seconds[block] for first, end in runs for block in range(first, end - 1))

    def lengths(self, block: int) -> Sequence[int]:
        followers = takewhile(bool, self._can_follow[block + 1 : block + LENGTHS[-1]])
        return LENGTHS[: bisect_right(LENGTHS, 1 + sum(followers))]


class StepChain:
    """One pass of a step as a chain of blocks: backward goes through them in reverse order.

    The level before the forward of a block is that of the base, plus what the blocks before it retain; the level before
    its backward is the same sum with what the block retains. What it retains may depend on the block before: so the
    state is the option of that one, or the first option for which no later block differs.

    Args:
        measured: The step.
        banned: Blocks and options that are not allowed.
        joined_runs: Which blocks can be joined; ``None`` joins none.
        calls: The calls of the chain, by default those of the last pass.
        rest: The bytes by which the peak of an interval differs from the sum.
    """

    base = 0
    start: Hashable = None

    def __init__(
        self,
        measured: MeasuredStep,
        banned: Collection[tuple[int, int]] = (),
        joined_runs: JoinedRuns | None = None,
        calls: Sequence[int] | None = None,
        rest: Mapping[Interval, int] | None = None,
    ) -> None:
        self._table = table = measured.model
        self._joined_runs = joined_runs or JoinedRuns(measured, joins=False)
        self._seconds = [
            [one + other for one, other in zip(*pair, strict=True)]
            for pair in zip(measured.forward_seconds, measured.backward_seconds, strict=True)
        ]
        self._banned = measured.banned.union(banned)
        self._calls = table.calls.passes[-1] if calls is None else calls
        self.blocks = [table.block_of_call[call] for call in self._calls]
        self.num_blocks = len(self._calls)
        self._numbers = range(len(measured.options))
        self._states: dict[int, list[int]] = {}
        self._moves: dict[tuple[int, int, Hashable], Move | None] = {}
        rest = rest or {}
        self._starts: dict[Interval, int] = {}
        """The level of the base at the start of each interval of a block, with the rest at its peak."""
        self._others: dict[Interval, int] = {}
        """The highest level of the base after each interval of a block, up to the next one of a block."""
        self.fixed_peak = 0
        opened: set[int] = set()
        stretch: Interval | None = None
        for interval, span in table.calls.base.items():
            peak = span.peak + rest.get(interval, 0)
            if interval.is_of_block:
                stretch = interval
                if interval not in table.calls.dropped_with:  # from where its graph is dropped on, levels are lower
                    self._starts[interval] = span.start + rest.get(interval, 0)
            elif interval.phase in (Phase.OPTIMIZER, Phase.BEFORE):
                stretch = None
            elif stretch is not None:
                self._others[stretch] = max(peak, self._others.get(stretch, peak))
            if interval.phase is Phase.FORWARD:
                opened.add(interval.call)
            elif not opened:  # the others depend on options
                self.fixed_peak = max(self.fixed_peak, peak)
            if interval.phase is Phase.BACKWARD:
                opened.discard(interval.call)

    def options(self, block: int) -> Sequence[float]:
        """Returns the seconds of each option of a block; a module that is called several times counts once.

        They are followed by those of runs of two blocks, three, and so on.
        """
        number = self.blocks[block]
        if number in self.blocks[:block]:
            return [0.0] * len(self._seconds[number])
        joined = self._joined_runs
        runs = [(number, number + length) for length in joined.lengths(number)]
        return self._seconds[number] + [
            fsum([joined.seconds((run,)), *(self._seconds[n][joined.full] for n in range(*run))]) for run in runs
        ]

    def put(self, choices: Sequence[int], plan: list[int]) -> Runs:
        """Puts the options of these choices into a plan; returns its joined runs."""
        runs: Runs = ()
        for place, choice in enumerate(choices):
            if choice == COVERED:
                continue
            block, length = self.blocks[place], self._length(place, choice)
            if length > 1:  # of neighbours
                runs += ((block, block + length),)
            plan[block : block + length] = [choice if length == 1 else self._joined_runs.full] * length
        return runs

    def move(self, block: int, option: int, state: Hashable) -> Move | None:
        """Returns the effect of an option, or of a joined run; ``None`` if it is not allowed."""
        key = block, option, state
        if key not in self._moves:
            self._moves[key] = self._move(*key)
        return self._moves[key]

    def _move(self, block: int, option: int, state: Hashable) -> Move | None:
        # The same sums as in `LevelTable`, relative to the level before the block.
        table, length = self._table, self._length(block, option)
        chosen = option if length == 1 else self._joined_runs.full
        if any((number, chosen) in self._banned for number in self.blocks[block : block + length]):
            return None
        run = self._calls[block : block + length]
        retained, level, forward, backward = dict[int, int](), 0, list[int](), [0]
        for place, call in enumerate(run):
            interval = Interval(Phase.FORWARD, call)
            forward.append(level + self._starts[interval] + table.rises.get(call, chosen).forward)
            before = chosen if place else state
            retained[call] = table.retained_after(call, chosen, before) - (table.passed_on[call] if place else 0)
            retained[call] += max(0, table.late.get(call, chosen))
            level += retained[call]
            if interval in self._others:
                forward.append(level + self._others[interval])
        change = level
        for place, call in reversed(list(enumerate(run))):
            interval = Interval(Phase.BACKWARD, call)
            if interval in self._starts:
                own, rise = chosen, table.rises.get(call, chosen).backward
                level = sum(retained[c] for c in run[: place + 1])
                if length > 1 and place == length - 1:
                    rise = table.recompute(range(run[0], run[-1] + 1), retained, rise)
                elif length > 1:
                    own, rise = KEEP_NUMBER, table.rises.get(call, KEEP_NUMBER).backward
                backward.append(self._starts[interval] + level + table.output.get(call, own) + rise)
            if interval in self._others:
                backward.append(sum(retained[c] for c in run[:place]) + self._others[interval])
        state = self._state(block + length, chosen)
        return Move(max(forward), change, max(backward) - change, state, length=length)

    def _state(self, block: int, before: int) -> Hashable:
        """Returns the first option of the block before ``block`` for which the effects of options are the same."""
        if block == self.num_blocks:
            return None
        if block not in self._states:
            call, first = self._calls[block], dict[tuple[int, ...], int]()
            effects = [tuple(self._table.retained_after(call, o, b) for o in self._numbers) for b in self._numbers]
            self._states[block] = [first.setdefault(effect, b) for b, effect in enumerate(effects)]
        return self._states[block][before]

    def _length(self, block: int, option: int) -> int:
        number = option - len(self._seconds[self.blocks[block]])
        return 1 if number < 0 else LENGTHS[number]
