"""The result of measuring a step. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphckpt.planning.model.events import Interval, TraceLog
    from graphckpt.planning.model.memory_model import MemoryModel
    from graphckpt.planning.option import Option


@final
@dataclass(frozen=True, slots=True)
class StepSample:
    """One run of the step with one option on each block."""

    trace: TraceLog
    far_bytes: dict[int, int]
    """The offloaded bytes of each call, by its number."""
    seconds: dict[Interval, float]
    step_seconds: float
    """Seconds of the step without policies, if it was run, or else with these."""
    plain_seconds: dict[Interval, float] | None = None
    """Seconds without policies, timed beside ``seconds``; ``None`` if times are estimated and do not vary."""
    ahead_bytes: dict[int, int] = field(default_factory=dict)
    """The bytes that an all-gather of a call's parts takes until they are used, by the number of the call."""


@final
@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """The measurements of a step, from which any plan can be predicted."""

    names: tuple[str, ...]
    options: tuple[Option, ...]
    """The options in general; ``options_of`` holds those of each block."""
    options_of: tuple[tuple[Option, ...], ...]
    """The options by block."""
    model: MemoryModel
    forward_seconds: tuple[tuple[float, ...], ...]
    """By block and option: the seconds of all its forwards in a step."""
    backward_seconds: tuple[tuple[float, ...], ...]
    """By block and option: the seconds of all its backwards in a step, with the recomputation."""
    far_bytes: tuple[tuple[int, ...], ...]
    """By block and option: the bytes that are offloaded in a step."""
    step_seconds: float
    """Seconds of the step with everything kept."""
    num_runs: int
    """The number of traced runs."""
    ahead_bytes: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """By call and option: the bytes of an all-gather that begins before the backward of the call."""
    notes: tuple[str, ...] = ()
    """Where the prediction is not exact, and why."""
