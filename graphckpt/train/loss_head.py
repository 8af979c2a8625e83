"""The output layer of a causal language model and its loss, as one block, which can run in slices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from graphckpt.errors import ConfigError

# Legend: B samples, T tokens, D width, N tokens of all samples, V words

NAME = "loss_head"
_UNASKED = -100  # ignored by cross_entropy


@final
class LossHead(nn.Module):
    """Sums the loss of tokens, given the last hidden states and the labels.

    Transformers' models compute all logits, and the loss of them, within their own forward. As a block of its own
    this part may have a policy: under ``Tiles(8, reduce="sum")`` the logits of an eighth of the tokens are alive.

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

    def forward(self, hidden_ND: Tensor, labels_N: Tensor) -> Tensor:  # noqa: N803
        """Returns the sum over the tokens that have a label."""
        logits_NV = self._output[0](hidden_ND)  # noqa: N806
        return F.cross_entropy(logits_NV.float(), labels_N, ignore_index=_UNASKED, reduction="sum")


def add_loss_head(model: nn.Module) -> None:
    """Gives a causal language model of Transformers the child ``loss_head``.

    Raises:
        ConfigError: it has no output layer, or no part that makes the hidden states.
    """
    known: Any = model
    output = known.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if output is None or getattr(model, "base_model", model) is model:
        raise ConfigError(
            f"task.loss_head: {type(model).__name__} has no output layer behind a base model · fix: use a causal "
            "language model of Transformers, or leave the key out"
        )
    model.add_module(NAME, LossHead(output))


def loss_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Returns the mean loss over the tokens that have a label, and one before them, by way of the loss head."""
    known: Any = model
    hidden_BTD, labels_BT = _hidden(model, batch["input_ids"]), batch["labels"]  # noqa: N806
    labels_N = F.pad(labels_BT[:, 1:], (0, 1), value=_UNASKED).flatten()  # noqa: N806
    total: Tensor = known.loss_head(hidden_BTD.flatten(0, 1), labels_N)
    return total / (labels_N != _UNASKED).sum()


def differences(model: nn.Module) -> Iterator[str]:
    """Yields how the model's own logits are not those of its output layer, tried on a few tokens."""
    known: Any = model
    was_training = model.training
    device = next(model.parameters()).device
    tokens = torch.arange(8, device=device)[None] % known.get_input_embeddings().num_embeddings
    model.eval()
    try:
        with torch.no_grad():
            own, ours = known(tokens, use_cache=False).logits, known.get_output_embeddings()(_hidden(model, tokens))
    finally:
        model.train(was_training)
    if not torch.equal(own, ours):
        what = f"task.loss_head: {type(model).__name__} does more than its output layer to make logits"
        yield f"{what}, such as cap them · fix: leave the key out"


def _hidden(model: nn.Module, tokens_BT: Tensor) -> Tensor:  # noqa: N803
    known: Any = model
    hidden: Tensor = known.base_model(tokens_BT, use_cache=False)[0]
    return hidden
