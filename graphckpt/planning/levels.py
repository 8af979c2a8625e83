"""Predicts the level of live bytes under any plan from a table of integers, read at the borders of blocks.

A row for each kind of equal calls and each option says what the call *retains* from its forward to its backward,
relative to the *base*, the step in which every block is recomputed, and its *rise* in forward and in backward::

    level under a plan   =  level of the base + what the open calls retain
    peak of an interval  =  level at its start + rise

Levels are all that is read: no storages, and no holders. So they may come from a counter or from an allocator. That
every block of the base is recomputed matters: each then holds its arguments, as it does under every rule but ``keep``.
What else the levels depend on shows after the head, the code between the forwards and the backwards of a batch: see
Note [After the head]. Joined runs need one more number, the bytes of the tensor that a block passes on.
:class:`~graphckpt.planning.memory_model.MemoryModel` predicts the same from the lifetimes of storages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Generic, NamedTuple, TypeAlias, TypeVar, final

from graphckpt.planning.memory_model import IntervalLevel, Runs
from graphckpt.planning.program import EventKind, Interval, Phase, StepLog

_Value = TypeVar("_Value")
_KEEP = 0  # the first option of a measured step

# Note [After the head]
# Three things change the level without a block that runs. All show as *excess* at the start of a backward: live bytes
# beyond the base and what the open calls retain.
#
# output   A block that saves its own output, such as a ReLU, holds what the next block holds as its argument. The next
#          one releases it first, so it is an excess in the own backward alone.
# late     The head frees what a kept block still holds, such as autocast's copies of weights. Each kept call adds its
#          own, so the excess grows from call to call, and that is how `late` and `output` are told apart.
# shared   A recomputed block holds its arguments: a mask, or a cache and what it reaches. In the base they live until
#          the backward of the first call that has them. If all later calls are kept, the head frees them.


class LevelSpan(NamedTuple):
    """Live bytes in an interval."""

    start: int
    peak: int
    end: int


LevelLog: TypeAlias = "Mapping[Interval, LevelSpan]"
"""The levels of a step, by interval, in the order of time."""


def level_log(log: StepLog) -> LevelLog:
    level, spans = 0, {}
    for interval in log.intervals:
        start = peak = level
        for entry in log.entries(interval):
            level += entry.num_bytes * ((entry.kind is EventKind.BORN) - (entry.kind is EventKind.GONE))
            peak = max(peak, level)
        spans[interval] = LevelSpan(start, peak, level)
    return spans


class LevelRow(NamedTuple):
    """What a call does to the level under an option, in bytes."""

    retained: int
    """From its forward to its backward, relative to the base; it may be negative."""
    rise_forward: int
    rise_backward: int


@final
class _Readings(Generic[_Value]):
    """Values by call and option. A call without its own reading has that of an equal call."""

    def __init__(self, kinds: Sequence[tuple[int, int]]) -> None:
        self._kinds = kinds
        self._of_call: dict[tuple[int, int], _Value] = {}
        self._of_kind: dict[tuple[tuple[int, int], int], tuple[bool, _Value]] = {}

    def add(self, call: int, option: int, value: _Value, *, is_typical: bool = True) -> None:
        """Adds a reading. One that is not typical stands for equal calls only until there is a typical one."""
        self._of_call.setdefault((call, option), value)
        key = self._kinds[call], option
        if key not in self._of_kind or (is_typical and not self._of_kind[key][0]):
            self._of_kind[key] = is_typical, value

    def get(self, call: int, option: int) -> _Value | None:
        own = self._of_call.get((call, option))
        return self._of_kind.get((self._kinds[call], option), (False, None))[1] if own is None else own


class _Batch(NamedTuple):
    """Calls whose backwards follow on one head."""

    head: Interval
    calls: list[int]
    """In the order of their backwards."""
    opened: list[tuple[int, ...]]
    """For each of ``calls``, those whose forward is over and whose backward is not, at the start of its backward."""


def _batches(spans: LevelLog, dropped: Collection[int]) -> list[_Batch]:
    batches: list[_Batch] = []
    opened: dict[int, None] = {}
    is_forward, before = False, Interval(Phase.BEFORE)
    for interval in spans:
        if interval.phase is Phase.FORWARD:
            opened[interval.call] = None
            is_forward = True
        elif interval.phase is Phase.BACKWARD:
            if interval.call not in dropped:
                if is_forward:
                    batches.append(_Batch(before, [], []))
                    is_forward = False
                batches[-1].calls.append(interval.call)
                batches[-1].opened.append(tuple(opened))
            opened.pop(interval.call, None)
        before = interval
    return batches


@final
class LevelTable:
    """The levels of a step under any plan.

    Args:
        base: the trace of the step with every block recomputed.
        base_option: the number of the option that each block has in it.
        classes: the class of each block; blocks of one class are equal.
        runs: traces of the step, each with the option of each block: one with all blocks kept (option 0), and each
            option of each class in one of them.
    """

    def __init__(
        self, base: StepLog, base_option: int, classes: Sequence[int], runs: Sequence[tuple[StepLog, Sequence[int]]]
    ) -> None:
        self._base = level_log(base)
        self._block_of_call = [call.block for call in base.calls]
        self._base_added = {call: num_bytes for call, (num_bytes, _) in _added(self._base).items()}
        self._passed_on = [
            sum(base.sizes.get(storage, 0) for storage in set(call.returned_before)) for call in base.calls
        ]
        """By call: the bytes of its arguments that the call before has returned, which hooks see."""
        self._dropped = base.dropped
        self._batches = _batches(self._base, base.dropped)
        places: Counter[int] = Counter()
        kinds = []
        for block in self._block_of_call:
            kinds.append((classes[block], places[block]))
            places[block] += 1
        self._rows = _Readings[LevelRow](kinds)
        self._output, self._late = _Readings[int](kinds), _Readings[int](kinds)
        self._shared: Counter[int] = Counter()
        """By the first call that holds them: what recomputed calls hold of their arguments."""
        self._head_rise: dict[Interval, int] = {}
        """By head: its peak with all blocks kept, beyond that of the base and what the calls retain."""
        self._late_in_shared: set[int] = set()
        """The calls whose ``late`` is a part of ``shared``: they hold some of it themselves."""

        logs = [(self._base, [base_option] * len(classes)), *((level_log(log), plan) for log, plan in runs)]
        for spans, plan in logs:
            self._read_rows(spans, plan)
        for spans, plan in logs:
            for batch in self._batches:
                if any(plan):
                    self._read_output(spans, plan, batch)
                else:
                    self._read_kept(spans, plan, batch)

    def peak(self, plan: Sequence[int], runs: Runs = ()) -> int:
        """Returns the most live bytes, for the number of the option of each block; see :meth:`levels`."""
        return max(level.peak for level in self.levels(plan, runs))

    def levels(self, plan: Sequence[int], runs: Runs = ()) -> Iterator[IntervalLevel]:
        """Yields the levels of a step, interval by interval.

        The blocks of ``runs`` are recomputed as one; each has the option of the base in ``plan``.
        """
        run_of = {call: calls for calls in self._joined_calls(runs) for call in calls}
        retained: dict[int, int] = {}
        after_head: list[int] = []
        """The open calls whose head is over."""
        heads = {batch.head: batch for batch in self._batches}
        for interval, base in self._base.items():
            call = interval.call
            rise = base.peak - base.start
            level = base.start + sum(retained.values()) + self._beyond(after_head, plan)
            if interval in heads and not interval.is_of_block:
                rise += self._rise_of_head(interval, retained, plan)
            if interval.phase is Phase.FORWARD:
                row = self._row(call, plan)
                rise, retained[call] = row.rise_forward, row.retained
                if call in run_of and call > run_of[call][0]:  # it frees its argument
                    retained[call] -= self._passed_on[call]
            elif interval.phase is Phase.BACKWARD:
                option = self._option(call, plan)
                rise = self._row(call, plan).rise_backward
                if call in run_of and call not in self._dropped:
                    if call == run_of[call][-1]:
                        rise = self._recompute(run_of[call], retained, rise)
                    else:
                        option, rise = _KEEP, self._kept_row(call).rise_backward
                if call in after_head:
                    level += self._output.get(call, option) or 0
                    after_head.remove(call)
                retained.pop(call, None)
            yield IntervalLevel(interval, level, level + rise)
            if interval in heads:
                after_head = list(retained)

    def _joined_calls(self, runs: Runs) -> Iterator[range]:
        for first, end in runs:
            for call, block in enumerate(self._block_of_call):
                if block == first:
                    yield range(call, call + end - first)

    def _recompute(self, calls: range, retained: dict[int, int], rise: int) -> int:
        """Recomputes all calls of a run but the last: they then retain what kept ones do, and their arguments.

        Returns the rise in the backward of the last one, which is recomputed as alone.
        """
        level = peak = 0
        for call in calls[:-1]:
            row = self._kept_row(call)
            peak = max(peak, level + row.rise_forward)
            retained[call] = row.retained + (self._late.get(call, _KEEP) or 0)
            level += retained[call] + self._passed_on[call + 1]
        return max(peak, level + rise)

    def _kept_row(self, call: int) -> LevelRow:
        row = self._rows.get(call, _KEEP)
        assert row is not None
        return row

    def _option(self, call: int, plan: Sequence[int]) -> int:
        return plan[self._block_of_call[call]]

    def _row(self, call: int, plan: Sequence[int]) -> LevelRow:
        row = self._rows.get(call, self._option(call, plan))
        assert row is not None, "an option that was in no run"
        return row

    def _beyond(self, opened: Sequence[int], plan: Sequence[int]) -> int:
        """Returns what the level after a head is beyond the base and what the calls retain; ``opened`` are in order."""
        last_recomputed = max((call for call in opened if self._option(call, plan) != _KEEP), default=-1)
        beyond = -sum(self._shared[call] for call in opened if call > last_recomputed)
        holder = max(opened, key=self._shared.__getitem__, default=-1)
        for call in opened:
            if self._option(call, plan) == _KEEP and (call not in self._late_in_shared or last_recomputed < holder):
                beyond += self._late.get(call, _KEEP) or 0
        return beyond

    def _rise_of_head(self, head: Interval, opened: Collection[int], plan: Sequence[int]) -> int:
        """Returns what the peak of a head is beyond that of the base and what the calls retain.

        The run with all blocks kept shows it. In others a recomputed block holds what is shared.
        """
        num_kept = sum(self._option(call, plan) == _KEEP for call in opened)
        rise = self._head_rise.get(head, 0)
        return rise if num_kept == len(opened) else max(0, rise) * num_kept // len(opened)

    def _read_rows(self, spans: LevelLog, plan: Sequence[int]) -> None:
        added = _added(spans)
        for call in range(len(self._block_of_call)):
            forward, backward = spans[Interval(Phase.FORWARD, call)], spans.get(Interval(Phase.BACKWARD, call))
            num_bytes, is_last = added[call]
            row = LevelRow(
                num_bytes - self._base_added[call],
                forward.peak - forward.start,
                0 if backward is None else backward.peak - backward.start,
            )
            self._rows.add(call, self._option(call, plan), row, is_typical=not is_last)

    def _excess(self, spans: LevelLog, plan: Sequence[int], batch: _Batch) -> dict[int, int]:
        """Returns the excess of each call of a batch, from the first forward on."""
        excess = {}
        for call, opened in zip(reversed(batch.calls), reversed(batch.opened), strict=True):
            interval = Interval(Phase.BACKWARD, call)
            if interval in spans:
                retained = sum(self._row(each, plan).retained for each in opened)
                excess[call] = spans[interval].start - self._base[interval].start - retained
        return excess

    def _read_output(self, spans: LevelLog, plan: Sequence[int], batch: _Batch) -> None:
        for call, num_bytes in self._excess(spans, plan, batch).items():
            if self._option(call, plan) != _KEEP:
                self._output.add(call, self._option(call, plan), max(0, num_bytes))

    def _read_kept(self, spans: LevelLog, plan: Sequence[int], batch: _Batch) -> None:
        """Reads what is shared, and `late` or `output` of kept blocks: see Note [After the head]."""
        excess = self._excess(spans, plan, batch)
        if not excess or batch.head not in spans:
            return
        first, *later = excess
        retained = sum(self._row(each, plan).retained for each in batch.opened[0])
        self._head_rise[batch.head] = spans[batch.head].peak - self._base[batch.head].peak - retained
        grows_by = {call: after - before for (_, before), (call, after) in pairwise(excess.items())}
        if later and min(grows_by.values()) > 0:
            for call in later:
                self._late.add(call, _KEEP, grows_by[call])
            self._late.add(first, _KEEP, self._late.get(first, _KEEP) or max(0, excess[first]), is_typical=False)
            self._shared[first] = max(0, (self._late.get(first, _KEEP) or 0) - excess[first])
            if len(excess) * min(grows_by.values()) <= self._shared[first]:
                self._late_in_shared.update(excess)
            return
        for call, num_bytes in excess.items():
            released = sum(self._shared[each] for each in excess)
            self._shared[call] = max(0, -num_bytes - released)
            self._output.add(call, _KEEP, max(0, num_bytes + released))


def _added(spans: LevelLog) -> dict[int, tuple[int, bool]]:
    """Returns, by call, what the level rises by from its forward to that of the next block, and whether it is the last.

    That of the last one ends before the head.
    """
    added: dict[int, tuple[int, bool]] = {}
    for interval, following in pairwise(interval for interval in spans if interval.is_of_block):
        if interval.phase is Phase.FORWARD:
            is_last = following.phase is Phase.BACKWARD
            end = spans[interval].end if is_last else spans[following].start
            added[interval.call] = end - spans[interval].start, is_last
    last = next(reversed([interval for interval in spans if interval.is_of_block]))
    if last.phase is Phase.FORWARD:
        added[last.call] = spans[last].end - spans[last].start, True
    return added
