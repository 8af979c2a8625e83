"""Blocks in a row that are recomputed as one run: only the input of the first is kept, and backward runs all again.

::

    forward     [0 1 2]  3     the inputs of 1 and 2 go when 1 and 2 have run
    backward     3  0 1 2  2 1 0     0 and 1 run again as if they kept all, then 2 as if it alone was recomputed

So what a run does follows from what each of its blocks was seen to do alone: under ``keep`` and under ``full``. The
first block of a run has ``full`` in the end, the others have ``joined``.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import fsum
from typing import TYPE_CHECKING, TypeAlias, final

from graphckpt.planning.model.events import EventKind, Interval, Phase
from graphckpt.planning.model.program import PrivateRun
from graphckpt.planning.model.simulate import Change
from graphckpt.planning.option import KEEP
from graphckpt.rules import Full

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from graphckpt.planning.model.measured_step import MeasuredStep
    from graphckpt.planning.model.simulate import EventSeq

Runs: TypeAlias = "tuple[tuple[int, int], ...]"
"""The first block of each run, and the one behind its last."""

LENGTHS = (2, 3, 4, 5, 6, 8, 10, 12, 16)
"""Blocks in a run. Of n blocks, runs of about sqrt(n) take the least memory: these serve 250."""


@final
@dataclass(frozen=True, slots=True)
class _JoinedCall:
    """What a call does in a run: as its first block, which kept its input, or as one behind it."""

    holds: frozenset[int]
    """The shared storages that it holds until its backward."""
    forward: EventSeq
    backward: EventSeq
    """All is there already."""


@final
class JoinedRuns:
    """Which blocks can be joined, and what a step does where they are.

    Args:
        measured: the step.
    """

    def __init__(self, measured: MeasuredStep) -> None:
        self._model = model = measured.model
        rules = [option.rule for option in measured.options]
        self._full = next((n for n, rule in enumerate(rules) if rule == Full() and not measured.options[n].is_far), 0)
        self._keep = measured.options.index(KEEP)
        self._calls: dict[int, list[int]] = {}
        for call, block in enumerate(model.block_of_call):
            self._calls.setdefault(block, []).append(call)
        every = range(len(model.block_of_call) if self._full else 0)
        self._handed = {call: storage for call in every for storage in self._handed_to(call)}
        self._first = {call: self._as_first(call) for call in every}
        self._behind = {call: self._as_behind(call) for call in self._handed}
        self._again = {call: self._steps_again(call) for call in every}
        self._last = {call: self._backward_of_last(call) for call in self._handed}
        self._follows = [
            all(call in self._handed for call in self._calls.get(block, [-1])) for block in range(len(measured.names))
        ]
        self.extra_seconds = [self._extra_seconds(measured, block) for block in range(len(measured.names))]
        """By block: what it takes longer where others are joined to it, since all of it runs again then; ``full`` ends
        its second run with the last tensor that backward needs."""

    def seconds(self, runs: Runs) -> float:
        """Returns what runs take beyond the seconds of their blocks under ``full``."""
        return fsum(self.extra_seconds[block] for first, end in runs for block in range(first, end - 1))

    @property
    def full(self) -> int:
        """The option that each block of a run has in a plan."""
        return self._full

    def lengths(self, block: int) -> Sequence[int]:
        """Returns how many blocks a run may have that begins with this one."""
        longest = 1
        while longest < LENGTHS[-1] and block + longest < len(self._follows) and self._follows[block + longest]:
            longest += 1
        return LENGTHS[: bisect_right(LENGTHS, longest)]

    def steps_of(self, runs: Runs) -> dict[Interval, Sequence[EventSeq]]:
        """Returns what happens in the intervals of all blocks of some runs, in all passes of a step."""
        return {
            interval: steps
            for first, end in runs
            for call in self._calls[first]
            for interval, steps in self.steps(range(call, call + end - first))
        }

    def steps(self, calls: range) -> Iterator[tuple[Interval, Sequence[EventSeq]]]:
        """Yields what happens in the intervals of one pass through a run, forward and backward."""
        first, last = calls[0], calls[-1]
        each = [(call, self._first[call] if call == first else self._behind[call]) for call in calls]
        for call, does in each:
            yield Interval(Phase.FORWARD, call), (does.forward,)
        yield Interval(Phase.BACKWARD, last), (*(self._again[call] for call in calls[:-1]), self._last[last])
        for call, does in reversed(each[:-1]):
            yield Interval(Phase.BACKWARD, call), (does.backward,)

    def handed(self, calls: range) -> frozenset[int]:
        """Returns the storages that the calls of a run hand on to one another."""
        return frozenset(self._handed[call] for call in calls[1:])

    def holds(self, calls: range) -> frozenset[int]:
        """Returns the shared storages that the calls of a run hold until their backward."""
        return self._first[calls[0]].holds.union(*(self._behind[call].holds for call in calls[1:]))

    def _extra_seconds(self, measured: MeasuredStep, block: int) -> float:
        again, backward = measured.forward_seconds[block][self._keep], measured.backward_seconds[block]
        return max(0.0, again + backward[self._keep] - backward[self._full])

    def _as_first(self, call: int) -> _JoinedCall:
        holds = self._model.holds(call, self._full)
        forward = self._model.steps(Interval(Phase.FORWARD, call), self._full)
        return _JoinedCall(holds, forward, self._model.steps_of(self._backward(call, holds)))

    def _as_behind(self, call: int) -> _JoinedCall:
        """The input is not held, and goes when it has been used."""
        handed = self._handed[call]
        holds = self._model.holds(call, self._full) - {handed}
        forward = [
            step
            for step in self._model.steps(Interval(Phase.FORWARD, call), self._full)
            if isinstance(step, PrivateRun)
            or step.storage != handed
            or step.kind not in (EventKind.HELD, EventKind.RELEASED)
        ]
        gone = self._change(EventKind.GONE, handed)
        backward = [*self._backward(call, holds), gone]
        return _JoinedCall(holds, self._model.steps_of([*forward, gone]), self._model.steps_of(backward))

    def _backward(self, call: int, holds: frozenset[int]) -> Iterator[PrivateRun | Change]:
        yield from self._model.steps(Interval(Phase.BACKWARD, call), self._keep)
        yield from (self._change(EventKind.RELEASED, storage) for storage in sorted(holds))
        yield from (PrivateRun(0, -2 * held.change) for held in self._private(call))

    def _steps_again(self, call: int) -> EventSeq:
        """It runs as if it kept all."""
        forward = self._model.steps(Interval(Phase.FORWARD, call), self._keep)
        return self._model.steps_of([*self._private(call), *forward])

    def _backward_of_last(self, call: int) -> EventSeq:
        """It runs again, as if it alone was recomputed."""
        steps = self._model.steps(Interval(Phase.BACKWARD, call), self._full)
        handed = self._handed[call]
        return self._model.steps_of(
            [self._change(EventKind.HELD, handed), *steps, self._change(EventKind.GONE, handed)]
        )

    def _private(self, call: int) -> list[PrivateRun]:
        """Returns what a call keeps beside its inputs, such as buffers as they were; to set them back takes as much."""
        steps = self._model.steps(Interval(Phase.FORWARD, call), self._full)
        num_bytes = sum(step.change for step in steps if isinstance(step, PrivateRun))
        return [PrivateRun(num_bytes, num_bytes)] if num_bytes > 0 else []

    def _change(self, kind: EventKind, storage: int) -> Change:
        return Change(kind, storage, self._model.base.sizes.get(storage, 0))

    def _handed_to(self, call: int) -> list[int]:
        """Returns what a call is given that the call of the block before it has just made, and nobody else uses."""
        base = self._model.base
        if call == 0 or any(Interval(Phase.BACKWARD, c) not in base.intervals for c in (call - 1, call)):
            return []
        before, here = base.calls[call - 1], base.calls[call]
        if before.block != here.block - 1:
            return []
        made = [storage for storage in here.arguments if storage in before.outputs and storage not in before.arguments]
        if len(set(made)) != 1:
            return []
        users = [c for c in range(len(base.calls)) if made[0] in base.roles(c)]
        return made[:1] if users == [call - 1, call] else []
