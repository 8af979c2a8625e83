"""Plans a run for ``train.activation_checkpoint.memory_budget``, on its first batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from graphckpt.planning.report import summary
from graphckpt.train.blocks import units

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from graphckpt.train.graphs import TrainGraph
    from graphckpt.train.report import Report
    from graphckpt.train.settings import ActivationCheckpointConfig

PLAN = "plan.yaml"


def within_budget(
    graph: TrainGraph, config: ActivationCheckpointConfig, report: Report, folder: Path
) -> Callable[..., Any]:
    """Returns what to call with each batch: the graph, which the first call plans for, if there is a budget."""
    if config.memory_budget is None:
        return graph
    todo = [config.memory_budget]
    model = graph.model.origin
    assert isinstance(model, nn.Module)

    def call(**batch: Any) -> Any:
        if todo:
            found = graph.plan(
                **batch,
                memory_budget=todo.pop(),
                offload=config.offload or False,
                blocks=[f"model.{name}" for name in units(model, config)],
            )
            for line in summary(found):
                report.line(f"plan: {line}")
            found.below("model").save(folder / PLAN)
        return graph(**batch)

    return call
