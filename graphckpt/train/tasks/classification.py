"""Sequence classification: predicts the group of a document from an excerpt. The metric is accuracy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from graphckpt.train.data.samples import Samples
from graphckpt.train.data.tokens import PreparedText, Tokens
from graphckpt.train.tasks.base import TextTask, summed

_PAD, _CLS, _SEP = "[PAD]", "[CLS]", "[SEP]"


@final
@dataclass(frozen=True, slots=True)
class _Excerpts:
    tokens: Tokens
    text: PreparedText

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, indices: NDArray[np.int64]) -> dict[str, Tensor]:
        ids, size = self.text.special_ids, self.text.seq_length
        input_ids = np.full((len(indices), size), ids[_PAD], np.int64)  # [B, T]
        labels = np.empty(len(indices), np.int64)
        for row, index in enumerate(indices):
            document, window = self.tokens.window(int(index), size - 2)
            input_ids[row, : len(window) + 2] = [ids[_CLS], *window, ids[_SEP]]
            labels[row] = self.tokens.group(document)
        mask = (input_ids != ids[_PAD]).astype(np.int64)
        arrays = {"input_ids": input_ids, "attention_mask": mask, "labels": labels}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


@final
class SequenceClassification(TextTask):
    """For ``BertForSequenceClassification`` and similar models.

    The group of a document is the folder right below the one that ``data.paths`` names, or the column
    ``data.label_column`` of a data set. A batch is ``input_ids`` and ``attention_mask`` of shape [B, T] and
    ``labels`` of shape [B], all int64. No sample reaches over the end of its document.
    """

    special_tokens: ClassVar[tuple[str, ...]] = (_PAD, _CLS, _SEP)
    metric: ClassVar[str] = "eval_acc"
    metric_mode: ClassVar[Literal["min", "max"]] = "max"

    def samples(self, tokens: Tokens, text: PreparedText, seed: int) -> Samples:
        """Returns an excerpt for each sequence of the file, of the document in which it begins."""
        del seed
        return _Excerpts(tokens, text)

    def losses(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns ``cls_loss``, the mean over the samples."""
        return {"cls_loss": cross_entropy(_logits(model, batch).float(), batch["labels"])}

    def tally(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns ``loss`` and ``acc``, the accuracy."""
        logits, labels = _logits(model, batch).float(), batch["labels"]
        is_right = (logits.argmax(-1) == labels).float()
        return {"loss": summed(cross_entropy(logits, labels), len(labels)), "acc": summed(is_right.mean(), len(labels))}

    def check(self, model: nn.Module, text: PreparedText) -> Iterator[str]:
        """Yields faults if ``model`` does not fit the text and its groups."""
        yield from super().check(model, text)
        config: Any = getattr(model, "config", None)
        num_labels = getattr(config, "num_labels", None)
        if len(text.groups) < 2:
            fix = "name a folder that has a folder for each class, or data.label_column"
            yield f"data: there is one class, {text.groups[0]!r}, and nothing to learn · fix: {fix}"
        elif isinstance(num_labels, int) and num_labels < len(text.groups):
            fix = f"set its num_labels to {len(text.groups)}"
            yield f"model: expected at least {len(text.groups)} classes, got {num_labels} · fix: {fix}"


def _logits(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    logits: Tensor = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return logits
