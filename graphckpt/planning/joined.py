"""Blocks in a row that are recomputed as one run: only the input of the first is kept, and backward runs all again.

::

    forward     [0 1 2]  3     the inputs of 1 and 2 go when 1 and 2 have run
    backward     3  0 1 2  2 1 0     0 and 1 run again as if they kept all, then 2 as if it alone was recomputed

So what a run does follows from what each of its blocks was seen to do alone: under ``keep`` and under ``full``. The
first block of a run has ``full`` in the end, the others have ``joined``.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import cache
from math import fsum
from typing import TYPE_CHECKING, TypeAlias, final

from graphckpt.planning.predict import Change
from graphckpt.planning.program import Run
from graphckpt.planning.run import KEEP, Option
from graphckpt.planning.trace import Interval, Kind, Phase
from graphckpt.rules import Full, Joined

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from graphckpt.planning.measured import Measured
    from graphckpt.planning.predict import Steps

Runs: TypeAlias = "tuple[tuple[int, int], ...]"
"""The first block of each run, and the one behind its last."""

LENGTHS = (2, 3, 4, 5, 6, 8, 10, 12, 16)
"""Blocks in a run. Of n blocks, runs of about sqrt(n) take the least memory: these serve 250."""

JOINED = Option("joined", {"activation_checkpointing": "joined"}, Joined())
"""What a plan gives to the blocks of a run behind the first."""


@final
class Joints:
    """Which blocks can be joined, and what a step does where they are.

    Args:
        measured: the step.
    """

    def __init__(self, measured: Measured) -> None:
        self._model = model = measured.model
        rules = [option.rule for option in measured.options]
        self._full = next((n for n, rule in enumerate(rules) if rule == Full() and not measured.options[n].is_far), 0)
        self._keep = measured.options.index(KEEP)
        self._calls: dict[int, list[int]] = {}
        for call, block in enumerate(model.block_of_call):
            self._calls.setdefault(block, []).append(call)
        for each in ("_forward", "_again", "_backward", "_backward_of_last", "_private", "holds"):
            setattr(self, each, cache(getattr(self, each)))  # of this object, and gone with it
        self._handed = {call: storage for call in range(len(model.block_of_call)) for storage in self._handed_to(call)}
        self._follows = [
            self._full > 0 and all(call in self._handed for call in self._calls.get(block, [-1]))
            for block in range(len(measured.names))
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

    def steps_of(self, runs: Runs) -> dict[Interval, Steps]:
        """Returns what happens in the intervals of all blocks of some runs, in all passes of a step."""
        found: dict[Interval, Steps] = {}
        for first, end in runs:
            for call in self._calls[first]:
                found.update(self.steps(range(call, call + end - first)))
        return found

    def steps(self, calls: range) -> Iterator[tuple[Interval, Steps]]:
        """Yields what happens in the intervals of one pass through a run."""
        first, last = calls[0], calls[-1]
        for call in calls:
            is_first = call == first
            steps = self._model.steps(Interval(Phase.FORWARD, call), self._full)
            yield Interval(Phase.FORWARD, call), steps if is_first else self._forward(call)
        for call in calls[:-1]:
            yield Interval(Phase.BACKWARD, call), self._backward(call, is_first=call == first)
        again = [step for call in calls[:-1] for step in self._again(call)]
        yield Interval(Phase.BACKWARD, last), again + self._backward_of_last(last)

    def _extra_seconds(self, measured: Measured, block: int) -> float:
        again, backward = measured.forward_seconds[block][self._keep], measured.backward_seconds[block]
        return max(0.0, again + backward[self._keep] - backward[self._full])

    def _forward(self, call: int) -> Steps:
        """The input is not held, and goes when it has been used."""
        steps = self._model.steps(Interval(Phase.FORWARD, call), self._full)
        handed = self._handed[call]
        kept = [
            step
            for step in steps
            if isinstance(step, Run) or step.storage != handed or step.kind not in (Kind.HELD, Kind.RELEASED)
        ]
        return [*kept, self._change(Kind.GONE, handed)]

    def _again(self, call: int) -> Steps:
        """It runs as if it kept all."""
        return [*self._private(call), *self._model.steps(Interval(Phase.FORWARD, call), self._keep)]

    def _backward(self, call: int, *, is_first: bool) -> Steps:
        """All is there already."""
        own = self._model.holds(call, self._full) if is_first else self.holds(call)
        released = [self._change(Kind.RELEASED, storage) for storage in sorted(own)]
        private = [Run(0, -2 * held.change) for held in self._private(call)]
        gone = [] if is_first else [self._change(Kind.GONE, self._handed[call])]
        return [*self._model.steps(Interval(Phase.BACKWARD, call), self._keep), *released, *private, *gone]

    def _backward_of_last(self, call: int) -> Steps:
        """It runs again, as if it alone was recomputed."""
        steps = self._model.steps(Interval(Phase.BACKWARD, call), self._full)
        handed = self._handed[call]
        return [self._change(Kind.HELD, handed), *steps, self._change(Kind.GONE, handed)]

    def handed(self, call: int) -> int:
        """Returns the number of the storage that the call before hands on to a call."""
        return self._handed[call]

    def holds(self, call: int) -> frozenset[int]:
        """Returns the shared storages that a joined call holds until its backward."""
        return self._model.holds(call, self._full) - {self._handed[call]}

    def _private(self, call: int) -> list[Run]:
        """Returns what a call keeps beside its inputs, such as buffers as they were; to set them back takes as much."""
        steps = self._model.steps(Interval(Phase.FORWARD, call), self._full)
        num_bytes = sum(step.change for step in steps if isinstance(step, Run))
        return [Run(num_bytes, num_bytes)] if num_bytes > 0 else []

    def _change(self, kind: Kind, storage: int) -> Change:
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
