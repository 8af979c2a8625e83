"""The data of a plan that its tables and pictures show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """The policy of one block, and its cost."""

    block: str
    """Path of the block in the model."""
    option: str
    """The name of the policy in tables."""
    fields: Mapping[str, Any]
    """The policy, as :func:`graphckpt.apply` takes it."""
    extra_seconds: float = 0.0
    """Extra seconds per step over keeping everything."""
    moved_bytes: int = 0
    """Offloaded bytes."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One interval of the step, with the live bytes at its start and their peak."""

    name: str
    start_bytes: int
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class PlanSummary:
    """The predictions for the whole step."""

    predicted_peak_bytes: int
    """The peak of live bytes in a step, including weights, gradients, optimizer state and inputs."""
    predicted_step_seconds: float
    binding: str
    """The interval of the step that sets the peak, such as ``"backward of transformer.h.3"``."""
    floor_bytes: int
    """The lowest peak that the candidates can reach."""
    budget_bytes: int
    plain_peak_bytes: int
    """The peak when everything is kept."""
    plain_step_seconds: float
    correction_bytes: int = 0
    """Measured peak minus predicted peak, if the plan was checked; the prediction includes it."""
    device: str = "cpu"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ShownPlan:
    """A plan as pictures show it."""

    summary: PlanSummary
    rows: Sequence[PlanRow]
    stages: Sequence[Stage]
