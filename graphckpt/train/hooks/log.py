"""Writes a line of the log every few iterations: losses, learning rate, speed, memory, time left."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from graphckpt.train.fields import MOST, integer, is_float, item, mapping, tensor, text
from graphckpt.train.loop import HookBase, Loop, TrainError
from graphckpt.train.memory import device_memory, device_used_bytes, process_memory
from graphckpt.units import format_bytes


@final
class LogHook(HookBase):
    """Logs after the first, after every ``log_period``-th and after the last iteration, in libai's words.

    Losses are means since the line before, and are read from the device only then. Speed counts steps, not
    evaluations. The learning rate is read and never set: the graph steps the schedule.

    Args:
        optimizer: whose learning rate to tell.
        device: whose memory to tell.
        log_period: iterations between two lines.
        batch_size: sequences in one iteration.
        seq_length: tokens in one sequence.
        consumed_samples: returns the sequences that so many iterations have seen.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        device: torch.device,
        log_period: int,
        batch_size: int,
        seq_length: int,
        consumed_samples: Callable[[int], int] | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._device = device
        self._log_period = log_period
        self._batch_size = batch_size
        self._seq_length = seq_length
        self._consumed_samples = consumed_samples or (lambda done: done * batch_size)
        self._sums: dict[str, Tensor] = {}
        self._iterations = 0  # in the sums
        self._timed = 0  # in the seconds: fewer, where the first ones were another process's
        self._seconds = 0.0
        self._data_seconds = 0.0
        self._overall_seconds = 0.0
        self._started = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Returns the sums since the line before, so that the next line is the same after a resume."""
        return {"sums": {name: value.cpu() for name, value in self._sums.items()}, "iterations": self._iterations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the sums since the line before.

        Raises:
            FieldError: a field is missing, of another type, or out of its range.
        """
        sums = mapping(item(state, "sums"), "hooks.LogHook-0.sums")
        for name, value in sums.items():
            field = f"hooks.LogHook-0.sums.{text(name, 'hooks.LogHook-0.sums: a key')}"
            tensor(value, field, torch.zeros((), dtype=value.dtype if is_float(value) else torch.float32))
        if sums:
            tensor(item(sums, "total_loss"), "hooks.LogHook-0.sums.total_loss")
        least, most = (1, MOST) if sums else (0, 0)
        self._iterations = integer(item(state, "iterations"), "hooks.LogHook-0.iterations", least, most)
        self._sums = {name: value.to(self._device) for name, value in sums.items()}

    def before_step(self, loop: Loop) -> None:
        """Starts the clock."""
        loop.data_seconds = 0.0
        self._started = time.perf_counter()

    def after_step(self, loop: Loop) -> None:
        """Puts the losses, ``lr``, the speed and the bytes of memory among the metrics.

        Raises:
            TrainError: the loss is no finite number.
        """
        for name, loss in loop.losses.items():
            value = loss.detach()
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        self._iterations += 1
        self._timed += 1
        is_due = loop.done % self._log_period == 0 or loop.done in {1, loop.train_iter}
        # Waits for the device, so it comes before the clock is read.
        means = {name: float(total) / self._iterations for name, total in self._sums.items()} if is_due else {}
        self._seconds += time.perf_counter() - self._started
        self._data_seconds += loop.data_seconds
        if not is_due:
            return
        mean_loss = means.get("total_loss", 0.0)
        if not math.isfinite(mean_loss):
            fix = "lower optim.lr, lengthen train.warmup_ratio, or set train.amp.enabled=False"
            raise TrainError(f"the loss is {mean_loss} at iteration {loop.iteration} · fix: {fix}")
        self._log(loop, means)
        self._overall_seconds += self._seconds
        self._sums, self._iterations, self._timed = {}, 0, 0
        self._seconds = self._data_seconds = 0.0

    def after_train(self, loop: Loop) -> None:
        """Tells the speed of all iterations of this process."""
        iterations, seconds = loop.done - loop.start_iter, self._overall_seconds + self._seconds
        if iterations:
            speed = f"{iterations} iterations in {_clock(seconds)} ({seconds / iterations:.4f} s / it)"
            loop.report.line(f"Overall training speed: {speed}")

    def _log(self, loop: Loop, means: dict[str, float]) -> None:
        seconds, data_seconds = self._seconds / self._timed, self._data_seconds / self._timed
        rate = float(self._optimizer.param_groups[0]["lr"])
        memory = process_memory()
        consumed_samples = self._consumed_samples(loop.done)
        samples_per_second = self._batch_size / seconds
        loop.metrics |= {
            "consumed_samples": consumed_samples,
            **means,
            "time": seconds,
            "data_time": data_seconds,
            "total_throughput": round(samples_per_second, 2),
            "tokens_per_second": round(samples_per_second * self._seq_length, 1),
            "lr": rate,
            "rss_bytes": memory.now_bytes,
            "peak_rss_bytes": memory.peak_bytes,
        }
        if self._device.type == "cuda":
            memory = device_memory(self._device)
            loop.metrics |= {"cuda_bytes": memory.now_bytes, "peak_cuda_bytes": memory.peak_bytes}
            used = device_used_bytes(self._device)
            loop.metrics |= {} if used is None else {"cuda_used_bytes": used}
        parts = (
            f"eta: {_clock((loop.train_iter - loop.done) * seconds)}",
            f"iteration: {loop.iteration}/{loop.train_iter}",
            f"consumed_samples: {consumed_samples}",
            *(f"{name}: {mean:.4f}" for name, mean in means.items()),
            f"time: {seconds:.4f} s/iter",
            f"data_time: {data_seconds:.4f} s/iter",
            f"total_throughput: {samples_per_second:.2f} samples/s",
            f"lr: {rate:.2e}",
            f"memory: {format_bytes(memory.now_bytes)}",
            f"peak_memory: {format_bytes(memory.peak_bytes)}",
        )
        loop.report.line("  ".join(parts))


def _clock(seconds: float) -> str:
    """Prints seconds as libai does.

    >>> _clock(75.9)
    '0:01:15'
    """
    return str(timedelta(seconds=int(seconds)))
