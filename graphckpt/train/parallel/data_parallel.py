"""Data parallelism: DDP, FSDP2 for the stages of ZeRO, and plain all-reduces where weights are sharded otherwise.

A step may have several micro-batches; gradients are synchronized once, with the last of them. FSDP2 keeps everything
sharded between steps; the stages differ in when it gathers and reshards:

    stage  weights are gathered                     gradients are full
    1      in all micro-batches of an update        until the last micro-batch is done
    2      in all micro-batches of an update        in one layer at a time
    3      in one layer at a time                   in one layer at a time
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from graphckpt.errors import ConfigError
from graphckpt.train.parallel.ranks import TrainRanks
from graphckpt.train.parallel.sharding import local_shard, on_other_stage

_UNFINISHED = "Expected to have finished reduction"  # how DDP begins to say so, in the step after

Losses = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
"""Returns the losses of a batch."""


def broadcast_weights(model: nn.Module, mesh: DeviceMesh) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        if not on_other_stage(tensor):
            dist.broadcast(local_shard(tensor).data, group_src=0, group=mesh.get_group())


def apply_fsdp(model: nn.Module, mesh: DeviceMesh, layers: Iterable[str], *, stage: int) -> None:
    """Applies ``fully_shard`` in place; call it after tensor parallelism and before the optimizer is created."""
    # Layers before the model, as `fully_shard` forms a group of all parameters below a module that have none yet. After
    # their forward the parameters of the root, embeddings and head, are needed again at once: with None they stay.
    for name in layers:
        fully_shard(model.get_submodule(name), mesh=mesh, reshard_after_forward=stage == 3)
    fully_shard(model, mesh=mesh, reshard_after_forward=None if stage == 3 else False)


class GradSync(Protocol):
    """Synchronizes gradients over data-parallel processes."""

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Returns a context for forward and backward of a micro-batch."""

    def losses(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the losses of a micro-batch."""


class DdpSync:
    """DDP: every process holds all weights, and gradients are averaged while backward runs."""

    def __init__(self, model: nn.Module, losses: Losses, ranks: TrainRanks) -> None:
        assert ranks.data_mesh is not None
        self._ddp = DistributedDataParallel(
            _ModelWithLosses(model, losses),
            process_group=ranks.data_mesh.get_group(),
            find_unused_parameters=ranks.config.find_unused_parameters,
        )

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[None]:
        # Around forward as well: DDP reads the flag there, when it prepares its reducer for the backward that follows.
        return nullcontext() if is_last else self._ddp.no_sync()

    def losses(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        try:
            losses: dict[str, Tensor] = self._ddp(batch)
        except RuntimeError as error:
            if _UNFINISHED not in str(error):
                raise
            raise ConfigError(
                "train.dist.data_parallel_size: the previous step left parameters without a gradient, so DDP did not "
                "finish its reduction · fix: train.dist.find_unused_parameters=True, or freeze them"
            ) from error
        return losses


class _ModelWithLosses(nn.Module):
    """A model together with its losses: DDP has to see the tensors that backward starts from."""

    def __init__(self, model: nn.Module, losses: Losses) -> None:
        super().__init__()
        self.model = model
        self._losses = losses

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._losses(batch)


class AllReduceSync:
    """Averages gradients after backward where weights are sharded or a pipeline runs backward: DDP supports neither."""

    def __init__(self, model: nn.Module, losses: Losses, ranks: TrainRanks) -> None:
        assert ranks.data_mesh is not None
        self._model = model
        self._group = ranks.data_mesh.get_group()
        self.losses = losses

    @contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:
        yield
        if not is_last:
            return
        parameters = [p for p in self._model.parameters() if p.requires_grad and not on_other_stage(p)]
        # A collective needs all ranks: a weight that this rank has not used, such as that of an expert without tokens,
        # has to be summed if any other rank has used it. The gradient of a weight that none has used stays None.
        flags = torch.tensor([p.grad is not None for p in parameters], device=parameters[0].device, dtype=torch.int32)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
        works = []
        for parameter, has_grad in zip(parameters, flags, strict=True):
            if parameter.grad is None:
                if not has_grad:  # read from the device only here, where it is rare
                    continue
                parameter.grad = torch.zeros_like(parameter)
            grad = local_shard(parameter.grad)
            total = grad.contiguous()
            works.append((grad, total, dist.all_reduce(total, group=self._group, async_op=True)))
        # NCCL's `wait` makes the stream wait, not the host. All are launched by now, so that they run one after the
        # other.
        for grad, total, work in works:
            work.wait()
            total.div_(dist.get_world_size(self._group))
            if total is not grad:
                grad.copy_(total)


class FsdpSync:
    def __init__(self, model: nn.Module, losses: Losses, *, stage: int) -> None:
        self._root = cast("FSDPModule", model)
        self._stage = stage
        self.losses = losses

    @contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:
        # The flags stay on the modules, so each micro-batch sets them. Of 3 micro-batches:
        #
        #                           1                2                3
        #   stage 1, 2  weights     all-gather       stay             stay, reshard
        #   stage 1     gradients   stay full        stay full        reduce-scatter
        #   stage 2     gradients   reduce-scatter   reduce-scatter   reduce-scatter
        if self._stage == 1:
            self._root.set_requires_gradient_sync(is_last)
        if self._stage < 3:
            self._root.set_reshard_after_backward(is_last)
        yield


def make_grad_sync(model: nn.Module, losses: Losses, ranks: TrainRanks, *, stage: int) -> GradSync:
    """Returns how gradients are synchronized; ``stage`` is that of ZeRO, or 0."""
    if stage:
        return FsdpSync(model, losses, stage=stage)
    is_plain = ranks.tensor_mesh is None and ranks.stage_mesh is None
    return DdpSync(model, losses, ranks) if is_plain else AllReduceSync(model, losses, ranks)
