"""Plans beneath the floor of block-wise recompute: of runs of an ``nn.Sequential``'s children, only inputs are kept.

With every block recomputed, the inputs of all blocks are still kept. Fewer are kept by recomputing runs of blocks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from graphckpt.planning.plan import Plan, PlanRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphckpt.planning.planner import Planner
    from graphckpt.planning.real import RealStep


def plan_below_floor(
    step: RealStep, model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], planner: Planner, budget: int
) -> Plan | None:
    """Returns the fastest plan by runs of blocks that fits in ``budget``, as measured; ``None`` if there is none.

    Only the children of one ``nn.Sequential`` can be joined: what calls them is known.
    """
    name = _sequential_of(model, [name for name, _ in blocks])
    if name is None:
        return None
    fitting = []
    for runs in ("sqrt", "log", *range(2, min(9, len(blocks)))):
        fields = {"segments": runs}
        row = PlanRow(block=name, option=f"segments({runs})", fields=fields)
        plan = replace(planner.described(planner.floor, budget), rows=(row,), stages=())
        with plan.apply(model):
            peak = step.peak()
            seconds = step.seconds()
        if peak <= budget:
            plain = planner.measured.step_seconds
            row = replace(row, extra_seconds=seconds - plain)
            fitting.append(
                replace(
                    plan,
                    rows=(row,),
                    predicted_peak_bytes=peak,
                    predicted_step_seconds=seconds,
                    binding="measured, and not foretold",
                    floor_bytes=min(peak, planner.floor.peak),
                )
            )
    return min(fitting, key=lambda plan: plan.predicted_step_seconds, default=None)


def _sequential_of(model: nn.Module, names: Sequence[str]) -> str | None:
    parents = {name.rpartition(".")[0] for name in names}
    if len(parents) != 1:
        return None
    parent = parents.pop()
    return parent if isinstance(model.get_submodule(parent), nn.Sequential) else None
