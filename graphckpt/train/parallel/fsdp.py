"""Cuts weights, gradients and optimizer states over the processes that share batches, by FSDP2.

FSDP2 keeps one share of everything between steps. The stages of ZeRO are when it gathers and when it gives back:

    stage  weights are whole                        gradients are whole
    1      in all micro-batches of an update        until the last micro-batch is done
    2      in all micro-batches of an update        in one layer at a time
    3      in one layer at a time                   in one layer at a time
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from graphckpt.train.parallel.sharding import is_sharded, local_shard, on_other_stage


def broadcast_weights(model: nn.Module, mesh: DeviceMesh) -> None:
    """Gives every process of a mesh the weights and buffers of the first one."""
    group = mesh.get_group()
    root = dist.get_global_rank(group, 0)
    for tensor in (*model.parameters(), *model.buffers()):
        if on_other_stage(tensor):
            continue
        dist.broadcast((local_shard(tensor) if is_sharded(tensor) else tensor).data, root, group=group)


def apply_fsdp(model: nn.Module, mesh: DeviceMesh, layers: Iterable[str], *, stage: int) -> None:
    """Cuts a model in place; do it after tensor parallelism, and before an optimizer is made.

    Args:
        model: with the same weights on every process.
        mesh: one-dimensional: the processes that have the same share of each matrix.
        layers: names of the modules that are gathered one at a time; what is in none of them is gathered at the start.
        stage: of ZeRO.
    """
    for name in layers:
        fully_shard(model.get_submodule(name), mesh=mesh, reshard_after_forward=stage == 3)
    fully_shard(model, mesh=mesh, reshard_after_forward=None if stage == 3 else False)


def set_micro_batch_mode(model: nn.Module, *, stage: int, is_last: bool) -> None:
    """Says before a micro-batch what its backward does with gradients and weights."""
    root = cast("FSDPModule", model)
    if stage == 1:
        root.set_requires_gradient_sync(is_last)
    if stage < 3:
        root.set_reshard_after_backward(is_last)
