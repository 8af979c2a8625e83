"""Adds prefetched all-gathers to the memory model.

A step under a plan prefetches the parts of the next block while a block's backward runs::

    backward of   3         2         1      of these 3 and 1 keep parts
    gathered      [ 1's ------------- ]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphckpt.planning.model.events import Interval, Phase
from graphckpt.planning.model.measured_step import MeasuredStep
from graphckpt.planning.model.program import PrivateRun
from graphckpt.planning.model.simulate import EventSeq


def with_gathers(
    measured: MeasuredStep, plan: Sequence[int], joined: Mapping[Interval, Sequence[EventSeq]]
) -> Mapping[Interval, Sequence[EventSeq]]:
    """Returns the events of some intervals, with the all-gathers that begin one block ahead of their use.

    Args:
        measured: the step.
        plan: the option of each block.
        joined: the events of those intervals without them.
    """
    model, ahead = measured.model, measured.ahead_bytes
    if not ahead:
        return joined
    found = dict(joined)
    before: Interval | None = None
    for interval in model.intervals:
        if interval.phase is not Phase.BACKWARD or interval.call in model.base.dropped:
            continue
        option = plan[model.block_of_call[interval.call]]
        num_bytes = ahead.get((interval.call, option), 0)
        if not num_bytes:
            continue
        if before is not None:
            own = found.get(before) or [model.steps(before, plan[model.block_of_call[before.call]])]
            found[before] = [model.steps_of([PrivateRun(num_bytes, num_bytes)]), *own]
            own = found.get(interval) or [model.steps(interval, option)]
            found[interval] = [model.steps_of([PrivateRun(0, -num_bytes)]), *own]
        before = interval
    return found
