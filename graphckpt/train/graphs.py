"""The graphs of a run for training and evaluation, over the same model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from graphckpt.graph.graph import Graph
from graphckpt.train.settings import AmpConfig
from graphckpt.train.tasks.base import Task, sum_of_losses

if TYPE_CHECKING:
    from graphckpt.train.parallel.data_parallel import GradSync
    from graphckpt.train.parallel.pipeline import Pipeline


class _TaskGraph(Graph):
    """Runs a model on batches of a task, under autocast if that is set; a pipeline does so itself."""

    def __init__(
        self, model: nn.Module, task: Task, *, amp: AmpConfig, capture: str = "auto", pipeline: Pipeline | None = None
    ) -> None:
        super().__init__()
        self.config.capture = capture
        self.model = model
        self.task = task
        self.pipeline = pipeline
        if amp.enabled and pipeline is None:
            self.config.enable_amp(True, dtype=getattr(torch, amp.dtype))


@final
class TrainGraph(_TaskGraph):
    """One update of the weights: forward, backward, clip, optimizer, learning rate."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        optimizer: Optimizer,
        scheduler: LRScheduler,
        *,
        blocks: Mapping[str, dict[str, Any]],
        amp: AmpConfig,
        capture: str = "auto",
        num_accumulation_steps: int = 1,
        grad_sync: GradSync | None = None,
        pipeline: Pipeline | None = None,
    ) -> None:
        super().__init__(model, task, amp=amp, capture=capture, pipeline=pipeline)
        self.turn = _MicroBatchCounter(num_accumulation_steps, grad_sync)
        for name, fields in blocks.items():
            block = self._block_of(model.get_submodule(name))
            block.config.update(fields)
        self.add_optimizer(optimizer, lr_sch=scheduler)
        if pipeline is not None:  # which splits a batch itself
            pipeline.grad_sync = grad_sync
            self._update.total_norm = pipeline.total_norm
            return
        if num_accumulation_steps > 1:
            self.config.set_gradient_accumulation_steps(num_accumulation_steps)
        if amp.enabled and amp.dtype == "float16":
            self.set_grad_scaler(torch.amp.GradScaler(next(model.parameters()).device.type))

    def _block_of(self, module: nn.Module) -> Any:
        return next(block for block in self.model.modules() if block.origin is module)

    def build(self, **batch: Tensor) -> dict[str, Tensor]:
        """Returns the losses of a batch and ``total_loss``, their sum, after its backward."""
        if self.pipeline is not None:
            return self.pipeline.losses(batch)
        grad_sync = self.turn.grad_sync
        if grad_sync is None:
            losses = self.task.losses(self.model, batch)
            total = sum_of_losses(losses)
            total.backward()
        else:
            with self.turn as is_last, grad_sync.micro_batch(is_last=is_last):
                losses = grad_sync.losses(batch)
                total = sum_of_losses(losses)
                total.backward()
        return {"total_loss": total, **losses}


@final
class _MicroBatchCounter:
    """Counts the micro-batches of an update: gradients are synchronized in the last one."""

    def __init__(self, count: int, grad_sync: GradSync | None) -> None:
        self.grad_sync = grad_sync
        self._count = count
        self._done = 0

    def __enter__(self) -> bool:
        self._done += 1
        return self._done == self._count

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None or self._done == self._count:
            self._done = 0


@final
class EvalGraph(_TaskGraph):
    """One forward over a held-out batch, without saving tensors for backward."""

    def build(self, **batch: Tensor) -> dict[str, Tensor]:
        """Returns the sums for the task's metrics, each with its count."""
        return self.task.tally(self.model, batch) if self.pipeline is None else self.pipeline.tally(batch)
