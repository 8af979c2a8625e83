"""Masked language modeling and next-sentence prediction (Devlin et al. 2019, arXiv:1810.04805)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from graphckpt.train.data.samples import Samples
from graphckpt.train.data.tokens import PreparedText, Tokens
from graphckpt.train.tasks.base import TextTask, perplexity, summed

# Legend: B samples, T tokens of a sample
_PAD, _CLS, _SEP, _MASK = "[PAD]", "[CLS]", "[SEP]", "[MASK]"
_UNMASKED = -100  # ignored by cross_entropy
_NEXT, _RANDOM = 0, 1  # as BertForPreTraining has them

_Ids = NDArray[np.int64]

# Note [A sample of two texts]
# Of the document 10 11 12 13 14, where 11 ends a line, with a second text from another document, in 10 tokens, of which
# 40 % of those of texts are predicted:
#
#     input_ids             [CLS]   10  [MASK]  [SEP]  [MASK]  107   108  [SEP]  [PAD]  [PAD]
#     labels                 -100  -100    11   -100     106  -100  -100   -100   -100   -100
#     token_type_ids            0     0     0      0       1     1     1      1      0      0
#     attention_mask            1     1     1      1       1     1     1      1      0      0
#     next_sentence_label       1


@final
@dataclass(frozen=True, slots=True)
class _Pairs:
    """``[CLS] first [SEP] second [SEP]``, with some tokens masked; determined by sample and seed."""

    tokens: Tokens
    text: PreparedText
    seed: int
    mask_fraction: float
    random_fraction: float

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, indices: NDArray[np.int64]) -> dict[str, Tensor]:
        size, ids = self.text.seq_length, self.text.special_ids
        shape = (len(indices), size)
        input_ids, labels = np.full(shape, ids[_PAD], np.int64), np.full(shape, _UNMASKED, np.int64)
        types, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        follows = np.empty(len(indices), np.int64)
        for row, index in enumerate(indices):
            # A generator for each sample: it is the same in whichever batch it is drawn, also after a resume or on
            # another number of ranks. The order of draws below determines each sample: another one changes all runs.
            draw = np.random.default_rng((self.seed, int(index)))
            first, second, follows[row] = self._pair(int(index), draw)
            sequence = np.array([ids[_CLS], *first, ids[_SEP], *second, ids[_SEP]], np.int64)
            is_text = np.ones(len(sequence), np.bool_)
            is_text[[0, len(first) + 1, -1]] = False
            input_ids[row, : len(sequence)], labels[row, : len(sequence)] = self._masked(sequence, is_text, draw)
            types[row, len(first) + 2 : len(sequence)] = 1
            mask[row, : len(sequence)] = 1
        arrays = {"input_ids": input_ids, "attention_mask": mask, "token_type_ids": types, "labels": labels}
        return {name: torch.from_numpy(a) for name, a in {**arrays, "next_sentence_label": follows}.items()}

    def _pair(self, index: int, draw: np.random.Generator) -> tuple[_Ids, _Ids, int]:
        """Returns a text of one document, and the text after it or one from another document."""
        room = self.text.seq_length - 3
        document, window = self.tokens.window(index, room)
        if len(window) < 2:
            return window, self._elsewhere(document, room - len(window), draw), _RANDOM
        lines = np.flatnonzero(np.isin(window[:-1], self.text.line_ends)) + 1
        middle = int(draw.choice(lines)) if len(lines) else int(draw.integers(1, len(window)))
        first, second = window[:middle], window[middle:]
        if draw.random() < self.random_fraction and self.tokens.num_documents > 1:
            return first, self._elsewhere(document, len(second), draw), _RANDOM
        return first, second, _NEXT

    def _elsewhere(self, document: int, size: int, draw: np.random.Generator) -> _Ids:
        """Returns up to ``size`` tokens from any document but this one."""
        # Uniform over the others: of 4 documents without number 1, a draw of 0, 1, 2 means 0, 2, 3.
        other = int(draw.integers(max(1, self.tokens.num_documents - 1)))
        start, stop = self.tokens.span(other + (other >= document and self.tokens.num_documents > 1))
        first = start + int(draw.integers(max(1, stop - start - size + 1)))
        return self.tokens.read(first, min(first + size, stop))

    def _masked(self, sequence: _Ids, is_text: NDArray[np.bool_], draw: np.random.Generator) -> tuple[_Ids, _Ids]:
        """Returns inputs and labels: of the predicted tokens, 80 % are masked, 10 % random and 10 % unchanged."""
        places = np.flatnonzero(is_text)
        count = max(1, round(len(places) * self.mask_fraction))
        chosen = draw.choice(places, count, replace=False)
        labels = np.full(len(sequence), _UNMASKED, np.int64)
        labels[chosen] = sequence[chosen]
        # Devlin et al., section 3.1: [MASK] does not occur in fine-tuning, so 20 % of the predicted tokens are not
        # masked.
        inputs, chance = sequence.copy(), draw.random(count)
        inputs[chosen[chance < 0.8]] = self.text.special_ids[_MASK]
        changed = chosen[(chance >= 0.8) & (chance < 0.9)]
        inputs[changed] = draw.choice(self.text.text_ids, len(changed))
        return inputs, labels


@final
@dataclass(frozen=True, kw_only=True)
class MaskedLM(TextTask):
    """For ``BertForPreTraining``.

    A batch is ``input_ids``, ``attention_mask``, ``token_type_ids`` and ``labels`` of shape [B, T], and
    ``next_sentence_label`` of shape [B]: 0 where the second text follows the first, 1 where it comes from another
    document. All are int64. The first text ends with a line, where there is one.
    """

    mask_fraction: float = 0.15
    """Fraction of the tokens that are predicted."""
    random_fraction: float = 0.5
    """Fraction of the samples whose second text is from another document."""

    special_tokens: ClassVar[tuple[str, ...]] = (_PAD, _CLS, _SEP, _MASK)
    metric: ClassVar[str] = "eval_ppl"

    def faults(self) -> Iterator[str]:
        """Yields the faults of the fields."""
        for name in ("mask_fraction", "random_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                yield f"{name}: expected a share from 0 to 1, got {getattr(self, name)}"

    def samples(self, tokens: Tokens, text: PreparedText, seed: int) -> Samples:
        """Returns a pair of texts for each sequence of the file, of the document in which it begins."""
        return _Pairs(tokens, text, seed, self.mask_fraction, self.random_fraction)

    def losses(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns ``lm_loss``, the mean over the masked tokens, and ``nsp_loss``, the mean over the samples."""
        tokens, follows = _logits(model, batch)
        return {
            "lm_loss": cross_entropy(tokens.flatten(0, 1), batch["labels"].flatten(), ignore_index=_UNMASKED),
            "nsp_loss": cross_entropy(follows, batch["next_sentence_label"]),
        }

    def tally(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns both losses, and ``nsp_acc``, the accuracy on pairs."""
        tokens, follows = _logits(model, batch)
        labels, is_random = batch["labels"].flatten(), batch["next_sentence_label"]
        masked = cross_entropy(tokens.flatten(0, 1), labels, ignore_index=_UNMASKED)
        is_right = (follows.argmax(-1) == is_random).float()
        return {
            "lm_loss": summed(masked, (labels != _UNMASKED).sum()),
            "nsp_loss": summed(cross_entropy(follows, is_random), len(is_random)),
            "nsp_acc": summed(is_right.mean(), len(is_random)),
        }

    def metrics(self, means: Mapping[str, float]) -> dict[str, float]:
        """Returns ``eval_loss``, the sum of both, ``eval_ppl`` of the masked tokens, and ``eval_nsp_acc``."""
        return {
            "eval_loss": means["lm_loss"] + means["nsp_loss"],
            "eval_ppl": perplexity(means["lm_loss"]),
            "eval_nsp_acc": means["nsp_acc"],
        }

    def check(self, model: nn.Module, text: PreparedText) -> Iterator[str]:
        """Yields faults if ``model`` does not fit the text."""
        yield from super().check(model, text)
        if text.seq_length < 8:
            yield f"data.seq_length: expected 8 or more (two texts and three special tokens), got {text.seq_length}"
        if text.train.num_documents < 2 and self.random_fraction:
            fix = "name several files, or set task.random_fraction=0"
            yield f"data: expected several documents, of which the second text of a pair is drawn, got one · fix: {fix}"


def _logits(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the logits of tokens, [B, T, vocabulary], and of pairs, [B, 2], in float32."""
    names = ("input_ids", "attention_mask", "token_type_ids")
    output = model(**{name: batch[name] for name in names})
    return output.prediction_logits.float(), output.seq_relationship_logits.float()
