"""Measures loss and perplexity on held-out text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import final

import torch
from torch import Tensor, nn

from graphckpt.train.loop import HookBase, Loop


@final
class EvalHook(HookBase):
    """Evaluates every ``eval_period`` iterations and after the last."""

    def __init__(
        self,
        evaluate: Callable[[dict[str, Tensor]], Tensor],
        batches: Callable[[], Iterable[dict[str, Tensor]]],
        *,
        model: nn.Module,
        eval_period: int,
    ) -> None:
        self._evaluate = evaluate
        self._batches = batches
        self._model = model
        self._eval_period = eval_period

    def after_step(self, loop: Loop) -> None:
        """Puts ``eval_loss`` (mean over tokens) and ``eval_ppl`` (its exponential) among the metrics."""
        if loop.done % self._eval_period and loop.done != loop.train_iter:
            return
        loss, num_tokens = self.measure()
        loop.metrics |= {"eval_loss": loss, "eval_ppl": perplexity(loss)}
        loop.report.line(
            f"iteration {loop.done}/{loop.train_iter}  held-out loss {loss:.4f}"
            f"  perplexity {perplexity(loss):.2f}  ({num_tokens:,} tokens)",
            "bold",
        )

    def measure(self) -> tuple[float, int]:
        """Returns the mean loss over all held-out tokens that have one before them, and their number."""
        total, num_tokens = 0.0, 0
        was_training = self._model.training
        self._model.eval()
        try:
            with torch.no_grad():
                for batch in self._batches():
                    num_sequences, seq_length = batch["labels"].shape
                    predicted = num_sequences * (seq_length - 1)  # no token comes before the first
                    total += float(self._evaluate(batch)) * predicted
                    num_tokens += predicted
        finally:
            self._model.train(was_training)
        return total / num_tokens, num_tokens


def perplexity(loss: float) -> float:
    """Returns ``exp(loss)``; infinity where a float cannot hold it.

    >>> perplexity(0.0), perplexity(1e6)
    (1.0, inf)
    """
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
