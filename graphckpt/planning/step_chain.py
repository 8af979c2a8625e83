"""A measured step as a chain of blocks, in which the effect of each option on the level depends on earlier blocks."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from itertools import takewhile
from math import fsum, prod
from typing import NamedTuple, final

from graphckpt.planning.frontier import COVERED, Move
from graphckpt.planning.levels import KEEP_NUMBER, Before, Runs
from graphckpt.planning.measured_step import MeasuredStep
from graphckpt.planning.program import Interval, Phase
from graphckpt.rules.basic import Full

LENGTHS = (2, 3, 4, 5, 6, 8, 10, 12, 16)
"""Possible lengths of runs. For n blocks, runs of about sqrt(n) take the least memory: these suffice for 250."""

_MOST_SUMS = 1024  # of late bytes that are states of a chain: 12 equal blocks have 13, 12 that all differ 4096


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


class ChainState(NamedTuple):
    """The effect of earlier blocks on later ones, in terms of :class:`~graphckpt.planning.levels.LevelTable`, in bytes.

    It has only what a later block can tell apart, since the frontier is computed once for each state.
    """

    late: int = 0
    shared: int = 0
    """Shared by the calls after the last one that is recomputed."""
    inside: int = 0
    is_held: bool = False
    """Whether a recomputed call holds the shared bytes, which include ``inside``."""
    later: int = 0
    """Retained by the last call from the end of the next one on."""
    before: Before = Before()
    """The last call, if that changes what the next one retains."""
    output: int = 0
    """Held by the last block of the chain of its output, or minus what it does not save of its argument."""


@final
class StepChain:
    """The last forward and backward of a step as a chain of blocks: backward goes through them in reverse order.

    The level before the forward of a block is that of the base, plus what the blocks before it retain; the level before
    its backward is the same sum. So the effect of an option depends on earlier options only.

    Args:
        measured: the step.
        banned: blocks and options that are not allowed.
        joined_runs: which blocks can be joined; ``None`` joins none.
        calls: the calls of the chain, by default those of the last pass.
    """

    base = 0
    start: Hashable = ChainState()

    def __init__(
        self,
        measured: MeasuredStep,
        banned: Collection[tuple[int, int]] = (),
        joined_runs: JoinedRuns | None = None,
        calls: Sequence[int] | None = None,
    ) -> None:
        self._table = table = measured.model
        self._levels = table.calls.base
        self._joined_runs = joined_runs or JoinedRuns(measured, joins=False)
        self._numbers = range(len(measured.options))
        self._seconds = [
            [one + other for one, other in zip(*pair, strict=True)]
            for pair in zip(measured.forward_seconds, measured.backward_seconds, strict=True)
        ]
        self._banned = measured.banned.union(banned)
        self._calls = table.calls.passes[-1] if calls is None else calls
        self.blocks = [table.block_of_call[call] for call in self._calls]
        self.num_blocks = len(self._calls)
        self._moves: dict[tuple[int, int, Hashable], Move | None] = {}
        batches = (batch for batch in table.calls.batches if self._calls[-1] in batch.calls)
        head = next((batch.head for batch in batches), None)
        self._head = None if head is None or head.is_of_block else head
        self._holders: list[int] = []
        """By block: the call up to there that is the first to hold the most shared bytes; -1 if there are none."""
        for call in self._calls:
            before = self._holders[-1] if self._holders else -1
            self._holders.append(call if table.shared[call] > table.shared[before] else before)
        late = {(call, n): table.late.get(call, n) for call in self._calls for n in self._numbers}
        counts = Counter(late[call, KEEP_NUMBER] for call in self._calls)
        is_exact = prod(count + 1 for num_bytes, count in counts.items() if num_bytes) <= _MOST_SUMS
        self._late = {key: num_bytes for key, num_bytes in late.items() if is_exact and key[1] == KEEP_NUMBER}
        """By call and option: the late bytes, as a component of the state. Each of their sums is a state."""
        self._early = {key: max(0, num_bytes) for key, num_bytes in late.items() if key not in self._late}
        """By call and option: what is late, but counts from the forward on."""
        self._has_inside = any(table.inside.get(call, KEEP_NUMBER) for call in self._calls)
        self._stretches: dict[Interval, list[Interval]] = {}
        """Each interval of a block, and those after it up to the next one of a block."""
        self.fixed_peak = 0
        opened: set[int] = set()
        stretch: list[Interval] = []
        for interval, span in self._levels.items():
            if interval.is_of_block:
                stretch = self._stretches[interval] = []
            elif interval.phase in (Phase.OPTIMIZER, Phase.BEFORE):
                stretch = []
            stretch.append(interval)
            if interval.phase is Phase.FORWARD:
                opened.add(interval.call)
            elif not opened:  # the others depend on options
                self.fixed_peak = max(self.fixed_peak, span.peak)
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
        key = block, option, state
        if key not in self._moves:
            self._moves[key] = self._move(block, option, state)
        return self._moves[key]

    def head_peak(self, state: Hashable) -> int:
        assert isinstance(state, ChainState)
        if self._head is None:
            return 0
        excess = self._beyond(state) + state.output
        return self._levels[self._head].peak + self._table.rise_of_head(self._head, excess)

    def _move(self, block: int, option: int, state: Hashable) -> Move | None:
        # The same sums as in `LevelTable.levels`, relative to the level before the block, for one block or one joined
        # run. `PolicySearch` judges by the table: a term that is left out here costs another try, and no budget. Below,
        # `states[n]` is the state before the n-th block of the run.
        assert isinstance(state, ChainState)
        table, length = self._table, self._length(block, option)
        chosen = option if length == 1 else self._joined_runs.full
        if any((number, chosen) in self._banned for number in self.blocks[block : block + length]):
            return None
        run = self._calls[block : block + length]
        states, retained, forward_peak, level = [state], dict[int, int](), 0, 0
        for place, call in enumerate(run):
            first, *others = self._stretches[Interval(Phase.FORWARD, call)]
            rise = table.rises.get(call, chosen).forward
            forward_peak = max(forward_peak, level + self._levels[first].start + rise)
            retained[call] = table.first.get(call, chosen) - (table.passed_on[call] if place else 0)
            retained[call] += table.pair_bytes(call, chosen, states[-1].before) + self._early.get((call, chosen), 0)
            level += states[-1].later + retained[call]
            forward_peak = max([forward_peak, *(level + self._levels[o].peak for o in others if o != self._head)])
            states.append(self._after(states[-1], block + place, chosen))
        change, backward_peak = level, 0
        for place, call in reversed(list(enumerate(run))):
            interval = Interval(Phase.BACKWARD, call)
            if interval not in self._levels:
                continue
            number, rise = chosen, table.rises.get(call, chosen).backward
            later = [each.later for each in states[: place + 2]]
            level = self._levels[interval].start + sum(retained[c] for c in run[: place + 1]) + sum(later)
            if length > 1 and call not in table.calls.dropped:
                if place == length - 1:
                    rise = table.recompute(range(run[0], run[-1] + 1), retained, rise)
                else:
                    number, rise = KEEP_NUMBER, table.rises.get(call, KEEP_NUMBER).backward
            level += self._beyond(states[place + 1]) + table.output_bytes(call, number, states[place].before)
            rest = sum(retained[c] for c in run[:place]) + sum(later[:-1]) + self._beyond(states[place])
            peaks = (rest + self._levels[other].peak for other in self._stretches[interval][1:])
            backward_peak = max(backward_peak, level + rise, *peaks)
        return Move(forward_peak, change, backward_peak - change, states[-1], length=length)

    def _after(self, state: ChainState, block: int, option: int) -> ChainState:
        """Returns the state after a block, from that before it."""
        table, call, is_kept = self._table, self._calls[block], option == KEEP_NUMBER
        holder, is_last = self._holders[block], block == self.num_blocks - 1
        is_held = self._has_inside and (not is_kept or (state.is_held and holder != call))
        inside = state.inside + (table.inside.get(call, option) if is_kept else 0)
        before = table.before(call, option)
        if is_last or not self._affects(before, self._calls[block + 1]):
            before = Before()  # one state in place of several
        return ChainState(
            late=state.late + self._late.get((call, option), 0),
            shared=state.shared + table.shared[call] if is_kept else 0,
            inside=0 if is_held and holder == self._holders[-1] else inside,  # it counts no more
            is_held=is_held,
            later=0 if is_last else table.later.get(call, option),
            before=before,
            output=table.output_bytes(call, option, state.before) if is_last else 0,
        )

    def _affects(self, before: Before, call: int) -> bool:
        """Whether the block before changes the bytes of a call, under any option of the call."""
        table = self._table
        return any(
            table.pair_bytes(call, option, before)
            or table.output_bytes(call, option, before) != table.output.get(call, option)
            for option in self._numbers
        )

    @staticmethod
    def _beyond(state: ChainState) -> int:
        return state.late - state.shared + (0 if state.is_held else state.inside)

    def _length(self, block: int, option: int) -> int:
        number = option - len(self._seconds[self.blocks[block]])
        return 1 if number < 0 else LENGTHS[number]
