"""Trains a byte-level BPE and writes parts of a corpus as token files. Knows no cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from graphckpt.train.corpus import Part

END_OF_TEXT = "<|endoftext|>"
"""Ends every document. Its id is 0."""
SMALLEST_VOCAB = 257
"""One token for each byte, and the end of the text."""
_PARTS_AT_ONCE = 32  # encoded in one call, so that all cores have work


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """Returns the smallest type that holds every token id.

    >>> token_dtype(8192), token_dtype(100_000)
    (dtype('uint16'), dtype('uint32'))
    """
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def train_tokenizer(parts: Iterable[Part], vocab_size: int, advance: Callable[[int], None]) -> Tokenizer:
    """Trains a byte-level BPE of at most ``vocab_size`` tokens; a small corpus yields fewer.

    Args:
        parts: what to train on.
        vocab_size: tokens in all, at least ``SMALLEST_VOCAB``.
        advance: is told the bytes of each part that was read.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(parts, advance), trainer)
    return tokenizer


def _texts(parts: Iterable[Part], advance: Callable[[int], None]) -> Iterator[str]:
    for part in parts:
        yield from part.texts()
        advance(part.num_bytes)


def write_tokens(path: Path, parts: tuple[Part, ...], tokenizer: Tokenizer, advance: Callable[[int], None]) -> int:
    """Writes the tokens of ``parts``, each ended by ``END_OF_TEXT``, and returns their number."""
    dtype = token_dtype(tokenizer.get_vocab_size())
    end = np.array([tokenizer.token_to_id(END_OF_TEXT)], dtype)
    num_tokens = 0
    with path.open("wb") as file:
        for first in range(0, len(parts), _PARTS_AT_ONCE):
            for part, tokens in _encoded(parts[first : first + _PARTS_AT_ONCE], tokenizer):
                for ids in (*(np.array(block, dtype) for block in tokens), end):
                    num_tokens += ids.size
                    file.write(ids.tobytes())
                advance(part.num_bytes)
    return num_tokens


def _encoded(parts: tuple[Part, ...], tokenizer: Tokenizer) -> Iterator[tuple[Part, list[list[int]]]]:
    """Yields each part with the ids of its blocks, all of them encoded in one call."""
    blocks = [list(part.texts()) for part in parts]
    encoded = iter(tokenizer.encode_batch([text for texts in blocks for text in texts], add_special_tokens=False))
    for part, texts in zip(parts, blocks, strict=True):
        yield part, [next(encoded).ids for _ in texts]
