"""The policies of a run's blocks: those that ``train.activation_checkpoint`` names, or a plan for its memory budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from graphckpt.blocks.apply import policies_from_file
from graphckpt.blocks.config import BlockConfig, fields_of
from graphckpt.blocks.select import marked_layers, select
from graphckpt.errors import ConfigError, bullets, did_you_mean, without_repeats
from graphckpt.graph.graph import Graph
from graphckpt.planning.options import PlanOptions
from graphckpt.train.output import Report, replacing
from graphckpt.train.settings import ActivationCheckpointConfig
from graphckpt.train.snapshot.saved_run import PLAN, SavedRun

if TYPE_CHECKING:
    from graphckpt.train.parallel.ranks import TrainRanks

_WHERE = "train.activation_checkpoint"


def block_policies(model: nn.Module, config: ActivationCheckpointConfig) -> dict[str, dict[str, Any]]:
    """Returns the fields to set on each block, by its name in ``model``.

    Those in ``policies`` override those of every selected block, pattern by pattern; a saved plan replaces both.
    """
    if not config.enabled or config.memory_budget is not None:
        return {}
    settings: dict[str, dict[str, Any]] = {}
    faults: list[str] = []
    where = f"{_WHERE}.{'policies' if config.plan is None else 'plan'}"
    policies: Mapping[Any, Any] = config.policies or {}
    if config.plan is not None:
        try:
            policies = policies_from_file(config.plan)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    elif fields := ({} if config.rule is None else {"activation_checkpointing": config.rule}) | config.beside_rule:
        try:
            settings = {name: dict(fields) for name in selected_names(model, config)}
        except ConfigError as error:
            faults.append(str(error))
    # In the order of the config, so that of two patterns that match a block the later one wins, field by field. With
    # rule True, offload "cpu" and the policies {"h.[01]": False, "h.1": "selective"}, all three of h.0, h.1 and h.2 are
    # offloaded, and their rules are False, "selective" and True.
    for pattern, value in policies.items():
        try:
            for name in _select(model, pattern):
                settings[name] = {**settings.get(name, {}), **fields_of(value)}
        except ConfigError as error:
            faults.append(f"{where}: {error}")
    faults += _invalid_fields(settings)
    if faults := without_repeats(faults):
        raise ConfigError(bullets(f"{_WHERE} is invalid", faults) if len(faults) > 1 else faults[0])
    return settings


def _select(model: nn.Module, pattern: Any) -> list[str]:
    try:
        return [name for name, _ in select(model, pattern)]
    except ConfigError:
        if isinstance(pattern, str) and pattern.startswith("model."):  # the log's name: the model is a graph's child
            with suppress(ConfigError):
                return [name for name, _ in select(model, pattern.removeprefix("model."))]
        raise


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


def selected_names(model: nn.Module, config: ActivationCheckpointConfig) -> list[str]:
    if config.select is None:
        layers = marked_layers(model)
        if layers or config.policies is not None:
            return layers
        fix = f"name its class or its blocks: {_WHERE}.select=Block, or {_WHERE}.select='layers.*'"
        raise ConfigError(f"{_WHERE}: expected a model that marks its layers, got {type(model).__name__} · fix: {fix}")
    patterns = [config.select] if isinstance(config.select, str) else config.select
    try:
        return list(dict.fromkeys(name for pattern in patterns for name in _select(model, pattern)))
    except ConfigError as error:
        raise ConfigError(f"{_WHERE}.select: {error}") from None


def head_policies(model: nn.Module, head: Mapping[str, Any] | None) -> dict[str, Any]:
    names = dict(model.named_modules())
    policies = {name if name in names else name.removeprefix("model."): rules for name, rules in (head or {}).items()}
    for name in policies:
        if name not in names:
            hint = did_you_mean(name, [name for name, _ in model.named_children()])
            fix = "task.loss_head=True gives a causal language model the block 'loss_head'"
            raise ConfigError(f"{_WHERE}.head: no block is called {name!r}{hint} · fix: {fix}")
    return policies


def plan_on_batch(
    graph: Graph,
    config: ActivationCheckpointConfig,
    ranks: TrainRanks,
    runs: Callable[[str], bool],
    report: Report,
    saved: SavedRun,
    batch: Mapping[str, Tensor],
) -> None:
    """Plans the graph for a batch and applies the plan. All ranks plan together; rank 0 writes the plan.

    Each stage of a pipeline has a separate plan, for the same budget; the file has the policies of all of them.
    ``runs`` returns whether this process runs the module of a name.
    """
    from graphckpt.planning.plan import save_stages, stage_lines  # noqa: PLC0415 - loads the planner

    options = _options(graph, config, runs)
    is_staged = ranks.stage_mesh is not None
    assert config.memory_budget is not None
    inputs: dict[str, Any] = dict(batch)
    wanted = {name: getattr(options, name) for name in options.names()}
    if is_staged:
        # The ranks of a stage plan the same blocks together. A step takes all stages, so all of them run it together.
        wanted |= {"group": ranks.stage_group, "step_group": ranks.everyone}
    plan = graph.plan(**inputs, memory_budget=config.memory_budget, **wanted)
    plan.apply()
    plans = [plan.relative_to("model")]
    if is_staged:
        # One rank of each stage: the ranks of a stage are consecutive, and have one plan.
        plans = ranks.all_gather(plans[0])[:: ranks.config.data_parallel_size]
    for line in stage_lines(plans):
        report.line(f"plan: {line}")

    def save() -> None:
        with replacing(saved.folder / PLAN) as fresh:
            save_stages(plans, fresh)

    saved.at_start(save)


def replan_on_out_of_memory(graph: Graph, config: ActivationCheckpointConfig) -> None:
    """Makes the graph replan where memory runs out, unless no blocks of its model are known."""
    try:
        graph.config.plan_options = _options(graph, config)
    except ConfigError:
        return
    graph.config.on_out_of_memory = "replan"


def _options(
    graph: Graph, config: ActivationCheckpointConfig, runs: Callable[[str], bool] = lambda _: True
) -> PlanOptions:
    model = graph.model.origin
    assert isinstance(model, nn.Module)
    head = head_policies(model, config.head)
    return config.plan_options(
        select=[f"model.{name}" for name in selected_names(model, config) if runs(name)],
        head={f"model.{name}": rules for name, rules in head.items() if runs(name)},
    )
