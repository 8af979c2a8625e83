"""Builds the model of a run: initialised from the seed, sharded over the processes, with its blocks' policies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from graphckpt.errors import ConfigError
from graphckpt.train.foreign_errors import attribute_errors
from graphckpt.train.loss_head import NAME as LOSS_HEAD
from graphckpt.train.parallel.ranks import TrainRanks
from graphckpt.train.seeds import seed_all, seed_per_rank
from graphckpt.train.settings import TrainConfig
from graphckpt.train.tasks.base import Task
from graphckpt.train.tasks.causal_lm import CausalLM
from graphckpt.train.units import block_policies, layer_names

if TYPE_CHECKING:
    from graphckpt.train.parallel.data_parallel import GradSync
    from graphckpt.train.parallel.pipeline import Pipeline


class BuiltModel(NamedTuple):
    """The model of a run."""

    model: nn.Module
    architecture: str
    """The name of its class before sharding, which changes it."""
    pipeline: Pipeline | None
    """Runs it, if this process has one of several pipeline stages."""


def build_model(
    make_model: Callable[[], nn.Module], task: Task, settings: TrainConfig, ranks: TrainRanks, device: torch.device
) -> BuiltModel:
    """Returns the model that the settings describe, and seeds each rank; collective.

    Raises:
        ConfigError: no plan is known for the model, or a size is not divisible.
    """
    seed_all(settings.seed)
    with attribute_errors("model, task", "making the model"):
        model = task.prepare(make_model())
    architecture = type(model).__name__  # sharding changes the class
    if settings.dist.num_processes > 1 and hasattr(model, LOSS_HEAD):
        what = f"task.loss_head: expected one process, got {settings.dist.num_processes}"
        raise ConfigError(f"{what} · fix: leave the key out, or train on one process")
    pipeline = None if ranks.stage_mesh is None else _pipeline(model, task, settings, ranks, device)
    model = (model if pipeline is not None else model.to(device)).train()
    tensor_mesh, data_mesh = ranks.tensor_mesh, ranks.data_mesh
    if tensor_mesh is not None:
        from graphckpt.train.parallel.tensor_parallel import shard_model  # noqa: PLC0415 - loads what one process does not need

        model = shard_model(model, tensor_mesh)
    if data_mesh is not None:
        from graphckpt.train.parallel.data_parallel import apply_fsdp, broadcast_weights  # noqa: PLC0415 - as above

        broadcast_weights(model, data_mesh)
        if stage := settings.zero_optimization.active_stage:
            layers = layer_names(model, settings.activation_checkpoint)
            apply_fsdp(model, data_mesh, layers, stage=stage)
    seed_per_rank(settings.seed, ranks.stream)
    return BuiltModel(model, architecture, pipeline)


def _pipeline(model: nn.Module, task: Task, settings: TrainConfig, ranks: TrainRanks, device: torch.device) -> Pipeline:
    """Reduces a model to this process's pipeline stage, in place."""
    from graphckpt.train.parallel import pipeline  # noqa: PLC0415 - load what one process does not need

    if not isinstance(task, CausalLM):
        what = f"train.dist.pipeline_parallel_size: {type(task).__name__} is not supported with a pipeline"
        raise ConfigError(f"{what} · fix: task=CausalLM, or train.dist.pipeline_parallel_size=1")
    config = settings.dist
    fields = block_policies(model, settings.activation_checkpoint)
    cut = pipeline.split_layers(
        model, fields, num_stages=config.pipeline_parallel_size, layer_stages=config.custom_pipeline_stage_id
    )
    pipeline.check_split(model, cut, task.losses)
    pipeline.keep_stage(model, cut, ranks.stage, device)
    dtype = getattr(torch, settings.amp.dtype) if settings.amp.enabled else None
    return pipeline.Pipeline(model, cut, task, ranks, num_micro_batches=settings.sizes.accumulation, dtype=dtype)


def block_fields(made: BuiltModel, settings: TrainConfig, ranks: TrainRanks) -> dict[str, dict[str, Any]]:
    """Returns the fields of each block that runs on this process, with ``partition=True`` resolved to a mesh.

    Raises:
        ConfigError: a name matches no block, or a value is invalid.
    """
    blocks = block_policies(made.model, settings.activation_checkpoint)
    if made.pipeline is not None:
        return {name: fields for name, fields in blocks.items() if made.pipeline.runs(name)}
    mesh = ranks.tensor_mesh
    for fields in blocks.values() if mesh is not None else ():
        if fields.get("partition") is True:
            fields["partition"] = mesh  # not all processes: other data-parallel ranks have other samples
    return blocks


def grad_sync_of(model: nn.Module, task: Task, settings: TrainConfig, ranks: TrainRanks) -> GradSync | None:
    """Returns how gradients are synchronized; ``None`` without data parallelism."""
    if ranks.data_mesh is None:
        return None
    from graphckpt.train.parallel.data_parallel import make_grad_sync  # noqa: PLC0415 - loads what one process does not need

    return make_grad_sync(model, partial(task.losses, model), ranks, stage=settings.zero_optimization.active_stage)
