"""Writes a line of the log every few iterations: losses, learning rate, speed, memory, time left."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from graphckpt.train.loop import HookBase, Loop, TrainError
from graphckpt.units import format_bytes

if sys.platform == "darwin":
    import resource

_MOST_LOSSES = 1000  # that wait to be looked through: a few hundred bytes each


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    iteration: int
    values: dict[str, Any]
    """Numbers, sums of losses and the learning rate, by the names of their metrics; the last two may be tensors."""
    losses: list[str]
    count: int = 1
    """Iterations in the sums."""
    each: Sequence[tuple[int, Tensor]] = ()
    """The last of the summed losses, with their iterations."""
    event: torch.Event | None = None
    """Reached once the tensors are on the host; ``None`` if they are there."""

    def metrics(self) -> dict[str, float]:  # waits for the copies
        if self.event is not None:
            self.event.synchronize()
        numbers = {name: float(value) if isinstance(value, Tensor) else value for name, value in self.values.items()}
        return numbers | {name: numbers[name] / self.count for name in self.losses}


@final
class LogHook(HookBase):
    """Logs after the first, after every ``log_period``-th and after the last iteration, in libai's format.

    Losses are means since the line before. On the CPU a line is written at once. On any other device its losses are
    copied to the host without a wait, and the line is written one log period later, with the number of its
    iteration, so that the host always stays ahead of the device. Speed counts steps, not evaluations. The learning rate
    is read and never set: the graph steps the schedule.

    A loss that is not finite makes the mean not finite: only then each loss is looked at, to name its iteration.
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
        self._each: list[tuple[int, Tensor]] = []
        self._iterations = 0  # in the sums
        self._timed = 0  # in the seconds: fewer, if the first ones were run before a resume
        self._seconds = 0.0
        self._data_seconds = 0.0
        self._overall_seconds = 0.0
        self._started = 0.0
        self._late: _Line | None = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the sums since the previous line, so that the next line is the same after a resume."""
        # First: a snapshot of a run whose loss is not finite would replace the last good one.
        _check_finite([*(() if self._late is None else self._late.each), *self._each])
        state = {"sums": {name: value.cpu() for name, value in self._sums.items()}, "iterations": self._iterations}
        if (late := self._late) is not None:
            state["late"] = {"iteration": late.iteration, "losses": late.losses, "metrics": late.metrics()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sums = {name: value.to(self._device) for name, value in state["sums"].items()}
        self._iterations = state["iterations"]
        if (late := state.get("late")) is not None:
            # Its losses are means already, so `count` stays 1. The resumed run writes it first, under its number.
            self._late = _Line(iteration=late["iteration"], values=late["metrics"], losses=late["losses"])

    def before_step(self, loop: Loop) -> None:
        self._seconds += loop.waited_seconds  # device time of steps counted already
        loop.data_seconds = loop.waited_seconds = 0.0
        self._started = time.perf_counter()

    def after_step(self, loop: Loop) -> None:
        for name, loss in loop.losses.items():
            # Not in place: the first sum is the loss itself, which other hooks read.
            value = loss.detach()
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        if loop.loss is not None:
            self._each.append((loop.iteration, loop.loss.detach()))
            if len(self._each) == _MOST_LOSSES:  # of a long log_period: one wait in so many iterations
                _check_finite(self._each)
                self._each = []
        self._iterations += 1
        self._timed += 1
        is_due = loop.done % self._log_period == 0 or loop.done in {1, loop.train_iter}
        if is_due:
            # On a device, with log_period 2:
            #
            #     after iteration 1   copy of line 1 begins
            #     after iteration 2   copy of line 2 begins; waits for line 1, writes it
            #     after iteration 4   copy of line 4 begins; waits for line 2, writes it
            #
            # The wait is for work launched a period ago; the device has another period of work in its queue meanwhile.
            sums, lr, event = self._to_host()
            if self._late is not None:
                # Within the time of the step: launching takes less time than running, and where the host is a period
                # ahead, this wait is what the device needs.
                self._late.metrics()
        self._seconds += time.perf_counter() - self._started
        self._data_seconds += loop.data_seconds
        if is_due:
            values = self._values(loop, sums, lr)
            line = _Line(
                iteration=loop.iteration,
                values=values,
                losses=list(sums),
                count=self._iterations,
                each=self._each,
                event=event,
            )
            self._overall_seconds += self._seconds
            # New objects: the line that is not written yet refers to the old ones.
            self._sums, self._each, self._iterations, self._timed = {}, [], 0, 0
            self._seconds = self._data_seconds = 0.0
            self._write_late(loop)
            if event is None or loop.done == loop.train_iter:
                loop.metrics |= self._written(line, loop)
            else:
                self._late = line

    def after_train(self, loop: Loop) -> None:
        self._write_late(loop)
        iterations = loop.done - loop.start_iter
        seconds = self._overall_seconds + self._seconds + loop.waited_seconds
        if iterations:
            speed = f"{iterations} iterations in {_clock(seconds)} ({seconds / iterations:.4f} s / it)"
            loop.report.line(f"Overall training speed: {speed}")

    def _to_host(self) -> tuple[dict[str, Tensor], Any, torch.Event | None]:
        """Starts to copy the sums and the learning rate to the host; returns them with the event that marks the end."""
        lr = self._optimizer.param_groups[0]["lr"]
        if self._device.type == "cpu":
            return self._sums, lr, None
        # PyTorch returns pinned tensors, which may be read once `event` is reached, and does not check it. `copy` is
        # for a learning rate on the CPU, to which the schedule writes: `to` would return it as it is.
        sums = {name: total.to("cpu", non_blocking=True) for name, total in self._sums.items()}
        if isinstance(lr, Tensor):
            lr = lr.detach().to("cpu", non_blocking=True, copy=True)
        event = torch.Event(self._device)
        event.record()
        return sums, lr, event

    def _values(self, loop: Loop, sums: dict[str, Tensor], lr: Any) -> dict[str, Any]:
        seconds = self._seconds / self._timed
        samples_per_second = self._batch_size / seconds
        return {
            "consumed_samples": self._consumed_samples(loop.done),
            **sums,
            "time": seconds,
            "data_time": self._data_seconds / self._timed,
            "total_throughput": round(samples_per_second, 2),
            "tokens_per_second": round(samples_per_second * self._seq_length, 1),
            "lr": lr if isinstance(lr, Tensor) else float(lr),
            **process_memory(),
            **device_memory(self._device),
        }

    def _write_late(self, loop: Loop) -> None:
        if self._late is not None:
            line, self._late = self._late, None
            loop.late_metrics.append((line.iteration, self._written(line, loop)))

    def _written(self, line: _Line, loop: Loop) -> dict[str, float]:
        metrics = line.metrics()
        mean_loss = metrics.get("total_loss", 0.0)
        if not math.isfinite(mean_loss):
            _check_finite(line.each)
            raise _not_finite(mean_loss, line.iteration)
        kind, whose = ("cuda", "cuda") if "cuda_bytes" in metrics else ("rss", "process")
        memory = {
            f"{whose}_memory": metrics[f"{kind}_bytes"],
            f"reserved_{whose}_memory": metrics.get(f"{kind}_reserved_bytes"),
            f"peak_{whose}_memory": metrics[f"peak_{kind}_bytes"],
        }
        parts = (
            f"eta: {_clock((loop.train_iter - line.iteration - 1) * metrics['time'])}",
            f"iteration: {line.iteration + 1}/{loop.train_iter}",
            f"consumed_samples: {metrics['consumed_samples']}",
            *(f"{name}: {metrics[name]:.4f}" for name in line.losses),
            f"time: {metrics['time']:.4f} s/iter",
            f"data_time: {metrics['data_time']:.4f} s/iter",
            f"total_throughput: {metrics['total_throughput']:.2f} samples/s",
            f"lr: {metrics['lr']:.2e}",
            *(f"{name}: {format_bytes(int(value))}" for name, value in memory.items() if value is not None),
        )
        loop.report.line("  ".join(parts))
        return metrics


def _check_finite(losses: Sequence[tuple[int, Tensor]]) -> None:
    """Raises an error that names the first loss that is not finite; waits for the device."""
    if losses and not bool(torch.stack([loss for _, loss in losses]).isfinite().all()):
        raise next(_not_finite(float(loss), iteration) for iteration, loss in losses if not bool(loss.isfinite()))


def _not_finite(loss: float, iteration: int) -> TrainError:
    fix = "lower optim.lr, lengthen train.warmup_ratio, or set train.amp.enabled=False"
    return TrainError(f"the loss is {loss} at iteration {iteration + 1} · fix: {fix}")


def _clock(seconds: float) -> str:
    """Formats seconds as libai does.

    >>> _clock(75.9)
    '0:01:15'
    """
    return str(timedelta(seconds=int(seconds)))


def device_memory(device: torch.device) -> dict[str, int]:
    """Returns the bytes of tensors on a CUDA device and those that PyTorch has reserved there, also for captures.

    With ``nvidia-ml-py`` also those that all processes use.
    """
    if device.type != "cuda":
        return {}
    used = {"cuda_used_bytes": torch.cuda.device_memory_used(device)} if find_spec("pynvml") else {}
    return {
        "cuda_bytes": torch.cuda.memory_allocated(device),
        "peak_cuda_bytes": torch.cuda.max_memory_allocated(device),
        "cuda_reserved_bytes": torch.cuda.memory_reserved(device),
        "peak_cuda_reserved_bytes": torch.cuda.max_memory_reserved(device),
        **used,
    }


def process_memory() -> dict[str, int]:
    """Returns the bytes of resident memory, now and at the peak; 0 if they are not reported."""
    status = Path("/proc/self/status")
    if status.exists():
        fields = dict(line.split(":", 1) for line in status.read_text(encoding="utf-8").splitlines() if ":" in line)
        now, peak = (int(fields.get(name, "0 kB").split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
        return {"rss_bytes": now, "peak_rss_bytes": max(now, peak)}
    peak = 0
    if sys.platform == "darwin":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"rss_bytes": peak, "peak_rss_bytes": peak}
