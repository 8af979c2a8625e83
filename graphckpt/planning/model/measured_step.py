"""What is known of a step after it was measured. Data only."""

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
    """By the number of a call: what it has sent away from the device."""
    seconds: dict[Interval, float]
    step_seconds: float
    """Of the step without policies, where it was run, or else with these."""
    plain_seconds: dict[Interval, float] | None = None
    """Without policies, timed beside ``seconds``; ``None``: what one run shows holds for all, as nothing disturbs."""
    ahead_bytes: dict[int, int] = field(default_factory=dict)
    """By the number of a call: what a gather of its parts takes until they are used."""


@final
@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """What is known of a step: enough to foretell any plan."""

    names: tuple[str, ...]
    options: tuple[Option, ...]
    """In general; ``own`` says what each is for a block."""
    options_of: tuple[tuple[Option, ...], ...]
    """By block and option: what the block gets."""
    model: MemoryModel
    forward_seconds: tuple[tuple[float, ...], ...]
    """By block and option: of all its forwards in a step."""
    backward_seconds: tuple[tuple[float, ...], ...]
    """By block and option: of all its backwards in a step, with what runs again."""
    far_bytes: tuple[tuple[int, ...], ...]
    """By block and option: bytes that leave the device in a step."""
    step_seconds: float
    """Of the step with everything kept."""
    num_runs: int
    """Times that the step ran to be logged."""
    ahead_bytes: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """By call and option: what a gather takes that begins before the call's own backward."""
    notes: tuple[str, ...] = ()
    """Where the prediction is not exact, and why."""
