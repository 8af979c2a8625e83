"""Trains a byte-level BPE, and writes documents as token files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from graphckpt.train.data.corpus import DataError, Document

END_OF_TEXT = "<|endoftext|>"
"""Ends every document. Its id is 0."""
SMALLEST_VOCAB = 257
"""One token for each byte, and the end of the text."""
_PARTS_AT_ONCE = 32  # encoded in one call, so that all cores have work


def line_ends(tokenizer: Tokenizer) -> NDArray[np.int64]:
    """Returns the ids of the tokens that contain a line end, if any."""
    newline = {"\n", "\u010a"}  # as it is, and as byte-level BPE writes byte 10
    return np.array(sorted(number for token, number in tokenizer.get_vocab().items() if newline & set(token)), np.int64)


def special_ids(tokenizer: Tokenizer, tokens: Sequence[str]) -> dict[str, int]:
    """Returns the ids of the special tokens that the tokenizer has."""
    return {token: number for token in tokens if (number := tokenizer.token_to_id(token)) is not None}


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """Returns the smallest type that holds every token id.

    >>> token_dtype(8192), token_dtype(100_000)
    (dtype('uint16'), dtype('uint32'))
    """
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def read_tokenizer(file: str, special_tokens: Sequence[str]) -> Tokenizer:
    """Returns the tokenizer that a ``tokenizer.json`` holds.

    Raises:
        DataError: no such file, it holds no tokenizer, or the tokenizer lacks a special token.
    """
    path = Path(file).expanduser()
    if not path.is_file():
        raise DataError(f"data.tokenizer_file: {file}: no such file")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        fix = "name a tokenizer.json of the tokenizers library"
        raise DataError(f"data.tokenizer_file: {file}: {error} · fix: {fix}") from error
    needed = (END_OF_TEXT, *special_tokens)
    if missing := [token for token in needed if tokenizer.token_to_id(token) is None]:
        fix = "add them to its special tokens, or leave data.tokenizer_file out to train one"
        raise DataError(f"data.tokenizer_file: {file} has no {', '.join(missing)} · fix: {fix}")
    return tokenizer


def train_tokenizer(
    parts: Iterable[Document], vocab_size: int, special_tokens: Sequence[str], advance: Callable[[int], None]
) -> Tokenizer:
    """Trains a byte-level BPE of at most ``vocab_size`` tokens; a small corpus yields fewer.

    Args:
        parts: what to train on.
        vocab_size: tokens in all, at least ``SMALLEST_VOCAB`` and the special tokens.
        special_tokens: those that no text yields; their ids follow that of ``END_OF_TEXT``, from 1 on.
        advance: called with the bytes of each part that was read.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, *special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(parts, advance), trainer)
    return tokenizer


def _texts(parts: Iterable[Document], advance: Callable[[int], None]) -> Iterator[str]:
    for part in parts:
        yield from part.texts()
        advance(part.num_bytes)


def write_tokens(
    path: Path, parts: tuple[Document, ...], tokenizer: Tokenizer, advance: Callable[[int], None]
) -> list[int]:
    """Writes the tokens of ``parts``, each ended by ``END_OF_TEXT``, and returns each part's number, end included."""
    dtype = token_dtype(tokenizer.get_vocab_size())
    end = np.array([tokenizer.token_to_id(END_OF_TEXT)], dtype)
    lengths = []
    with path.open("wb") as file:
        for first in range(0, len(parts), _PARTS_AT_ONCE):
            for part, tokens in _encoded(parts[first : first + _PARTS_AT_ONCE], tokenizer):
                blocks = [*(np.array(block, dtype) for block in tokens), end]
                for ids in blocks:
                    file.write(ids.tobytes())
                lengths.append(sum(ids.size for ids in blocks))
                advance(part.num_bytes)
    return lengths


def _encoded(parts: tuple[Document, ...], tokenizer: Tokenizer) -> Iterator[tuple[Document, list[list[int]]]]:
    """Yields each part with the ids of its blocks, all of them encoded in one call."""
    blocks = [list(part.texts()) for part in parts]
    encoded = iter(tokenizer.encode_batch([text for texts in blocks for text in texts], add_special_tokens=False))
    for part, texts in zip(parts, blocks, strict=True):
        yield part, [next(encoded).ids for _ in texts]
