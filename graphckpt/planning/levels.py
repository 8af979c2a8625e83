"""Predicts the level of live bytes under any plan from a table of integers, read at the borders of blocks.

A row for each kind of equal calls and each option says what the call *retains* from its forward to its backward,
relative to the *base*, the step in which every block is recomputed, and its *rise* in forward and in backward::

    level under a plan   =  level of the base + what the open calls retain
    peak of an interval  =  level at its start + rise

Levels are all that is read: no storages, and no holders. So they may come from a counter or from an allocator. That
every block of the base is recomputed matters: each then holds its arguments, as it does under every rule but ``keep``.
What else the levels depend on is in Note [Neighbouring blocks] and Note [After the head]. Joined runs need one more
number, the bytes of the tensor that a block passes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Generic, NamedTuple, Self, TypeAlias, TypeVar, final

from graphckpt.planning.program import Interval, LevelLog, Phase, StepLog

_Value = TypeVar("_Value")
KEEP_NUMBER = 0
"""The number of the option that keeps everything."""

Runs: TypeAlias = "tuple[tuple[int, int], ...]"
"""The first block of each joined run, and the one after its last."""

# Note [Neighbouring blocks]
# What a call retains is read at the start of the next block. Two terms depend on the blocks next to it. A run in which
# kept and recomputed blocks alternate shows both, and the run with all blocks kept shows their sum.
#
# later    The code between blocks frees something of a recomputed block while the *next* block runs, which a kept one
#          holds: a loop variable with the attention weights of the last block.
# pair     A kept block that does not save its argument, such as one that begins with a ReLU, frees it. It does not if
#          the block before saves the same tensor as its output. Nor does a block that offloads its argument.

# Note [After the head]
# Four things change the level without a block that runs: the head, the code between the forwards and the backwards of
# a batch, frees what only the base holds. All show as *excess* at the start of a backward: live bytes beyond the base
# and what the open calls retain.
#
# output   A block that saves its own output, such as a ReLU, holds what the next block holds as its argument. The next
#          one releases it first, so it is an excess in its backward alone. That of the last block of a batch is
#          negative if it does not save its argument.
# late     A kept block holds what the head frees, such as autocast's copies of weights: it adds to the excess of all
#          later calls, of recomputed ones too.
# shared   A recomputed block holds its arguments: a mask, or a cache and what it reaches. In the base they live until
#          the backward of the first call that has them. If all later calls are kept, the head frees them.
# inside   A kept block holds some of what is shared, such as keys in a cache. It counts once the rest is freed.


class IntervalLevel(NamedTuple):
    """Live bytes in one interval of the step under a plan."""

    interval: Interval
    start: int
    peak: int


class Rise(NamedTuple):
    """The highest level during a call, above the level at its start, in bytes."""

    forward: int
    backward: int


class Before(NamedTuple):
    """The effect of a call on the one after it; see Note [Neighbouring blocks]."""

    is_kept: bool = False
    holds_output: bool = False


SampledRun: TypeAlias = "tuple[StepLog, Sequence[int]]"
"""A traced step, and the option of each of its blocks."""


class Batch(NamedTuple):
    """Calls whose backwards follow on one head."""

    head: Interval
    calls: list[int]
    """In the order of their backwards."""
    opened: list[tuple[int, ...]]
    """For each of ``calls``, those whose forward is over and whose backward is not, at the start of its backward."""


def _batches(spans: LevelLog, dropped: Collection[int]) -> list[Batch]:
    batches: list[Batch] = []
    opened: dict[int, None] = {}
    is_forward, before = False, Interval(Phase.BEFORE)
    for interval in spans:
        if interval.phase is Phase.FORWARD:
            opened[interval.call] = None
            is_forward = True
        elif interval.phase is Phase.BACKWARD:
            if interval.call not in dropped:
                if is_forward:
                    batches.append(Batch(before, [], []))
                    is_forward = False
                batches[-1].calls.append(interval.call)
                batches[-1].opened.append(tuple(opened))
            opened.pop(interval.call, None)
        before = interval
    return batches


@final
class Calls:
    """The calls of a base, in the order of their forwards.

    Args:
        base: The levels of the step with every block recomputed.
        block_of_call: The number of the block of each call.
        classes: The class of each block.
        dropped: The calls whose graph is freed without a backward.
    """

    def __init__(
        self, base: LevelLog, block_of_call: Sequence[int], classes: Sequence[int], dropped: Collection[int]
    ) -> None:
        self.base = base
        self.dropped = dropped
        self.batches = _batches(base, dropped)
        self.block_of_call = block_of_call
        places: Counter[int] = Counter()
        self.kinds: list[tuple[int, int]] = []
        """By call: the class of its block, and how many calls of the block came before."""
        for block in block_of_call:
            self.kinds.append((classes[block], places[block]))
            places[block] += 1
        of_blocks = [interval for interval in self.base if interval.is_of_block]
        self.before = {
            later.call: earlier.call
            for earlier, later in pairwise(of_blocks)
            if earlier.phase is later.phase is Phase.FORWARD
        }
        """By call: the one whose forward came before, if no backward lies between."""
        self.followed = frozenset(self.before.values())
        self.passes: list[list[int]] = []
        """The calls of forwards without a backward between them: of one batch of a step, or of one of its losses."""
        for call in range(len(block_of_call)):
            if call not in self.before:
                self.passes.append([])
            self.passes[-1].append(call)
        self.base_added = self.added(self.base)

    def added(self, spans: LevelLog) -> list[int]:
        """Returns, by call, how much the level rises from its forward to that of the next block.

        That of the last one of a batch ends before the head.
        """
        forwards = [spans[Interval(Phase.FORWARD, call)] for call in range(len(self.kinds))]
        ends = {earlier: forwards[later].start for later, earlier in self.before.items()}
        return [ends.get(call, span.end) - span.start for call, span in enumerate(forwards)]


@final
class _Readings(Generic[_Value]):
    """Values by call and option. A call without a reading has the one of an equal call."""

    # The last call of a batch is not typical: its forward is read up to its end, since the head follows and not a
    # block. Its reading stands for equal calls only as long as none of theirs is read.

    def __init__(self, calls: Calls, default: _Value) -> None:
        self._kinds = calls.kinds
        self._default = default
        self._of_call: dict[tuple[int, int], _Value] = {}
        self.of_kind: dict[tuple[tuple[int, int], int], tuple[bool, _Value]] = {}

    def add(self, call: int, option: int, value: _Value, *, is_typical: bool = True) -> None:
        """Adds a reading, unless there is one. One that is not typical is replaced for equal calls by one that is."""
        self._of_call.setdefault((call, option), value)
        key = self._kinds[call], option
        if key not in self.of_kind or (is_typical and not self.of_kind[key][0]):
            self.of_kind[key] = is_typical, value

    def has(self, call: int, option: int) -> bool:
        return (self._kinds[call], option) in self.of_kind

    def get(self, call: int, option: int) -> _Value:
        value = self._of_call.get((call, option))
        return self.of_kind.get((self._kinds[call], option), (False, self._default))[1] if value is None else value


def _base_of(runs: Iterable[SampledRun], base_option: int, classes: Sequence[int]) -> tuple[StepLog, Calls]:
    """Returns the run with every block recomputed, and its calls."""
    log = next(log for log, plan in runs if set(plan) == {base_option})
    return log, Calls(log.levels, [call.block for call in log.calls], classes, log.dropped)


@final
class LevelTable:
    """The levels of a step under any plan, from terms that are 0 until they are read.

    Args:
        calls: The calls of the step.
        base_option: The number of the option that each block has in the base.
        log: The trace of the base; ``None`` if its levels alone were read.
    """

    def __init__(self, calls: Calls, base_option: int, log: StepLog | None = None) -> None:
        self.calls = calls
        self.base_option = base_option
        self.log = log
        self.block_of_call = calls.block_of_call
        self.passed_on = [0] * len(calls.kinds)
        """By call: the bytes of its arguments that the call before has returned, which hooks see."""
        self.rises = _Readings(calls, Rise(0, 0))
        self.first, self.later, self.pair = _Readings(calls, 0), _Readings(calls, 0), _Readings(calls, 0)
        self.output, self.late, self.inside = _Readings(calls, 0), _Readings(calls, 0), _Readings(calls, 0)
        self._terms = self.first, self.later, self.pair, self.late, self.inside, self.output
        self.shared: Counter[int] = Counter()
        """By the first call that holds them: what recomputed calls hold of their arguments."""
        self.head_shares: dict[Interval, float] = {}
        """By head: the share of the excess after it that is there at its peak; by default all."""
        self._all_kept: LevelLog | None = None
        """The levels of the run with all blocks kept, if there is one: that plan is not predicted but read."""

    @classmethod
    def of_runs(cls, runs: Sequence[SampledRun], base_option: int, classes: Sequence[int]) -> Self:
        """Reads a table from sampled runs.

        Args:
            runs: the step with every block recomputed; with all blocks kept (option 0), if it is there; in runs in
                which kept and recomputed blocks alternate, if :attr:`needs_alternation`; and with any other options.
                Each option of each class is in one of these runs, or of those of :meth:`read_part`.
            base_option: the number of the option that each block has in the base.
            classes: the class of each block; blocks of one class are equal.
        """
        base, calls = _base_of(runs, base_option, classes)
        table = cls(calls, base_option, base)
        table.passed_on = [
            sum(base.sizes.get(storage, 0) for storage in set(call.returned_before)) for call in base.calls
        ]
        table._read(runs)
        return table

    def read_part(self, runs: Sequence[SampledRun], classes: Sequence[int]) -> None:
        """Reads runs of some of the blocks, one of them with each of these recomputed."""
        shorter = LevelTable(_base_of(runs, self.base_option, classes)[1], self.base_option)
        shorter.rises.of_kind = self.rises.of_kind
        for term, read in zip(shorter._terms, self._terms, strict=True):
            term.of_kind = read.of_kind
        shorter._read(runs, is_part=True)

    def peak(self, plan: Sequence[int], runs: Runs = ()) -> int:
        """Returns the most live bytes, for the number of the option of each block; see :meth:`levels`."""
        return max(level.peak for level in self.levels(plan, runs))

    @property
    def static_bytes(self) -> int:
        """Live bytes when the first block begins: weights, optimizer state, inputs, gradients of earlier steps."""
        return next(span.start for interval, span in self.calls.base.items() if interval.is_of_block)

    def saved_bytes(self, plan: Sequence[int]) -> int:
        """Returns what the blocks save, and what they return to one another, over all calls."""
        options = self._options(plan)
        added = self.calls.base_added
        return sum(max(0, added[call] + self.first.get(call, option)) for call, option in enumerate(options))

    def levels(self, plan: Sequence[int], runs: Runs = ()) -> Iterator[IntervalLevel]:
        """Returns the levels of a step, interval by interval.

        The blocks of ``runs`` are recomputed as one; each has the option of the base in ``plan``.
        """
        if self._all_kept is not None and not any(plan) and not runs:
            return (IntervalLevel(interval, span.start, span.peak) for interval, span in self._all_kept.items())
        return self._predicted_levels(plan, runs)

    def _predicted_levels(self, plan: Sequence[int], runs: Runs) -> Iterator[IntervalLevel]:
        calls, options = self.calls, self._options(plan)
        run_of = {call: run for run in self._joined_calls(runs) for call in run}
        heads = {batch.head: batch for batch in calls.batches}
        retained: dict[int, int] = {}
        after_head: list[int] = []
        """The open calls whose head is over."""
        # `total` is the sum of `retained`. `excess[n]` is the excess while n of the calls in `after_head` are open:
        # looked up as long as backwards take the calls in reverse order, and computed anew after one that does not.
        total, excess = 0, [0]
        for interval, base in calls.base.items():
            call, rise = interval.call, base.peak - base.start
            if interval.phase is Phase.AFTER_FORWARD and (before := calls.before.get(call)) in retained:
                later = self.later.get(before, options[before])
                retained[before] += later
                total += later
            # Levels are read at the start of an interval: what a call adds or frees in it shows in the next one, and
            # before that in the rise.
            level = base.start + total + excess[len(after_head)]
            if interval in heads and not interval.is_of_block:
                rise += self._rise_of_head(options, heads[interval])
            if interval.phase is Phase.FORWARD:
                rise = self.rises.get(call, options[call]).forward
                retained[call] = self._retained(options, call)
                if call in run_of and call > run_of[call][0]:  # it frees its argument
                    retained[call] -= self.passed_on[call]
                total += retained[call]
            elif interval.phase is Phase.BACKWARD:
                option = options[call]
                rise = self.rises.get(call, option).backward
                # The last call of a joined run recomputes all of it; from then on the others are as kept ones, and only
                # differ in that they hold their arguments.
                if call in run_of and call not in calls.dropped:
                    if call == run_of[call][-1]:
                        rise = self.recompute(run_of[call], retained, rise)
                        total = sum(retained.values())
                    else:
                        option, rise = KEEP_NUMBER, self.rises.get(call, KEEP_NUMBER).backward
                is_in_turn = call in after_head[-1:]
                if is_in_turn or call in after_head:
                    level += self.output_bytes(call, option, self._before(options, call))
                    after_head.pop(-1 if is_in_turn else after_head.index(call))
                    excess = excess if is_in_turn else self._excess_after(options, after_head)
                total -= retained.pop(call, 0)
            yield IntervalLevel(interval, level, level + rise)
            if interval in heads:
                after_head = list(retained)
                excess = self._excess_after(options, after_head)

    def recompute(self, run: range, retained: dict[int, int], rise: int) -> int:
        """Recomputes all calls of a joined run but the last: they then retain what kept ones do, and their arguments.

        Returns the rise in the backward of the last one, which is recomputed as alone.
        """
        level = peak = 0
        for call in run[:-1]:
            peak = max(peak, level + self.rises.get(call, KEEP_NUMBER).forward)
            retained[call] = sum(term.get(call, KEEP_NUMBER) for term in self._terms[:-1])
            level += retained[call] + self.passed_on[call + 1]
        return max(peak, level + rise)

    def pair_bytes(self, call: int, option: int, before: Before) -> int:
        """Returns what a call retains more because of the one before it; see Note [Neighbouring blocks]."""
        if not (before.holds_output or (before.is_kept and option == KEEP_NUMBER)):
            return 0
        if option == KEEP_NUMBER:
            return self.pair.get(call, option)
        return max(0, -self.first.get(call, option))  # it holds less than its argument, as if it offloads

    def output_bytes(self, call: int, option: int, before: Before) -> int:
        """Returns what a call adds to the excess in its backward alone; see Note [After the head]."""
        num_bytes = self.output.get(call, option)
        # The head frees an argument that the call does not hold, as it offloads it, unless the block before holds it as
        # its output. The run with all blocks kept, or one that alternates, shows both cases of a kept call.
        return max(0, num_bytes) if before.holds_output and option != KEEP_NUMBER else num_bytes

    def before(self, call: int, option: int) -> Before:
        return Before(option == KEEP_NUMBER, self.output.get(call, option) > 0)

    def rise_of_head(self, head: Interval, excess: int) -> int:
        """Returns what the peak of a head is beyond that of the base, of the excess at the start of its backward."""
        return round(self.head_shares.get(head, 1.0) * excess)

    def _rise_of_head(self, options: Sequence[int], batch: Batch) -> int:
        last = batch.calls[0]
        output = self.output_bytes(last, options[last], self._before(options, last))
        excess = self._excess_after(options, batch.opened[0])[-1] + output
        return self.rise_of_head(batch.head, excess)

    @property
    def needs_alternation(self) -> bool:
        """Whether the run with all blocks kept shows more than a sum of what each call retains."""
        calls, first = self.calls, {batch.calls[-1] for batch in self.calls.batches}
        terms = self.pair, self.output, self.inside
        return any(
            (call not in first and self.shared[call]) or any(term.get(call, KEEP_NUMBER) for term in terms)
            for call in range(len(calls.kinds))
        )

    def _options(self, plan: Sequence[int]) -> list[int]:
        return [plan[block] for block in self.block_of_call]

    def _joined_calls(self, runs: Runs) -> Iterator[range]:
        for first, end in runs:
            for call, block in enumerate(self.block_of_call):
                if block == first:
                    # The blocks of a run are called one after another, or they could not be joined.
                    yield range(call, call + end - first)

    def _retained(self, options: Sequence[int], call: int) -> int:
        """Returns what a call retains from its forward on, without what is `later`."""
        before = self._before(options, call)
        return self.first.get(call, options[call]) + self.pair_bytes(call, options[call], before)

    def _before(self, options: Sequence[int], call: int) -> Before:
        before = self.calls.before.get(call)
        return Before() if before is None else self.before(before, options[before])

    def _all_retained(self, options: Sequence[int]) -> list[int]:
        """Returns what each call retains at the start of its backward."""
        return [
            self._retained(options, call) + (self.later.get(call, option) if call in self.calls.followed else 0)
            for call, option in enumerate(options)
        ]

    def _excess_after(self, options: Sequence[int], opened: Sequence[int]) -> list[int]:
        """Returns the excess if the first n of ``opened`` are open, by n, without their outputs."""
        # Of a cache that calls 0, 1 and 2 have as an argument, 0 is the first to hold it (`shared[0]`):
        #
        #     options of 0, 1, 2    after the head                       excess with 3, 2, 1 open
        #     full  full  full      held, as in the base                 0, 0, 0
        #     keep  full  keep      held by 1 until its backward         0, 0, -shared + inside
        #     keep  keep  keep      freed by the head                    -shared + inside, for each
        #
        # A recomputed call holds what calls up to it share, and nothing that first appears after it.
        late = shared = inside = largest = 0
        is_held, excess = False, [0]
        for call in opened:
            num_bytes = self.shared[call]
            is_held = is_held and num_bytes <= largest
            largest = max(largest, num_bytes)
            late += self.late.get(call, options[call])
            if options[call] == KEEP_NUMBER:
                inside += self.inside.get(call, KEEP_NUMBER)
                shared += num_bytes
            else:
                shared, is_held = 0, True
            excess.append(late - shared + (0 if is_held else inside))
        return excess

    def _read(self, runs: Sequence[SampledRun], *, is_part: bool = False) -> None:
        # Each reading subtracts the terms that are read before it, and `_Readings.add` leaves an earlier one in place.
        # So what shows one term alone is read first: rises and calls next to recomputed ones, then pairs; what is late,
        # from alternating runs; outputs from these, before the run with all blocks kept, whose excess is a sum of all
        # terms; at last the share of the head, for which all of them are known.
        logs: list[tuple[LevelLog, list[int]]] = [(log.levels, self._options(plan)) for log, plan in runs]
        for spans, options in logs:
            self._read_alone(spans, options)
        for spans, options in logs:
            self._read_pairs(spans, options)
        alternating = [(spans, options) for spans, options in logs if KEEP_NUMBER in options and any(options)]
        keeping = [(spans, options) for spans, options in logs if not any(options)]
        if keeping:
            self._all_kept = keeping[0][0]
        for batch in self.calls.batches:
            for spans, options in alternating:
                self._read_late(spans, options, batch)
            for spans, options in alternating:
                self._read_output(spans, options, batch)
            for spans, options in [] if is_part else keeping:
                self._read_kept(spans, options, batch)
            for spans, options in logs:
                self._read_output(spans, options, batch)
            for spans, options in keeping:
                self._read_head(spans, options, batch)

    def _read_alone(self, spans: LevelLog, options: Sequence[int]) -> None:
        """Reads rises, and calls next to recomputed ones."""
        calls, added = self.calls, self.calls.added(spans)
        for call, option in enumerate(options):
            forward, backward = spans[Interval(Phase.FORWARD, call)], spans.get(Interval(Phase.BACKWARD, call))
            rise = Rise(forward.peak - forward.start, 0 if backward is None else backward.peak - backward.start)
            self.rises.add(call, option, rise, is_typical=call in calls.followed)
            before = calls.before.get(call)
            num_bytes = added[call] - calls.base_added[call]
            if before is None or options[before] == self.base_option:
                self.first.add(call, option, num_bytes, is_typical=call in calls.followed)
            elif option == self.base_option and call in calls.followed:
                self.later.add(before, options[before], num_bytes)

    def _read_pairs(self, spans: LevelLog, options: Sequence[int]) -> None:
        """Reads calls next to others that are not recomputed. See Note [Neighbouring blocks]."""
        calls, added = self.calls, self.calls.added(spans)
        for call, option in enumerate(options):
            before = calls.before.get(call)
            if before is None or self.base_option in (option, options[before]):
                continue
            is_followed = call in calls.followed
            num_bytes = added[call] - calls.base_added[call]
            num_bytes -= self.later.get(before, options[before]) if is_followed else 0
            if not self.first.has(call, option):
                self.first.add(call, option, num_bytes, is_typical=False)
            elif option == options[before] == KEEP_NUMBER:
                rest = num_bytes - self.first.get(call, option)
                self.pair.add(call, option, rest, is_typical=is_followed)

    def _excess(self, spans: LevelLog, options: Sequence[int], batch: Batch) -> dict[int, int]:
        """Returns the excess of each call of a batch, from the first forward on."""
        excess, retained = {}, self._all_retained(options)
        for call, opened in zip(reversed(batch.calls), reversed(batch.opened), strict=True):
            interval = Interval(Phase.BACKWARD, call)
            if interval in spans:
                level = spans[interval].start - self.calls.base[interval].start
                excess[call] = level - sum([retained[each] for each in opened])
        return excess

    def _read_late(self, spans: LevelLog, options: Sequence[int], batch: Batch) -> None:
        """Reads what a kept call between recomputed ones adds to the excess of the later one."""
        excess = self._excess(spans, options, batch)
        order = list(excess)
        for place, call in enumerate(order[:-1]):
            neighbours = [*order[:place][-1:], order[place + 1]]
            # Between recomputed calls, which are never late, the excess changes by what this one adds.
            if options[call] == KEEP_NUMBER and all(options[other] == self.base_option for other in neighbours):
                before = excess[order[place - 1]] if place else 0
                self.late.add(call, KEEP_NUMBER, excess[order[place + 1]] - before)

    def _read_kept(self, spans: LevelLog, options: Sequence[int], batch: Batch) -> None:
        """Reads what is shared, and what is inside of it, from the run with all blocks kept."""
        # With all blocks kept, what is left of the excess without `late` and `output` is the sum of `inside - shared`
        # over the open calls. So the difference between a call and the one before it is one of the two, and the other
        # counts as 0. The first call has none before it: it is taken to have as much `inside` as an equal call.
        total = 0
        rest: dict[int, int] = {}
        for call, num_bytes in self._excess(spans, options, batch).items():
            total += self.late.get(call, KEEP_NUMBER)
            rest[call] = num_bytes - total - self.output.get(call, KEEP_NUMBER)
        first = next(iter(rest), -1)
        if first < 0:
            return
        if rest[first] > 0:
            self.output.add(first, KEEP_NUMBER, rest[first], is_typical=False)
            rest[first] = 0
        for (_, earlier), (call, later) in pairwise(rest.items()):
            if later > earlier:
                self.inside.add(call, KEEP_NUMBER, later - earlier)
            self.shared[call] = max(0, earlier - later)
        inside = self.inside.get(first, KEEP_NUMBER)
        self.inside.add(first, KEEP_NUMBER, inside, is_typical=False)
        self.shared[first] = max(0, inside - rest[first])

    def _read_output(self, spans: LevelLog, options: Sequence[int], batch: Batch) -> None:
        opened = dict(zip(batch.calls, batch.opened, strict=True))
        after = self._excess_after(options, batch.opened[0])
        for call, num_bytes in self._excess(spans, options, batch).items():
            option, before = options[call], self.calls.before.get(call)
            is_beside_kept = before is None or options[before] == KEEP_NUMBER
            if option == self.base_option or (option == KEEP_NUMBER and is_beside_kept and any(options)):
                continue  # the run with all blocks kept shows it
            count = len(opened[call])
            is_first = opened[call] == batch.opened[0][:count]
            others = after[count] if is_first else self._excess_after(options, opened[call])[-1]
            rest = num_bytes - others
            is_last = call == batch.calls[0]
            self.output.add(call, option, rest if is_last else max(0, rest), is_typical=not is_last)

    def _read_head(self, spans: LevelLog, options: Sequence[int], batch: Batch) -> None:
        if batch.head not in spans or batch.head.is_of_block:
            return
        rise = spans[batch.head].peak - self.calls.base[batch.head].peak
        retained = self._all_retained(options)
        rise -= sum(retained[call] for call in batch.opened[0])
        if excess := self._rise_of_head(options, batch):
            self.head_shares[batch.head] = min(1.0, max(0.0, rise / excess))
