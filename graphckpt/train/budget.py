"""Plans a run for ``train.activation_checkpoint.memory_budget``, on its first batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from graphckpt.errors import ConfigError
from graphckpt.planning.report import summary
from graphckpt.train.blocks import head_of, units
from graphckpt.train.saved import unwritable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from graphckpt.planning import Plan
    from graphckpt.train.graphs import TrainGraph
    from graphckpt.train.parallel import Ranks
    from graphckpt.train.report import Report
    from graphckpt.train.settings import ActivationCheckpointConfig

PLAN = "plan.yaml"


def within_budget(
    graph: TrainGraph, config: ActivationCheckpointConfig, report: Report, folder: Path, ranks: Ranks
) -> Callable[..., Any]:
    """Returns what to call with each batch: the graph, which the first call plans for, if there is a budget.

    All processes plan together; the main one writes the plan.
    """
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
                partition=config.partition,
                contiguous=bool(config.contiguous),
                compile=config.compile,
                blocks=[f"model.{name}" for name in units(model, config)],
                head={f"model.{name}": rules for name, rules in head_of(model, config.head).items()},
            )
            for line in summary(found):
                report.line(f"plan: {line}")
            ranks.main_does(lambda: _save(found.below("model"), folder), ConfigError)
        return graph(**batch)

    return call


def _save(plan: Plan, folder: Path) -> None:
    try:
        plan.save(folder / PLAN)
    except OSError as error:
        raise unwritable(folder, error) from error
