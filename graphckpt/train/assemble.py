"""Makes what a run trains: the model with the weights of its seed, cut over the processes, and what is set on it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from graphckpt.train.blocks import checkpointed_blocks, layers_of
from graphckpt.train.parallel import Ranks
from graphckpt.train.settings import TrainConfig
from graphckpt.train.state import seed_all, seed_apart
from graphckpt.train.tasks.base import Task

if TYPE_CHECKING:
    from graphckpt.train.replicas import Replicas


def assembled(
    make_model: Callable[[], nn.Module], settings: TrainConfig, ranks: Ranks, device: torch.device
) -> nn.Module:
    """Returns the model that the settings describe; all processes call this, and draw in their own ways from then on.

    Raises:
        ConfigError: nobody knows how to cut the model, or a size does not divide.
    """
    seed_all(settings.seed)
    model = make_model().to(device).train()
    tensor_mesh, data_mesh = ranks.tensor_mesh, ranks.data_mesh
    if tensor_mesh is not None:
        from graphckpt.train.plans import shard_model  # noqa: PLC0415 - loads what one process does not need

        model = shard_model(model, tensor_mesh)
    if data_mesh is not None:
        from graphckpt.train.zero import shard_states, start_alike  # noqa: PLC0415 - as above

        start_alike(model, data_mesh)
        if stage := settings.zero_optimization.in_force:
            layers = layers_of(model, settings.activation_checkpoint)
            shard_states(model, data_mesh, layers, stage=stage)
    seed_apart(settings.seed, ranks.data_rank)
    return model


def blocks_of(model: nn.Module, settings: TrainConfig, ranks: Ranks) -> dict[str, dict[str, Any]]:
    """Returns the settings of each block, with the processes that ``partition`` means.

    Raises:
        ConfigError: a name matches no block, or a value cannot act.
    """
    blocks = checkpointed_blocks(model, settings.activation_checkpoint)
    mesh = ranks.tensor_mesh
    for fields in blocks.values() if mesh is not None else ():
        if fields.get("partition") is True:
            fields["partition"] = mesh  # and not all processes, of which some see other samples
    return blocks


def gradients_of(model: nn.Module, task: Task, settings: TrainConfig, ranks: Ranks) -> Replicas | None:
    """Returns what makes gradients equal on processes that share batches; ``None`` if none do."""
    if ranks.data_mesh is None:
        return None
    from graphckpt.train.replicas import replicas_of  # noqa: PLC0415 - loads what one process does not need

    return replicas_of(model, partial(task.losses, model), ranks, stage=settings.zero_optimization.in_force)
