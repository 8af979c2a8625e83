"""Shards weights, gradients and optimizer states over data-parallel processes, with FSDP2.

FSDP2 keeps everything sharded between steps. The ZeRO stages differ in when it gathers and reshards:

    stage  weights are whole                        gradients are whole
    1      in all micro-batches of an update        until the last micro-batch is done
    2      in all micro-batches of an update        in one layer at a time
    3      in one layer at a time                   in one layer at a time
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from graphckpt.train.parallel.sharding import local_shard, on_other_stage


def broadcast_weights(model: nn.Module, mesh: DeviceMesh) -> None:
    """Broadcasts weights and buffers from the first rank of a mesh."""
    group = mesh.get_group()
    root = dist.get_global_rank(group, 0)
    for tensor in (*model.parameters(), *model.buffers()):
        if not on_other_stage(tensor):
            dist.broadcast(local_shard(tensor).data, root, group=group)


def apply_fsdp(model: nn.Module, mesh: DeviceMesh, layers: Iterable[str], *, stage: int) -> None:
    """Applies ``fully_shard`` in place; call it after tensor parallelism and before the optimizer is created.

    Args:
        model: with the same weights on every process.
        mesh: one-dimensional: the data-parallel ranks.
        layers: names of the modules that are gathered one at a time; what is in none of them is gathered at the start.
        stage: of ZeRO.
    """
    for name in layers:
        fully_shard(model.get_submodule(name), mesh=mesh, reshard_after_forward=stage == 3)
    fully_shard(model, mesh=mesh, reshard_after_forward=None if stage == 3 else False)
