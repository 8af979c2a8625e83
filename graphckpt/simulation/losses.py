"""Losses for simulated steps that multiply by the head themselves, a chunk of tokens at a time.

Those of TRL and Liger are after the code of TRL 1.16 (``ChunkedLogProbFunction``) and of Liger
(``fused_linear_cross_entropy``), whose kernels need a GPU. The tiled one is a block under this library's own rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from graphckpt.blocks.apply import apply
from graphckpt.errors import ConfigError
from graphckpt.rules.tiles import Tiles
from graphckpt.simulation import kernel_ops

_TOKENS, _VOCABULARY = 4096, 32768  # a tile of TRL: `TOKEN_CHUNK_SIZE` and `_CHUNKED_LOGPROB_CHUNK_SIZE`
_UNLABELED = -100  # the label of Transformers that a loss ignores
_STATISTICS = 7  # numbers of each token in float32 that TRL's forward keeps until its end


class HeadWeight(nn.Module):
    """Has the weight and the bias of a head, and returns its input, which the loss multiplies."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.weight: Any = head.weight
        self.bias: Any = getattr(head, "bias", None)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def fuse_head(model: Any, kind: str, name: str) -> None:
    """Gives a causal language model of Transformers another loss, in place of its head and its own loss.

    Args:
        model: The model.
        kind: ``"tiles"``, or one of :data:`LOSSES`.
        name: The model in messages.

    Raises:
        ConfigError: The model changes the logits; or the head has a bias, which only ``"tiles"`` takes.
    """
    head = model.get_output_embeddings()
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    has_bias = getattr(head, "bias", None) is not None
    if head is None or cap is not None or (has_bias and kind != TILES):
        what = "a head" if kind == TILES else "a head without a bias"
        what = f"{what}, whose logits the loss gets as they are"
        raise ConfigError(f"loss: {name}: expected {what}, for {kind!r} · fix: loss='model'")
    passed = HeadWeight(head)
    model.set_output_embeddings(passed)
    if kind == TILES:
        block = _HeadLoss(passed)
        apply(nn.ModuleDict({"loss_head": block}), {"loss_head": Tiles(reduce="sum")})
        model.loss_function = block.mean
    else:
        model.loss_function = partial(_loss, LOSSES[kind], head.weight)


def _loss(
    function: type[torch.autograd.Function], weight: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, *_: Any,
    **__: Any,
) -> Any:  # fmt: skip
    return function.apply(logits.reshape(-1, logits.shape[-1]), weight, labels.reshape(-1))


class _HeadLoss(nn.Module):
    """Sums the loss of tokens, given the last hidden states and the labels, as the trainer's ``loss_head`` does."""

    def __init__(self, head: HeadWeight) -> None:
        super().__init__()
        self._head = (head,)  # in a tuple it is not a child: the weight is the model's

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        (head,) = self._head
        logits = F.linear(hidden, head.weight, head.bias)
        return F.cross_entropy(logits.float(), labels, ignore_index=_UNLABELED, reduction="sum")

    def mean(self, logits: torch.Tensor, labels: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        labels = F.pad(labels[:, 1:], (0, 1), value=_UNLABELED).flatten()
        total: torch.Tensor = self(logits.flatten(0, 1), labels)
        return total / (labels != _UNLABELED).sum()


class _Liger(torch.autograd.Function):
    """Computes the gradients in forward, and keeps them. The logits of a chunk take about as much as all inputs."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        (rows, width), vocabulary = hidden.shape, weight.shape[0]
        # Both rounded up, and the rows of a chunk to a power of two. With 8192 tokens, a width of 4096 and a vocabulary
        # of 128256, that is 32 chunks of 256 rows: logits of 32.8 M elements, for inputs of 33.6 M.
        num_chunks = -(-vocabulary // width)
        chunk = min(rows, 1 << (-(-rows // num_chunks) - 1).bit_length())
        hidden_grad = torch.zeros_like(hidden)
        weight_grad = torch.zeros_like(weight) if weight.requires_grad else None
        losses = hidden.new_zeros(rows, dtype=torch.float32)
        in_place = hidden.dtype is weight.dtype
        buffer = hidden.new_empty(chunk, vocabulary) if in_place else None
        for start in range(0, rows, chunk):
            part = hidden[start : start + chunk]
            logits = part @ weight.t() if buffer is None else torch.mm(part, weight.t(), out=buffer[: len(part)])
            kernel_ops.update([logits, losses[start : start + chunk]], [labels[start : start + chunk]])
            if in_place:
                torch.mm(logits, weight, out=hidden_grad[start : start + chunk])
            else:
                hidden_grad[start : start + chunk] = logits @ weight
            if weight_grad is not None:
                kernel_ops.add_product(logits.t(), part, weight_grad)
            del logits, part
        del buffer
        ctx.save_for_backward(hidden_grad, weight_grad)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        return *ctx.saved_tensors, None


class _Trl(torch.autograd.Function):
    """Computes tiles of logits in forward, and once more in backward, with gradients in float32."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        ctx.dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else hidden.dtype
        statistics = [hidden.new_zeros(hidden.shape[0], dtype=torch.float32) for _ in range(_STATISTICS)]
        for tile, *_ in _tiles(hidden, weight, ctx.dtype):
            kernel_ops.update([statistics[0]], [tile, labels])
        total, *_, targets = statistics
        normalizer = total + targets.log()
        ctx.save_for_backward(hidden, weight, labels, normalizer)
        return (targets - normalizer).mean()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        hidden, weight, labels, normalizer = ctx.saved_tensors
        hidden_grad = torch.zeros_like(hidden, dtype=torch.float32)
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for tile, part, columns, tokens, entries in _tiles(hidden, weight, ctx.dtype):
            kernel_ops.update([tile], [labels, normalizer])
            kernel_ops.add_product(tile, columns, hidden_grad[tokens])
            if weight_grad is not None:
                kernel_ops.add_product(tile.t(), part, weight_grad[entries])
        return hidden_grad.to(hidden.dtype), None if weight_grad is None else weight_grad.to(weight.dtype), None


def _tiles(
    hidden: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, slice, slice]]:
    """Yields each tile of the logits, in one buffer, with its inputs and weights, and their places."""
    buffer = hidden.new_empty(min(hidden.shape[0], _TOKENS), _VOCABULARY, dtype=dtype)
    for token in range(0, hidden.shape[0], _TOKENS):
        tokens = slice(token, token + _TOKENS)
        part = hidden[tokens].to(dtype)
        for entry in range(0, weight.shape[0], _VOCABULARY):
            entries = slice(entry, entry + _VOCABULARY)
            columns = weight[entries].to(dtype)
            tile = torch.mm(part, columns.t(), out=buffer[: len(part), : len(columns)])
            yield tile, part, columns, tokens, entries


TILES = "tiles"
"""The loss in slices by :class:`~graphckpt.Tiles`."""
LOSSES: Mapping[str, type[torch.autograd.Function]] = {"liger": _Liger, "trl": _Trl}
