"""The data of a plan that its tables and pictures show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """What a plan does with one block."""

    block: str
    """Path of the block in the model."""
    option: str
    """The policy, as tables show it."""
    fields: Mapping[str, Any]
    """The policy, as :func:`graphckpt.apply` takes it."""
    extra_seconds: float = 0.0
    """Seconds of a step that the policy costs, against keeping everything."""
    moved_bytes: int = 0
    """Bytes that leave the device."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One interval of the step: the level of live bytes when it begins, and the highest in it."""

    name: str
    start_bytes: int
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class PlanSummary:
    """What the whole step takes under a plan."""

    predicted_peak_bytes: int
    """The most bytes that are alive at once in a step: weights, gradients, optimizer state, inputs and all else."""
    predicted_step_seconds: float
    binding: str
    """The interval of the step that sets the peak, such as ``"backward of transformer.h.3"``."""
    floor_bytes: int
    """The least peak that the candidates can reach."""
    budget_bytes: int
    plain_peak_bytes: int
    """The peak when everything is kept."""
    plain_step_seconds: float
    correction_bytes: int = 0
    """Measured peak minus predicted peak, if the plan was checked; the prediction includes it."""
    device: str = "cpu"
