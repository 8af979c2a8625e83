"""Writes a line of the log every few iterations: loss, learning rate, speed, memory, time left."""

from __future__ import annotations

import math
import time
from typing import final

import torch
from torch.optim import Optimizer

from graphckpt.train.loop import HookBase, Loop, TrainError
from graphckpt.train.memory import device_memory, process_memory
from graphckpt.units import format_bytes, format_seconds


@final
class LogHook(HookBase):
    """Logs after the first, after every ``log_period``-th and after the last iteration.

    The loss is the mean since the line before, and is read from the device only then. Speed counts steps,
    not evaluations.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        device: torch.device,
        log_period: int,
        batch_size: int,
        seq_length: int,
    ) -> None:
        self._optimizer = optimizer
        self._device = device
        self._log_period = log_period
        self._batch_size = batch_size
        self._seq_length = seq_length
        self._loss_sum: torch.Tensor | None = None
        self._iterations = 0
        self._seconds = 0.0
        self._started = 0.0

    def before_step(self, loop: Loop) -> None:
        """Starts the clock."""
        self._started = time.perf_counter()

    def after_step(self, loop: Loop) -> None:
        """Puts ``total_loss``, ``lr``, ``tokens_per_second`` and the bytes of memory among the metrics.

        Raises:
            TrainError: the loss is no finite number.
        """
        assert loop.loss is not None
        loss = loop.loss.detach()
        self._loss_sum = loss if self._loss_sum is None else self._loss_sum + loss
        self._iterations += 1
        is_due = loop.done % self._log_period == 0 or loop.is_last or loop.done == loop.start_iter + 1
        mean_loss = (
            float(self._loss_sum) / self._iterations if is_due else 0.0
        )  # waits for the device: before the clock
        self._seconds += time.perf_counter() - self._started
        if not is_due:
            return
        if not math.isfinite(mean_loss):
            fix = "lower optim.lr, lengthen train.warmup_ratio, or set train.amp.enabled=False"
            raise TrainError(f"the loss is {mean_loss} at iteration {loop.done} · fix: {fix}")
        self._log(loop, mean_loss)
        self._loss_sum, self._iterations, self._seconds = None, 0, 0.0

    def _log(self, loop: Loop, mean_loss: float) -> None:
        seconds_each = self._seconds / self._iterations
        tokens_per_second = self._batch_size * self._seq_length / seconds_each
        rate = float(self._optimizer.param_groups[0]["lr"])
        memory = process_memory()
        loop.metrics |= {
            "consumed_samples": loop.done * self._batch_size,
            "total_loss": mean_loss,
            "lr": rate,
            "tokens_per_second": round(tokens_per_second, 1),
            "rss_bytes": memory.now_bytes,
            "peak_rss_bytes": memory.peak_bytes,
        }
        if self._device.type == "cuda":
            memory = device_memory(self._device)
            loop.metrics |= {"cuda_bytes": memory.now_bytes, "peak_cuda_bytes": memory.peak_bytes}
        loop.report.line(
            f"iteration {loop.done}/{loop.train_iter}  loss {mean_loss:.4f}  lr {rate:.2e}"
            f"  {tokens_per_second:,.0f} tokens/s"
            f"  memory {format_bytes(memory.now_bytes)}, peak {format_bytes(memory.peak_bytes)}"
            f"  eta {format_seconds((loop.train_iter - loop.done) * seconds_each)}"
        )
