"""Makes what a run trains: the model with the weights of its seed, cut over the processes, and what is set on it."""

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
    from graphckpt.train.parallel.grad_sync import GradSync
    from graphckpt.train.parallel.pp_schedule import Pipeline


class BuiltModel(NamedTuple):
    """What a run trains."""

    model: nn.Module
    architecture: str
    """The name of its class, before it was cut."""
    pipeline: Pipeline | None
    """What runs it, if this process has one of several stages."""


def build_model(
    make_model: Callable[[], nn.Module], task: Task, settings: TrainConfig, ranks: TrainRanks, device: torch.device
) -> BuiltModel:
    """Returns the model that the settings describe; all processes call this, and draw in their own ways from then on.

    Raises:
        ConfigError: nobody knows how to cut the model, or a size does not divide.
    """
    seed_all(settings.seed)
    with attribute_errors("model, task", "making the model"):
        model = task.prepare(make_model())
    architecture = type(model).__name__  # what is cut gets another class
    if settings.dist.num_processes > 1 and hasattr(model, LOSS_HEAD):
        what = "task.loss_head: processes that share a model call it as a whole"
        raise ConfigError(f"{what} · fix: leave the key out, or train on one process")
    pipeline = None if ranks.stage_mesh is None else _pipeline(model, task, settings, ranks, device)
    model = (model if pipeline is not None else model.to(device)).train()
    tensor_mesh, data_mesh = ranks.tensor_mesh, ranks.data_mesh
    if tensor_mesh is not None:
        from graphckpt.train.parallel.tp_plan import shard_model  # noqa: PLC0415 - loads what one process does not need

        model = shard_model(model, tensor_mesh)
    if data_mesh is not None:
        from graphckpt.train.parallel.fsdp import apply_fsdp, broadcast_weights  # noqa: PLC0415 - as above

        broadcast_weights(model, data_mesh)
        if stage := settings.zero_optimization.in_force:
            layers = layer_names(model, settings.activation_checkpoint)
            apply_fsdp(model, data_mesh, layers, stage=stage)
    seed_per_rank(settings.seed, ranks.stream)
    return BuiltModel(model, architecture, pipeline)


def _pipeline(model: nn.Module, task: Task, settings: TrainConfig, ranks: TrainRanks, device: torch.device) -> Pipeline:
    """Leaves to this process its stage of a model, in place."""
    from graphckpt.train.parallel import pp_schedule, pp_stages  # noqa: PLC0415 - load what one process does not need

    if not isinstance(task, CausalLM):
        what = f"train.dist.pipeline_parallel_size: {type(task).__name__} asks for a whole model"
        raise ConfigError(f"{what} · fix: task=CausalLM, or train.dist.pipeline_parallel_size=1")
    config = settings.dist
    fields = block_policies(model, settings.activation_checkpoint)
    cut = pp_stages.split_layers(
        model, fields, num_stages=config.pipeline_parallel_size, layer_stages=config.custom_pipeline_stage_id
    )
    pp_stages.check_split(model, cut, task.losses)
    pp_stages.keep_stage(model, cut, ranks.stage, device)
    dtype = getattr(torch, settings.amp.dtype) if settings.amp.enabled else None
    return pp_schedule.Pipeline(model, cut, task, ranks, num_micro_batches=settings.sizes.accumulation, dtype=dtype)


def block_fields(made: BuiltModel, settings: TrainConfig, ranks: TrainRanks) -> dict[str, dict[str, Any]]:
    """Returns the settings of each block that runs here, with the processes that ``partition`` means.

    Raises:
        ConfigError: a name matches no block, or a value cannot act.
    """
    blocks = block_policies(made.model, settings.activation_checkpoint)
    if made.pipeline is not None:
        return {name: fields for name, fields in blocks.items() if made.pipeline.runs(name)}
    mesh = ranks.tensor_mesh
    for fields in blocks.values() if mesh is not None else ():
        if fields.get("partition") is True:
            fields["partition"] = mesh  # and not all processes, of which some see other samples
    return blocks


def grad_sync_of(model: nn.Module, task: Task, settings: TrainConfig, ranks: TrainRanks) -> GradSync | None:
    """Returns what makes gradients equal on processes that share batches; ``None`` if none do."""
    if ranks.data_mesh is None:
        return None
    from graphckpt.train.parallel.grad_sync import make_grad_sync  # noqa: PLC0415 - loads what one process does not need

    return make_grad_sync(model, partial(task.losses, model), ranks, stage=settings.zero_optimization.in_force)
