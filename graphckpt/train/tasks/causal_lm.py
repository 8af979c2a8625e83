"""Causal language modeling: predicts each token from the previous ones. The metric is perplexity."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from graphckpt.train.data.samples import Samples
from graphckpt.train.data.tokens import PreparedText, Tokens
from graphckpt.train.loss_head import add_loss_head, differences, loss_of
from graphckpt.train.tasks.base import TextTask, perplexity, summed


@final
@dataclass(frozen=True, slots=True)
class _Sequences:
    tokens: Tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, indices: NDArray[np.int64]) -> dict[str, Tensor]:
        tokens = self.tokens.batch(indices)
        return {"input_ids": tokens, "labels": tokens}


@final
class CausalLM(TextTask):
    """For ``GPT2LMHeadModel``, ``LlamaForCausalLM`` and similar models.

    A batch is ``input_ids`` and equal ``labels`` (the model shifts them), int64 of shape [B, T].

    Args:
        loss_head: compute logits and loss in a block of its own, ``loss_head``, which may have a policy: see
            :class:`~graphckpt.train.loss_head.LossHead`. The loss is the same up to rounding.
    """

    metric: ClassVar[str] = "eval_ppl"

    def __init__(self, *, loss_head: bool = False) -> None:
        self._has_head = loss_head

    def prepare(self, model: nn.Module) -> nn.Module:
        """Returns the model, with a loss head if requested."""
        if self._has_head:
            add_loss_head(model)
        return model

    def check(self, model: nn.Module, text: PreparedText) -> Iterator[str]:
        """Yields faults if ``model`` does not fit the text or the loss head."""
        faults = list(super().check(model, text))
        yield from faults
        if self._has_head and not faults:
            yield from differences(model)

    def samples(self, tokens: Tokens, text: PreparedText, seed: int) -> Samples:
        """Returns the sequences of the file unchanged."""
        del text, seed
        return _Sequences(tokens)

    def losses(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns ``lm_loss``, the mean over all tokens but the first."""
        return {"lm_loss": self._loss(model, batch)}

    def tally(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the ``loss`` over all predicted tokens."""
        num_sequences, seq_length = batch["labels"].shape
        return {"loss": summed(self._loss(model, batch), num_sequences * (seq_length - 1))}

    def metrics(self, means: Mapping[str, float]) -> dict[str, float]:
        """Returns ``eval_loss`` and ``eval_ppl``, its exponential."""
        return {"eval_loss": means["loss"], "eval_ppl": perplexity(means["loss"])}

    def _loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        if self._has_head:
            return loss_of(model, batch)
        known: Any = model
        if getattr(known, "loss_type", "") is None:
            known.loss_type = "ForCausalLM"  # Transformers' default for GPT-2, which otherwise warns
        loss: Tensor = known(**batch, use_cache=False).loss
        return loss
