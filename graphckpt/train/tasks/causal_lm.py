"""Causal language modeling: predicts each token from the previous ones. Output layer and loss may be one block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from graphckpt.errors import ConfigError
from graphckpt.train.data.samples import Samples
from graphckpt.train.data.tokens import PreparedText, Tokens
from graphckpt.train.tasks.base import TextTask, perplexity, summed

# Legend: B samples, T tokens, D width, N tokens of all samples, V words

LOSS_HEAD = "loss_head"
_UNLABELED = -100  # ignored by cross_entropy


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
        loss_head: compute logits and loss in a separate block, ``loss_head``, which may have a policy: see
            :class:`LossHead`. The loss is the same up to rounding.
    """

    metric: ClassVar[str] = "eval_ppl"
    LOSSES: ClassVar[tuple[str, ...]] = ("lm_loss",)

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

    def _loss(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        if self._has_head:
            return loss_of(model, batch)
        if getattr(model, "loss_type", "") is None:
            model.loss_type = "ForCausalLM"  # Transformers' default for GPT-2, which otherwise warns
        loss: Tensor = model(**batch, use_cache=False).loss
        return loss


@final
class LossHead(nn.Module):
    """Sums the loss of tokens, given the last hidden states and the labels.

    Transformers' models compute all logits, and the loss of them, within their forward. As a separate block
    they may have a policy: under ``Tiles(8, reduce="sum")`` the logits of an eighth of the tokens are alive.

    It has no weights. Those of ``output`` stay where they are: in the model, its optimizer and its snapshots.

    Args:
        output: makes logits of hidden states.

    >>> head = LossHead(nn.Linear(4, 3))
    >>> head(torch.zeros(5, 4), torch.tensor([0, 1, 2, -100, -100])).shape, list(head.parameters())
    (torch.Size([]), [])
    """

    def __init__(self, output: nn.Module) -> None:
        super().__init__()
        self._output = (output,)  # in a tuple it is not registered as a child, so `state_dict` names it once

    # In float32 the logits of 8 texts of 1,024 tokens of GPT-2's 50,257 words are 1.5 GiB, and so are their gradients.
    def forward(self, hidden_ND: Tensor, labels_N: Tensor) -> Tensor:  # noqa: N803
        """Returns the sum over the tokens that have a label."""
        logits_NV = self._output[0](hidden_ND)  # noqa: N806
        return F.cross_entropy(logits_NV.float(), labels_N, ignore_index=_UNLABELED, reduction="sum")


def add_loss_head(model: Any) -> None:
    """Gives a causal language model of Transformers the child ``loss_head``.

    Raises:
        ConfigError: it has no output layer, or no module that computes the hidden states.
    """
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if output is None or getattr(model, "base_model", model) is model:
        raise ConfigError(
            f"task.loss_head: {type(model).__name__} has no output layer behind a base model · fix: use a causal "
            "language model of Transformers, or leave the key out"
        )
    model.add_module(LOSS_HEAD, LossHead(output))


def loss_of(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Returns the mean loss over the tokens that have a label, and one before them, by way of the loss head."""
    hidden_BTD, labels_BT = _hidden(model, batch["input_ids"]), batch["labels"]  # noqa: N806
    # Labels are shifted and padded instead of cutting the last hidden state off: that would copy all hidden states.
    # [5, 7, 9] are [7, 9, -100]: the state of 5 predicts 7, that of 7 predicts 9, and nothing is known to follow 9.
    labels_N = F.pad(labels_BT[:, 1:], (0, 1), value=_UNLABELED).flatten()  # noqa: N806
    total: Tensor = model.loss_head(hidden_BTD.flatten(0, 1), labels_N)
    return total / (labels_N != _UNLABELED).sum()


def differences(model: Any) -> Iterator[str]:
    """Yields how the model's logits differ from those of its output layer, tried on a few tokens."""
    was_training = model.training
    device = next(model.parameters()).device
    tokens = torch.arange(8, device=device)[None] % model.get_input_embeddings().num_embeddings
    model.eval()
    try:
        with torch.no_grad():
            logits, ours = model(tokens, use_cache=False).logits, model.get_output_embeddings()(_hidden(model, tokens))
    finally:
        model.train(was_training)
    if not torch.equal(logits, ours):
        what = f"task.loss_head: {type(model).__name__} does more than its output layer to make logits"
        yield f"{what}, such as cap them · fix: leave the key out"


def _hidden(model: Any, tokens_BT: Tensor) -> Tensor:  # noqa: N803
    hidden: Tensor = model.base_model(tokens_BT, use_cache=False)[0]
    return hidden
