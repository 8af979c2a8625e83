"""Measures the task's metrics on held-out samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import final

import torch
from torch import Tensor, nn

from graphckpt.train.loop import HookBase, Loop, attribute_errors


@final
@dataclass(frozen=True, eq=False)
class EvalHook(HookBase):
    """Evaluates every ``eval_period`` iterations and after the last."""

    tally: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
    """Returns sums over a batch, each of shape [2]: the sum, and how many it is over."""
    batches: Callable[[], Iterable[tuple[dict[str, Tensor], bool]]]
    """Returns the held-out batches, each with whether it counts."""
    metrics: Callable[[Mapping[str, float]], Mapping[str, float]]
    """Turns the means of the sums into what is reported."""
    _: KW_ONLY
    model: nn.Module
    """Is in evaluation mode meanwhile."""
    eval_period: int
    """Iterations between two evaluations."""
    over_ranks: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict
    """Returns the sums over all processes that evaluate different batches."""

    def after_step(self, loop: Loop) -> None:
        if loop.done % self.eval_period and loop.done != loop.train_iter:
            return
        # Without this wait `time` of the log would lack the steps that the device still runs, as evaluation is not
        # counted.
        loop.synchronize()
        metrics = self.measure()
        loop.metrics |= metrics
        loop.report.line(f"{loop.position}  held-out {format_metrics(metrics)}", "bold")

    def measure(self) -> dict[str, float]:
        with attribute_errors("model, task, data", "the evaluation"):
            totals = self.over_ranks(self._totals())
            means = {name: float(total) / float(count) for name, (total, count) in totals.items()}
            return dict(self.metrics(means))

    def _totals(self) -> dict[str, Tensor]:
        totals: dict[str, Tensor] = {}
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                for batch, counts in self.batches():
                    for name, sums in self.tally(batch).items():
                        # float32 has no odd numbers above 2**24: the count of tokens would be wrong after 16 million.
                        total = sums.detach().to("cpu", torch.float64)
                        # A batch that does not count may have a loss of nan, and nan * 0 is nan: so zeros, not a
                        # factor.
                        total = total if counts else torch.zeros_like(total)
                        totals[name] = totals[name] + total if name in totals else total
        finally:
            self.model.train(was_training)
        return totals


def format_metrics(metrics: Mapping[str, float]) -> str:
    """Formats metrics for the log.

    >>> format_metrics({"eval_loss": 1.5, "eval_acc": 0.25})
    'loss 1.5000  acc 0.2500'
    """
    return "  ".join(f"{name.removeprefix('eval_')} {value:.4f}" for name, value in metrics.items())
