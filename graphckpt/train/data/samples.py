"""The interfaces between data and tasks: samples, what creates them from tokens, and opened data."""

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
    """Training samples by index. An index always returns the same sample."""

    def __len__(self) -> int: ...

    def batch(self, indices: NDArray[np.int64]) -> dict[str, Tensor]:
        """Returns the samples with these indices, each tensor with them along dim 0, on the CPU."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """Data opened for a task."""

    train: Samples
    heldout: Samples | None
    """The samples to evaluate on; ``None`` if there are none."""
    text: PreparedText | None = None
    """The text and its tokenizer; ``None`` for other data."""

    @property
    def tokenizer_file(self) -> Path | None:
        """The ``tokenizer.json``, if any."""
        return self.text.tokenizer_file if self.text else None

    @property
    def tokens_each(self) -> int:
        """Tokens of one sample; 1 for other data."""
        return self.text.seq_length if self.text else 1


@runtime_checkable
class SampleMaker(Protocol):
    """Creates samples from tokens, as a task on text does."""

    @property
    def special_tokens(self) -> Sequence[str]:
        """Special tokens that it inserts."""

    def samples(self, tokens: TokenFile, text: PreparedText, seed: int) -> Samples:
        """Returns the samples of one token file; ``seed`` makes random choices reproducible."""
