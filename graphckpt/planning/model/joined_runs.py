"""Consecutive blocks that are recomputed as one: only the input of the first is saved.

::

    forward     [0 1 2]  3     the inputs of 1 and 2 are freed after 1 and 2
    backward     3  0 1 2  2 1 0     0 and 1 are recomputed as under keep, then 2 as under full

So the events of a run follow from the traces of each block under ``keep`` and under ``full``. In a plan the first block
of a run has ``full``, the others have ``joined``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import fsum
from typing import TypeAlias, final

from graphckpt.planning.candidates import KEEP
from graphckpt.planning.model.events import EventKind, Interval, Phase
from graphckpt.planning.model.memory_model import MeasuredStep
from graphckpt.planning.model.program import PrivateRun
from graphckpt.planning.model.simulate import Change, EventSeq
from graphckpt.rules.basic import Full

Runs: TypeAlias = "tuple[tuple[int, int], ...]"
"""The first block of each run, and the one after its last."""

_HOLDS = EventKind.HELD, EventKind.RELEASED

LENGTHS = (2, 3, 4, 5, 6, 8, 10, 12, 16)
"""Possible lengths of runs. For n blocks, runs of about sqrt(n) take the least memory: these suffice for 250."""


@final
@dataclass(frozen=True, slots=True)
class _JoinedCall:
    """The events of a call in a run: as its first block, which saves its input, or as a later one."""

    holds: frozenset[int]
    """The shared storages that it holds until its backward."""
    forward: EventSeq
    backward: EventSeq
    """After all results have been recomputed."""


@final
class JoinedRuns:
    """Which blocks can be joined, and the events of a step in which they are.

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
        self._inputs = {call: storage for call in every for storage in self._input_of(call)}
        self._allocated = {call: frozenset(model.base.allocated(call)) - {self._inputs.get(call + 1)} for call in every}
        self._first = {call: self._as_first(call) for call in every}
        self._behind = {call: self._as_behind(call) for call in self._inputs}
        self._recomputed = {call: self._model.steps_of(self._recomputation(call)) for call in every}
        self._recomputed_behind = {call: self._recomputation_behind(call) for call in self._inputs}
        self._last = {call: self._backward_of_last(call) for call in self._inputs}
        self._follows = [
            all(call in self._inputs for call in self._calls.get(block, [-1])) for block in range(len(measured.names))
        ]
        self.extra_seconds = [self._extra_seconds(measured, block) for block in range(len(measured.names))]
        """By block: the extra seconds if others are joined to it, since all of it is recomputed then; the
        recomputation of ``full`` stops at the last tensor that backward needs."""

    def seconds(self, runs: Runs) -> float:
        """Returns the seconds of runs beyond those of their blocks under ``full``."""
        return fsum(self.extra_seconds[block] for first, end in runs for block in range(first, end - 1))

    @property
    def full(self) -> int:
        """The option that each block of a run has in a plan."""
        return self._full

    def lengths(self, block: int) -> Sequence[int]:
        longest = 1
        while longest < LENGTHS[-1] and block + longest < len(self._follows) and self._follows[block + longest]:
            longest += 1
        return LENGTHS[: bisect_right(LENGTHS, longest)]

    def steps_of(self, runs: Runs) -> dict[Interval, Sequence[EventSeq]]:
        """Returns the events of the blocks of some runs, by interval, in all passes of a step."""
        return {
            interval: steps
            for first, end in runs
            for call in self._calls[first]
            for interval, steps in self.steps(range(call, call + end - first))
        }

    def steps(self, calls: range) -> Iterator[tuple[Interval, Sequence[EventSeq]]]:
        """Yields the events of one pass through a run, forward and backward, by interval."""
        first, last = calls[0], calls[-1]
        each = [(call, self._first[call] if call == first else self._behind[call]) for call in calls]
        for call, does in each:
            yield Interval(Phase.FORWARD, call), (does.forward,)
        if first in self._model.base.dropped:  # nothing is recomputed
            yield from ((Interval(Phase.BACKWARD, call), (does.backward,)) for call, does in each)
            return
        recomputed = [self._recomputed[first], *(self._recomputed_behind[call] for call in calls[1:-1])]
        yield Interval(Phase.BACKWARD, last), (*recomputed, self._last[last])
        for call, does in reversed(each[:-1]):
            yield Interval(Phase.BACKWARD, call), (does.backward,)

    def inputs(self, calls: range) -> frozenset[int]:
        """Returns the storages that a call of a run passes to the next one."""
        return frozenset(self._inputs[call] for call in calls[1:])

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
        """The input is not held, and is freed after its use."""
        passed_on = self._inputs[call]
        holds = self._model.holds(call, self._full) - {passed_on}
        forward = self._under_full(Phase.FORWARD, call, passed_on)
        free = self._change(EventKind.GONE, passed_on)
        backward = [*self._backward(call, holds, passed_on), free]
        return _JoinedCall(holds, self._model.steps_of([*forward, free]), self._model.steps_of(backward))

    def _backward(
        self, call: int, holds: frozenset[int], passed_on: int | None = None
    ) -> Iterator[PrivateRun | Change]:
        if call in self._model.base.dropped:
            yield from self._under_full(Phase.BACKWARD, call, passed_on)
            return
        for step in self._model.steps(Interval(Phase.BACKWARD, call), self._keep):
            yield self._recomputed_one(call, step) if isinstance(step, Change) and step.kind in _HOLDS else step
        yield from (self._change(EventKind.RELEASED, storage) for storage in sorted(holds))
        yield from (PrivateRun(0, -2 * held.change) for held in self._private(call))

    def _under_full(self, phase: Phase, call: int, passed_on: int | None) -> Iterator[PrivateRun | Change]:
        """Yields the events under ``full``, but for the hold of the storage ``passed_on``."""
        for step in self._model.steps(Interval(phase, call), self._full):
            if isinstance(step, PrivateRun) or step.storage != passed_on or step.kind not in _HOLDS:
                yield step

    def _recomputation(self, call: int) -> list[PrivateRun | Change]:
        """It is recomputed as under ``keep``; of what leaves the block, only the input of the next one stays."""
        forward = [
            self._recomputed_one(call, step) if isinstance(step, Change) else step
            for step in self._model.steps(Interval(Phase.FORWARD, call), self._keep)
        ]
        born = [step for step in forward if isinstance(step, Change) and step.kind is EventKind.BORN]
        frees = [step._replace(kind=EventKind.GONE) for step in born if step.storage != self._inputs.get(call + 1)]
        return [*self._private(call), *forward, *frees]

    def _recomputation_behind(self, call: int) -> EventSeq:
        """The input is freed at the end, unless an op saves it."""
        passed_on = self._inputs[call]
        is_saved = passed_on in self._model.holds(call, self._keep)
        frees = [] if is_saved else [self._change(EventKind.GONE, passed_on)]
        return self._model.steps_of([*self._recomputation(call), *frees])

    def _recomputed_one(self, call: int, step: Change) -> Change:
        """Returns the event for what the recomputation allocates in place of a storage of the original forward."""
        if step.storage not in self._allocated[call]:
            return step
        return step._replace(storage=-2 - (hash(("recomputed", call, step.storage)) & 0xFFFFFFFFFFFF))

    def _backward_of_last(self, call: int) -> EventSeq:
        """It is recomputed as under ``full``."""
        steps = self._model.steps(Interval(Phase.BACKWARD, call), self._full)
        passed_on = self._inputs[call]
        return self._model.steps_of(
            [self._change(EventKind.HELD, passed_on), *steps, self._change(EventKind.GONE, passed_on)]
        )

    def _private(self, call: int) -> list[PrivateRun]:
        """Returns what a call saves beside its inputs, such as copies of buffers; restoring them takes as much."""
        steps = self._model.steps(Interval(Phase.FORWARD, call), self._full)
        num_bytes = sum(step.change for step in steps if isinstance(step, PrivateRun))
        return [PrivateRun(num_bytes, num_bytes)] if num_bytes > 0 else []

    def _change(self, kind: EventKind, storage: int) -> Change:
        return Change(kind, storage, self._model.base.sizes.get(storage, 0))

    def _input_of(self, call: int) -> list[int]:
        """Returns the argument that the call of the block before it has created, if nothing else uses or holds it."""
        base = self._model.base
        if call == 0 or any(Interval(Phase.BACKWARD, c) not in base.intervals for c in (call - 1, call)):
            return []
        before, here = base.calls[call - 1], base.calls[call]
        if before.block != here.block - 1 or (call in base.dropped) != (call - 1 in base.dropped):
            return []
        made = [storage for storage in here.arguments if storage in before.outputs and storage not in before.arguments]
        if len(set(made)) != 1 or made[0] not in here.returned_before:
            return []
        users = [c for c in range(len(base.calls)) if made[0] in base.roles(c)]
        end = self._model.ends.get(made[0])
        is_freed = end is not None and end[0] in (Interval(Phase.FORWARD, call), Interval(Phase.AFTER_FORWARD, call))
        return made[:1] if is_freed and users == [call - 1, call] else []
