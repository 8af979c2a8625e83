"""The two graphs of a run, one that trains and one that evaluates, over the same model."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from graphckpt import Graph
from graphckpt.train.blocks import checkpointed_blocks
from graphckpt.train.settings import ActivationCheckpointConfig, AmpConfig
from graphckpt.train.tasks.base import Task


@final
class TrainGraph(Graph):
    """One update of the weights: forward, backward, clip, optimizer, learning rate."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        optimizer: Optimizer,
        scheduler: LRScheduler,
        *,
        activation_checkpoint: ActivationCheckpointConfig,
        amp: AmpConfig,
        capture: str = "auto",
        num_accumulation_steps: int = 1,
    ) -> None:
        super().__init__()
        self.config.capture = capture
        self.model = model
        self.task = task
        for name, fields in checkpointed_blocks(model, activation_checkpoint).items():
            block = self._block_of(model.get_submodule(name))
            block.config.update(fields)
        self.add_optimizer(optimizer, lr_sch=scheduler)
        if num_accumulation_steps > 1:
            self.config.set_gradient_accumulation_steps(num_accumulation_steps)
        if amp.enabled:
            self.config.enable_amp(True, dtype=getattr(torch, amp.dtype))
            if amp.dtype == "float16":
                self.set_grad_scaler(torch.amp.GradScaler(next(model.parameters()).device.type))

    def _block_of(self, module: nn.Module) -> Any:
        return next(block for block in self.model.modules() if block.origin is module)

    def build(self, **batch: Tensor) -> dict[str, Tensor]:
        """Returns the losses of a batch, with ``total_loss``, their sum, of which ``backward`` was called."""
        losses = self.task.losses(self.model, batch)
        total = sum_of_losses(losses)
        total.backward()
        return {"total_loss": total, **losses}


@final
class EvalGraph(Graph):
    """One forward over a held-out batch; nothing is kept for a backward."""

    def __init__(self, model: nn.Module, task: Task, *, amp: AmpConfig, capture: str = "auto") -> None:
        super().__init__()
        self.config.capture = capture
        self.model = model
        self.task = task
        if amp.enabled:
            self.config.enable_amp(True, dtype=getattr(torch, amp.dtype))

    def build(self, **batch: Tensor) -> dict[str, Tensor]:
        """Returns the sums that the task's metrics are made of, each with its count."""
        return self.task.tally(self.model, batch)


def sum_of_losses(losses: dict[str, Tensor]) -> Tensor:
    """Returns the sum of the values whose names say that they are losses."""
    first, *others = (value for name, value in losses.items() if "loss" in name)
    total: Tensor = first
    for other in others:
        total = total + other
    return total
