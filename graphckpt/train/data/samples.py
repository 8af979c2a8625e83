"""Samples by number, what makes them of tokens, and what data is once it is open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, final, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from graphckpt.train.data.token_file import PreparedText, TokenFile


class Samples(Protocol):
    """What can be learned from, by number. The same number is the same sample, always."""

    def __len__(self) -> int: ...

    def batch(self, indices: NDArray[np.int64]) -> dict[str, Tensor]:
        """Returns the samples with these indices, each tensor with them along dim 0, on the CPU."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """Data that a task made its samples of."""

    train: Samples
    heldout: Samples | None
    """What is evaluated on; ``None`` if nothing is held out."""
    text: PreparedText | None = None
    """The text and its tokenizer; ``None`` if the data is no text."""

    @property
    def tokenizer_file(self) -> Path | None:
        """A ``tokenizer.json``, where there is one."""
        return self.text.tokenizer_file if self.text else None

    @property
    def tokens_each(self) -> int:
        """Tokens of one sample; 1 if the data is no text."""
        return self.text.seq_length if self.text else 1


@runtime_checkable
class SampleMaker(Protocol):
    """Makes samples of tokens, as a task on text does."""

    @property
    def special_tokens(self) -> Sequence[str]:
        """Tokens that it puts between those of the text."""

    def samples(self, tokens: TokenFile, text: PreparedText, seed: int) -> Samples:
        """Returns the samples of one token file; ``seed`` fixes whatever is drawn for them."""
