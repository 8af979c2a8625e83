"""Makes what a run trains: the model with the weights of its seed, cut over the processes, and what is set on it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from graphckpt.errors import ConfigError
from graphckpt.train.foreign_errors import naming
from graphckpt.train.loss_head import NAME as LOSS_HEAD
from graphckpt.train.parallel.ranks import Ranks
from graphckpt.train.seeds import seed_all, seed_apart
from graphckpt.train.settings import TrainConfig
from graphckpt.train.tasks.base import Task
from graphckpt.train.tasks.causal_lm import CausalLM
from graphckpt.train.units import checkpointed_blocks, layers_of

if TYPE_CHECKING:
    from graphckpt.train.parallel.grad_sync import Replicas
    from graphckpt.train.parallel.pp_schedule import Pipeline


class Assembled(NamedTuple):
    """What a run trains."""

    model: nn.Module
    architecture: str
    """The name of its class, before it was cut."""
    pipeline: Pipeline | None
    """What runs it, if this process has one of several stages."""


def assembled(
    make_model: Callable[[], nn.Module], task: Task, settings: TrainConfig, ranks: Ranks, device: torch.device
) -> Assembled:
    """Returns the model that the settings describe; all processes call this, and draw in their own ways from then on.

    Raises:
        ConfigError: nobody knows how to cut the model, or a size does not divide.
    """
    seed_all(settings.seed)
    with naming("model, task", "making the model"):
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
        from graphckpt.train.parallel.fsdp import shard_states, start_alike  # noqa: PLC0415 - as above

        start_alike(model, data_mesh)
        if stage := settings.zero_optimization.in_force:
            layers = layers_of(model, settings.activation_checkpoint)
            shard_states(model, data_mesh, layers, stage=stage)
    seed_apart(settings.seed, ranks.stream)
    return Assembled(model, architecture, pipeline)


def _pipeline(model: nn.Module, task: Task, settings: TrainConfig, ranks: Ranks, device: torch.device) -> Pipeline:
    """Leaves to this process its stage of a model, in place."""
    from graphckpt.train.parallel import pp_schedule, pp_stages  # noqa: PLC0415 - load what one process does not need

    if not isinstance(task, CausalLM):
        what = f"train.dist.pipeline_parallel_size: {type(task).__name__} asks for a whole model"
        raise ConfigError(f"{what} · fix: task=CausalLM, or train.dist.pipeline_parallel_size=1")
    config = settings.dist
    fields = checkpointed_blocks(model, settings.activation_checkpoint)
    cut = pp_stages.cut_layers(
        model, fields, num_stages=config.pipeline_parallel_size, layer_stages=config.custom_pipeline_stage_id
    )
    pp_stages.check_cut(model, cut, task.losses)
    pp_stages.keep_stage(model, cut, ranks.stage, device)
    dtype = getattr(torch, settings.amp.dtype) if settings.amp.enabled else None
    return pp_schedule.Pipeline(model, cut, task, ranks, num_micro_batches=settings.sizes.accumulation, dtype=dtype)


def blocks_of(made: Assembled, settings: TrainConfig, ranks: Ranks) -> dict[str, dict[str, Any]]:
    """Returns the settings of each block that runs here, with the processes that ``partition`` means.

    Raises:
        ConfigError: a name matches no block, or a value cannot act.
    """
    blocks = checkpointed_blocks(made.model, settings.activation_checkpoint)
    if made.pipeline is not None:
        return {name: fields for name, fields in blocks.items() if made.pipeline.runs(name)}
    mesh = ranks.tensor_mesh
    for fields in blocks.values() if mesh is not None else ():
        if fields.get("partition") is True:
            fields["partition"] = mesh  # and not all processes, of which some see other samples
    return blocks


def gradients_of(model: nn.Module, task: Task, settings: TrainConfig, ranks: Ranks) -> Replicas | None:
    """Returns what makes gradients equal on processes that share batches; ``None`` if none do."""
    if ranks.data_mesh is None:
        return None
    from graphckpt.train.parallel.grad_sync import replicas_of  # noqa: PLC0415 - loads what one process does not need

    return replicas_of(model, partial(task.losses, model), ranks, stage=settings.zero_optimization.in_force)
