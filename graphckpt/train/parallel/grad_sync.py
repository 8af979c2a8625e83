"""Synchronizes gradients over data-parallel processes: one class for each way.

A step may have several micro-batches; gradients are synchronized once, with the last of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from graphckpt.train.loop import TrainError
from graphckpt.train.parallel.ranks import TrainRanks
from graphckpt.train.parallel.sharding import local_shard, on_other_stage

_UNFINISHED = "Expected to have finished reduction"  # how DDP begins to say so, in the step after
_BUCKET_BYTES = 25 << 20  # sent at once: DistributedDataParallel's own

Losses = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
"""Returns the losses of a batch."""


class GradSync(Protocol):
    """Surrounds forward and backward of one micro-batch."""

    def micro_batch(self, *, is_last: bool) -> Any:
        """Returns a context for forward and backward of a micro-batch."""

    def losses(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the losses of a micro-batch."""


class DdpSync:
    """DDP: every process holds all weights, and gradients are averaged while backward runs."""

    def __init__(self, model: nn.Module, losses: Losses, ranks: TrainRanks) -> None:
        mesh = ranks.data_mesh
        assert mesh is not None
        unused = ranks.config.find_unused_parameters
        self._wrapped = DistributedDataParallel(
            _ModelWithLosses(model, losses), process_group=mesh.get_group(), find_unused_parameters=unused
        )

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Synchronizes gradients in the last micro-batch only."""
        return nullcontext() if is_last else self._wrapped.no_sync()

    def losses(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the losses of a micro-batch.

        Raises:
            TrainError: the previous step left parameters without a gradient, and ``find_unused_parameters`` is off.
        """
        try:
            found: dict[str, Tensor] = self._wrapped(batch)
        except RuntimeError as error:
            if _UNFINISHED not in str(error):
                raise
            what = "the previous step left parameters without a gradient, so DDP did not finish its reduction"
            fix = "train.dist.find_unused_parameters=True, or freeze them"
            raise TrainError(f"train.dist.data_parallel_size: {what} · fix: {fix}") from error
        return found


class AllReduceSync:
    """Averages gradients after backward where weights are sharded or a pipeline runs backward: DDP supports neither."""

    def __init__(self, model: nn.Module, losses: Losses, ranks: TrainRanks) -> None:
        mesh = ranks.data_mesh
        assert mesh is not None
        self._model = model
        self._group = mesh.get_group()
        self.losses = losses

    @contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:
        """Synchronizes gradients after the last micro-batch."""
        yield
        if is_last:
            trained = [p for p in self._model.parameters() if p.requires_grad and not on_other_stage(p)]
            for bucket in _buckets(trained):
                _average(bucket, self._group)


class FsdpSync:
    """FSDP2 shards what the ZeRO stage names; see ``fsdp.py``."""

    def __init__(self, model: nn.Module, losses: Losses, *, stage: int) -> None:
        self._root = cast("FSDPModule", model)
        self._stage = stage
        self.losses = losses

    @contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:
        """Tells FSDP2 whether to synchronize gradients and reshard weights in this backward."""
        if self._stage == 1:
            self._root.set_requires_gradient_sync(is_last)
        if self._stage < 3:
            self._root.set_reshard_after_backward(is_last)
        yield


def make_grad_sync(model: nn.Module, losses: Losses, ranks: TrainRanks, *, stage: int) -> GradSync:
    """Returns how gradients are synchronized over the data-parallel ranks."""
    if stage:
        return FsdpSync(model, losses, stage=stage)
    is_plain = ranks.tensor_mesh is None and ranks.stage_mesh is None
    return DdpSync(model, losses, ranks) if is_plain else AllReduceSync(model, losses, ranks)


class _ModelWithLosses(nn.Module):
    """A model together with its losses: DDP has to see the tensors that backward starts from."""

    def __init__(self, model: nn.Module, losses: Losses) -> None:
        super().__init__()
        self.model = model
        self._losses = losses

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._losses(batch)


def _buckets(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yields consecutive parameters of one dtype on one device, in buckets of about 25 MiB."""
    bucket: list[nn.Parameter] = []
    num_bytes = 0
    for parameter in parameters:
        own = local_shard(parameter)
        if bucket and ((local_shard(bucket[0]).dtype, bucket[0].device) != (own.dtype, parameter.device)):
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(parameter)
        num_bytes += own.nbytes
        if num_bytes >= _BUCKET_BYTES:
            yield bucket
            bucket, num_bytes = [], 0
    if bucket:
        yield bucket


def _average(parameters: list[nn.Parameter], group: Any) -> None:
    """Averages gradients over a group; a gradient missing on some ranks counts as zeros there."""
    grads = [None if p.grad is None else local_shard(p.grad) for p in parameters]
    parts = [
        torch.zeros_like(local_shard(p)) if grad is None else grad for p, grad in zip(parameters, grads, strict=True)
    ]
    has_grad = parts[0].new_tensor([grad is not None for grad in grads])
    flat = torch.cat([*(part.reshape(-1) for part in parts), has_grad])
    dist.all_reduce(flat, group=group)
    flat.div_(dist.get_world_size(group))
    *averages, counts = flat.split([*(part.numel() for part in parts), len(parts)])
    for parameter, grad, average, count in zip(parameters, grads, averages, counts, strict=True):
        if grad is not None:
            grad.copy_(average.view_as(grad))
        elif count > 0:
            parameter.grad = torch.zeros_like(parameter)
            local_shard(parameter.grad).copy_(average.view_as(local_shard(parameter.grad)))
