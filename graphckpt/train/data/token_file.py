"""Memory-mapped token files, with the documents that the tokens belong to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Legend: B sequences, T tokens of a sequence, D documents


@final
class TokenFile:
    """A file of tokens, read as sequences of equal length that do not overlap. The file stays on disk.

    Args:
        path: the tokens, end to end.
        dtype: of a token in the file.
        seq_length: tokens of a sequence.
        lengths: tokens of each document, with the one that ends it; int64 of shape [D].
        groups: number of the group of each document; int64 of shape [D].
    """

    def __init__(
        self,
        path: Path,
        dtype: np.dtype[np.unsignedinteger],
        seq_length: int,
        *,
        lengths: NDArray[np.int64],
        groups: NDArray[np.int64],
    ) -> None:
        self._tokens = np.memmap(path, dtype=dtype, mode="r")
        self._seq_length = seq_length
        self._ends = np.cumsum(lengths)
        self._groups = groups

    def __len__(self) -> int:
        return len(self._tokens) // self._seq_length

    @property
    def num_tokens(self) -> int:
        """Tokens in the file, including an incomplete last sequence."""
        return len(self._tokens)

    @property
    def num_documents(self) -> int:
        """Documents in the file."""
        return len(self._ends)

    def batch(self, indices: Sequence[int] | NDArray[np.int64]) -> Tensor:
        """Returns the sequences with these indices, int64 of shape [B, T]."""
        starts = np.asarray(indices, np.int64)[:, None] * self._seq_length  # [B, 1]
        return torch.from_numpy(self._tokens[starts + np.arange(self._seq_length)].astype(np.int64))

    def span(self, number: int) -> tuple[int, int]:
        """Returns where the tokens of a document are, without the one that ends it."""
        return (int(self._ends[number - 1]) if number else 0), int(self._ends[number]) - 1

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the tokens from ``start`` up to ``stop``."""
        return self._tokens[start:stop].astype(np.int64)

    def group(self, number: int) -> int:
        """Returns the number of the group that a document belongs to."""
        return int(self._groups[number])

    def window(self, index: int, size: int) -> tuple[int, NDArray[np.int64]]:
        """Returns the document in which sequence ``index`` begins, and up to ``size`` of its tokens.

        They begin where the sequence does, or before, so that the document fills the window if it can.
        """
        place = index * self._seq_length
        number = int(np.searchsorted(self._ends, place, side="right"))
        start, stop = self.span(number)
        first = max(start, min(place, stop - size))
        return number, self.read(first, min(first + size, stop))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedText:
    """Text that is ready for training."""

    train: TokenFile
    heldout: TokenFile
    tokenizer_file: Path
    """A ``tokenizer.json`` of the tokenizers library."""
    seq_length: int
    vocab_size: int
    """Size of the tokenizer's vocabulary."""
    special_ids: dict[str, int]
    """Ids of the requested special tokens."""
    line_ends: NDArray[np.int64]
    """Ids of the tokens in which a line ends."""
    groups: tuple[str, ...]
    """Names of the documents' groups, by number."""
