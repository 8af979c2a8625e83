"""A plan beneath the floor of one second run of each block: an ``nn.Sequential`` in halves of halves.

Runs of about ``sqrt(n)`` blocks that run again once are part of every plan. Long stacks take less memory where a part
runs again several times.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from graphckpt.planning.plan import Plan, PlanRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphckpt.planning.agree import Team
    from graphckpt.planning.planner import Planner
    from graphckpt.planning.real import RealStep


def plan_below_floor(step: RealStep, planner: Planner, budget: int, team: Team) -> Plan | None:
    """Returns the plan if it fits in ``budget``, as measured; else ``None``.

    Only the children of one ``nn.Sequential`` can be halved: what calls them is known.
    """
    model = planner.model
    name = None if model is None else _sequential_of(model, planner.measured.names)
    if name is None:
        return None
    row = PlanRow(block=name, option="segments(log)", fields={"segments": "log"})
    layers = planner.measured.names if planner.compiled else ()
    others = (*(PlanRow(block=name, option="compiled", fields=planner.compiled) for name in layers), *planner.also)
    rows = (row, *others)

    def described() -> Plan:
        return replace(planner.described(planner.floor, budget), rows=rows, stages=())

    plan = replace(team.plan(described, [row.fields for row in rows], model), rows=rows)
    with plan.apply(model):
        peak = team.most(step.peak())
        seconds = team.most(step.seconds())
    if peak > budget:
        return None
    return replace(
        plan,
        rows=(replace(row, extra_seconds=seconds - planner.measured.step_seconds), *others),
        predicted_peak_bytes=peak,
        predicted_step_seconds=seconds,
        binding="measured, and not foretold",
        floor_bytes=min(peak, plan.floor_bytes),
    )


def _sequential_of(model: nn.Module, names: Sequence[str]) -> str | None:
    parents = {name.rpartition(".")[0] for name in names}
    if len(parents) != 1:
        return None
    parent = parents.pop()
    return parent if isinstance(model.get_submodule(parent), nn.Sequential) else None
