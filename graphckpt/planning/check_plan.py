"""Runs the step under a plan, and replans if the measured peak differs from the prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from torch import nn

from graphckpt.planning.errors import PlanError
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
    """Returns the plan of ``group``; with ``check``, one under which the step has kept the budget.

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

    def fastest(correction: int = 0) -> Plan:
        """Returns the plan for the budget; where none is predicted to fit, the one that is predicted to take least."""
        bound = planner.floor.peak if limit is None else limit
        choice = planner.search.fastest(max(bound - correction, planner.floor.peak)) if check else None
        plan = planner.plan(bound) if choice is None else planner.to_plan(choice, bound, correction)
        return replace(plan, model=model)

    def lowest() -> Plan:
        return replace(planner.to_plan(planner.floor, limit or 0), model=model)

    def refuse() -> NoReturn:
        raise PlanError(planner.infeasible(limit or 0, min(peaks.values())))

    peaks: dict[tuple[str, ...], int] = {}  # by the options of a plan
    fitting: list[Plan] = []
    candidate = group.plan(fastest, known, model)
    is_lowest = False
    while check:
        options = tuple(row.option for row in candidate.rows)
        if options in peaks:
            if fitting or is_lowest:
                break
            candidate, is_lowest = group.plan(lowest, known, model), True
            continue
        with candidate.apply():
            peak = peaks[options] = group.max(_peak(step, group, candidate))
        surprise = peak - candidate.predicted_peak_bytes
        if peak <= candidate.budget_bytes and abs(surprise) <= _TOLERANCE * candidate.predicted_peak_bytes:
            return candidate
        candidate = _corrected(candidate, surprise)
        if limit is None:
            return replace(candidate, budget_bytes=peak)
        if peak <= limit:
            fitting.append(candidate)
        if len(peaks) < _MOST_CHECKS:
            candidate = group.plan(partial(fastest, candidate.correction_bytes), known, model)
    if fitting:
        return min(fitting, key=lambda plan: plan.predicted_step_seconds)
    return group.from_leader(refuse) if check else candidate


def _corrected(plan: Plan, surprise: int) -> Plan:
    """Returns a plan with its peak as measured, which is ``surprise`` above the predicted one."""
    measured = plan.predicted_peak_bytes + surprise
    return replace(
        plan,
        predicted_peak_bytes=measured,
        floor_bytes=min(plan.floor_bytes + max(0, surprise), measured),
        plain_peak_bytes=plan.plain_peak_bytes + surprise,
        correction_bytes=plan.correction_bytes + surprise,
    )


def _peak(step: RealStep, group: PlanGroup, plan: Plan) -> int:
    """Returns the peak of a step under a plan.

    The thread of gloo sometimes frees the tensors of a collective late, so the lower of two peaks counts. If tensors
    are offloaded, the higher one counts: threads copy them, which may be early now and late another time. For the same
    reason a peak below the prediction proves nothing.
    """
    if step.device.type != "cpu":
        return step.peak()
    if any(row.moved_bytes for row in plan.rows):
        return max(plan.predicted_peak_bytes - plan.correction_bytes, step.peak(), step.peak())
    return min(step.peak() for _ in range(1 + (group.size > 1)))
