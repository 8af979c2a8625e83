"""The samples of a step, and what follows from them: the level of live bytes and the seconds under any plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from graphckpt.planning.levels import LevelTable
from graphckpt.planning.program import Interval, Phase, TraceLog

if TYPE_CHECKING:
    from graphckpt.planning.candidates import Option


@final
@dataclass(frozen=True, slots=True)
class StepSample:
    """One run of the step with one option on each block."""

    trace: TraceLog
    peak_bytes: int
    seconds: dict[Interval, float]
    step_seconds: float
    """Seconds of the step without policies, if it was run, or else with these."""
    plain_seconds: dict[Interval, float] | None = None
    """Seconds without policies, timed beside ``seconds``; ``None`` if times are estimated and do not vary."""


@final
@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """The measurements of a step, from which any plan can be predicted."""

    names: tuple[str, ...]
    options: tuple[Option, ...]
    """The options in general; ``options_of`` holds those of each block."""
    options_of: tuple[tuple[Option, ...], ...]
    """The options by block."""
    model: LevelTable
    forward_seconds: tuple[tuple[float, ...], ...]
    """By block and option: the seconds of all its forwards in a step."""
    backward_seconds: tuple[tuple[float, ...], ...]
    """By block and option: the seconds of all its backwards in a step, with the recomputation."""
    far_bytes: tuple[tuple[int, ...], ...]
    """By block and option: the bytes that are offloaded in a step."""
    step_seconds: float
    """Seconds of the step with everything kept."""
    optimizer_seconds: float
    """Seconds of the optimizer in that step."""
    num_runs: int
    """The number of traced runs."""
    ahead_bytes: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """By call and option: the bytes of an all-gather that begins before the backward of the call."""
    joinable: frozenset[int] = frozenset()
    """The calls that can be recomputed as one with the call before."""
    notes: tuple[str, ...] = ()
    """Where the prediction is not exact, and why."""

    def interval_name(self, interval: Interval) -> str:
        """Returns the name of an interval for tables and messages, such as ``"backward of h.1"``."""
        if interval.call < 0 or interval.phase is Phase.OPTIMIZER:
            return interval.phase.value
        block_of_call = self.model.block_of_call
        name = self.names[block_of_call[interval.call]]
        if interval.phase is Phase.AFTER_FORWARD and interval.call == len(block_of_call) - 1:
            return f"the head and the loss, after {name}"
        return f"{interval.phase.value} {name}"
