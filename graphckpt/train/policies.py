"""The policies of a run's blocks: those that ``train.activation_checkpoint`` names, or a plan for its memory budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from graphckpt.blocks.apply import policies_from_file
from graphckpt.blocks.config import BlockConfig, fields_of
from graphckpt.blocks.select import marked_layers, select
from graphckpt.errors import ConfigError, bullets, did_you_mean, without_repeats
from graphckpt.graph.graph import Graph
from graphckpt.planning.options import Budget, PlanOptions
from graphckpt.train.output import Report, replacing
from graphckpt.train.settings import ActivationCheckpointConfig
from graphckpt.train.snapshot.saved_run import PLAN, SavedRun

if TYPE_CHECKING:
    from graphckpt.planning.plan import Plan

_WHERE = "train.activation_checkpoint"


def block_policies(model: nn.Module, config: ActivationCheckpointConfig) -> dict[str, dict[str, Any]]:
    """Returns the fields to set on each block, by its name in ``model``.

    ``rule``, the store and ``compile`` apply to every unit; the fields in ``blocks`` override them, pattern by
    pattern. A saved plan replaces both.
    """
    if not config.enabled or config.memory_budget is not None:
        return {}
    settings: dict[str, dict[str, Any]] = {}
    faults: list[str] = []
    where = f"{_WHERE}.{'blocks' if config.plan is None else 'plan'}"
    if config.plan is None:
        blocks: Mapping[Any, Any] = config.blocks or {}
        try:
            fields: dict[str, Any] = {} if config.rule is None else {"activation_checkpointing": config.rule}
            fields |= config.beside_rule
            settings = {name: dict(fields) for name in (unit_names(model, config) if fields else ())}
        except ConfigError as error:
            faults.append(str(error))
    else:
        try:
            blocks = policies_from_file(config.plan)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    for pattern, value in blocks.items():
        try:
            for name, _ in select(model, pattern):
                settings[name] = {**settings.get(name, {}), **fields_of(value)}
        except ConfigError as error:
            faults.append(f"{where}: {error}")
    faults += _invalid_fields(settings)
    if faults := without_repeats(faults):
        raise ConfigError(bullets(f"{_WHERE} is invalid", faults) if len(faults) > 1 else faults[0])
    return settings


def _invalid_fields(settings: dict[str, dict[str, Any]]) -> Iterator[str]:
    reported: set[str] = set()
    for name, fields in settings.items():
        try:
            BlockConfig(name).update(fields)
        except ConfigError as error:
            text = str(error).removeprefix(name)
            if text not in reported:  # once per pattern
                reported.add(text)
                yield f"{_WHERE}: {error}"


def unit_names(model: nn.Module, config: ActivationCheckpointConfig) -> list[str]:
    """Returns the names of the units that ``unit`` means, or of those that the model itself marks."""
    if config.unit is None:
        layers = marked_layers(model)
        if layers or config.blocks is not None:
            return layers
        fix = f"name its class or its blocks: {_WHERE}.unit=Block, or {_WHERE}.unit='layers.*'"
        raise ConfigError(f"{_WHERE}: {type(model).__name__} marks no layer as a unit · fix: {fix}")
    patterns = [config.unit] if isinstance(config.unit, str) else config.unit
    try:
        return list(dict.fromkeys(name for pattern in patterns for name, _ in select(model, pattern)))
    except ConfigError as error:
        raise ConfigError(f"{_WHERE}.unit: {error}") from None


def head_policies(model: nn.Module, head: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the candidate rules of the block that computes the loss, by its name in ``model``."""
    names = {name for name, _ in model.named_modules()}
    for name in head or ():
        if name not in names:
            hint = did_you_mean(name, [name for name, _ in model.named_children()])
            fix = "task.loss_head=True gives a causal language model the block 'loss_head'"
            raise ConfigError(f"{_WHERE}.head: no block is called {name!r}{hint} · fix: {fix}")
    return dict(head or {})


def plan_on_batch(
    graph: Graph,
    budget: Budget,
    config: ActivationCheckpointConfig,
    report: Report,
    saved: SavedRun,
    batch: Mapping[str, Tensor],
) -> None:
    """Plans the graph for a batch and applies the plan. All ranks plan together; rank 0 writes the plan."""
    from graphckpt.planning.rows import summary_lines  # noqa: PLC0415 - loads the planner

    options = _options(graph, config)
    inputs: dict[str, Any] = dict(batch)
    plan = graph.plan(**inputs, memory_budget=budget, **{name: getattr(options, name) for name in options.names()})
    plan.apply()
    for line in summary_lines(plan):
        report.line(f"plan: {line}")
    saved.at_start(partial(_save, plan.relative_to("model"), saved.folder / PLAN))


def replan_on_out_of_memory(graph: Graph, config: ActivationCheckpointConfig) -> None:
    """Makes the graph replan where memory runs out, unless its model has no units."""
    try:
        graph.config.plan_options = _options(graph, config)
    except ConfigError:
        return
    graph.config.on_out_of_memory = "replan"


def _options(graph: Graph, config: ActivationCheckpointConfig) -> PlanOptions:
    model = graph.model.origin
    assert isinstance(model, nn.Module)
    return config.plan_options(
        blocks=[f"model.{name}" for name in unit_names(model, config)],
        head={f"model.{name}": rules for name, rules in head_policies(model, config.head).items()},
    )


def _save(plan: Plan, path: Path) -> None:
    with replacing(path) as fresh:
        plan.save(fresh)
