"""Plans a run: for a memory budget, on its first batch, and anew where memory runs out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from graphckpt.errors import ConfigError
from graphckpt.planning.budget import Budget
from graphckpt.planning.options import PlanOptions
from graphckpt.planning.plan import Plan
from graphckpt.planning.show.table import summary_lines
from graphckpt.train.console import Report
from graphckpt.train.files import replacing
from graphckpt.train.settings import ActivationCheckpointConfig
from graphckpt.train.snapshot.saved_run import PLAN, SavedRun
from graphckpt.train.units import head_policies, unit_names

if TYPE_CHECKING:
    from graphckpt.train.graphs import TrainGraph


def plan_on_batch(
    graph: TrainGraph,
    budget: Budget,
    config: ActivationCheckpointConfig,
    report: Report,
    saved: SavedRun,
    batch: Mapping[str, Tensor],
) -> None:
    """Plans the graph for a batch and applies the plan.

    All ranks plan together; rank 0 writes the plan.
    """
    options = _options(graph, config)
    fields = {name: getattr(options, name) for name in options.names()}
    found = graph.plan(**batch, memory_budget=budget, **fields)
    found.apply()
    for line in summary_lines(found):
        report.line(f"plan: {line}")
    saved.at_start(partial(_save, found.below("model"), saved.folder / PLAN))


def replan_on_out_of_memory(graph: TrainGraph, config: ActivationCheckpointConfig) -> None:
    """Makes the graph replan where memory runs out, unless its model has no units."""
    try:
        graph.config.plan_options = _options(graph, config)
    except ConfigError:
        return
    graph.config.on_out_of_memory = "replan"


def _options(graph: TrainGraph, config: ActivationCheckpointConfig) -> PlanOptions:
    model = graph.model.origin
    assert isinstance(model, nn.Module)
    head = head_policies(model, config.head)
    return config.plan_options(
        blocks=[f"model.{name}" for name in unit_names(model, config)],
        head={f"model.{name}": rules for name, rules in head.items()},
    )


def _save(plan: Plan, path: Path) -> None:
    with replacing(path) as fresh:
        plan.save(fresh)
