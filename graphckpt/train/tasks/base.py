"""Base classes of tasks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from graphckpt.train.data.samples import Samples
from graphckpt.train.data.tokens import PreparedText, Tokens

_POSITIONS = ("max_position_embeddings", "n_positions")


class Task(ABC):
    """A training task: losses of a batch, and metrics of an evaluation."""

    metric: ClassVar[str] = "eval_loss"
    """The metric by which the best snapshot is chosen."""
    metric_mode: ClassVar[Literal["min", "max"]] = "min"
    """Whether lower or higher is better."""

    def prepare(self, model: nn.Module) -> nn.Module:
        """Prepares the model before anything else, for example by adding a block."""
        return model

    @abstractmethod
    def losses(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the mean losses of a batch; those with ``loss`` in their names are summed for backward."""

    @abstractmethod
    def tally(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns sums over a held-out batch, each of shape [2]: the sum and the count."""

    def metrics(self, means: Mapping[str, float]) -> dict[str, float]:
        """Turns the means of what :meth:`tally` summed into the metrics that are reported."""
        return {f"eval_{name}": mean for name, mean in means.items()}


class TextTask(Task):
    """A task on text, which creates samples from tokens."""

    special_tokens: ClassVar[tuple[str, ...]] = ()
    """Special tokens that the task inserts."""

    @abstractmethod
    def samples(self, tokens: Tokens, text: PreparedText, seed: int) -> Samples:
        """Returns the samples of one token file; ``seed`` makes random choices reproducible."""

    def check(self, model: nn.Module, text: PreparedText) -> Iterator[str]:
        """Yields faults if ``model`` does not fit the text."""
        find, config = getattr(model, "get_input_embeddings", None), getattr(model, "config", None)
        embeddings = find() if callable(find) else None
        lengths = (getattr(config, name, None) for name in _POSITIONS)
        longest = next((length for length in lengths if isinstance(length, int)), None)
        if isinstance(embeddings, nn.Embedding) and (size := embeddings.num_embeddings) < text.vocab_size:
            what = f"expected a vocabulary of at least the tokenizer's {text.vocab_size} tokens, got {size}"
            yield f"model: {what} · fix: set its vocab_size to ${{data.vocab_size}}"
        if longest is not None and longest < text.seq_length:
            fix = "lower data.seq_length, or lengthen the model"
            yield f"model: expected at least data.seq_length={text.seq_length} positions, got {longest} · fix: {fix}"


def summed(mean: Tensor, count: Tensor | int) -> Tensor:
    """Returns ``[mean * count, count]``, to compute means over several batches."""
    count = torch.as_tensor(count, device=mean.device)
    return torch.stack([mean.float() * count, count.float()])


def perplexity(loss: float) -> float:
    """Returns ``exp(loss)``; infinity on overflow.

    >>> perplexity(0.0), perplexity(1e6)
    (1.0, inf)
    """
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def sum_of_losses(losses: dict[str, Tensor]) -> Tensor:
    """Returns the sum of the values with ``loss`` in their names."""
    first, *others = (value for name, value in losses.items() if "loss" in name)
    return sum(others, start=first)
