"""Runs the step under a plan, and replans if the measured peak differs from the prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from graphckpt.planning.measure.real_step import RealStep
from graphckpt.planning.plan import Plan
from graphckpt.planning.plan_group import PlanGroup
from graphckpt.planning.planner import Planner

_TOLERANCE = 0.01  # of the predicted peak; larger differences are corrected
_MOST_CHECKS = 3  # another plan may run other ops at its peak


def plan_and_check(
    planner: Planner,
    model: nn.Module,
    step: RealStep,
    limit: int | None,
    *,
    group: PlanGroup,
    known: Sequence[Mapping[str, Any]],
    check: bool,
) -> Plan:
    """Returns the plan of ``group``, checked if ``check`` is set.

    Args:
        planner: Used on the leader.
        model: The model of ``step``, which may be another one than that which was measured.
        step: Run on all processes; the largest difference counts.
        limit: The largest peak in bytes; ``None`` is the lowest possible.
        group: The processes that plan together.
        known: Fields of policies that all of them have.
        check: Run the step under the plan, and replan if its peak exceeds the budget or is over 1 % off.

    Raises:
        PlanError: No plan fits.
    """

    def chosen(correction: int = 0) -> Plan:
        bound = planner.floor.peak + max(0, correction) if limit is None else limit
        return replace(planner.plan(bound, correction=correction), model=model)

    found = group.plan(chosen, known, model)
    for _ in range(_MOST_CHECKS if check else 0):
        with found.apply():
            off = group.max(_peak(step, group, found)) - (found.predicted_peak_bytes - found.correction_bytes)
        surprise = off - found.correction_bytes
        is_over = found.predicted_peak_bytes + surprise > found.budget_bytes
        if not is_over and abs(surprise) <= _TOLERANCE * found.predicted_peak_bytes:
            break
        found = group.plan(partial(chosen, off), known, model)
    return found


def _peak(step: RealStep, group: PlanGroup, plan: Plan) -> int:
    """Returns the peak of a step under a plan.

    The thread of gloo sometimes frees the tensors of a collective late, so the lower of two peaks counts, unless
    tensors are offloaded: their copies may be late as well, and do count.
    """
    is_twice = group.size > 1 and step.device.type == "cpu" and not any(row.moved_bytes for row in plan.rows)
    return min(step.peak() for _ in range(1 + is_twice))
