"""The tokens of documents: a byte-level BPE, and Arrow files that are mapped into memory."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, final

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from graphckpt.extras import LazyPackage
from graphckpt.train.data.documents import DataError, Document

if TYPE_CHECKING:
    import pyarrow as pa
else:
    pa = LazyPackage("pyarrow", "train")  # a tenth of a second, which configs without texts can do without

# Legend: B sequences, T tokens of a sequence

END_OF_TEXT = "<|endoftext|>"
"""Ends every document."""
SMALLEST_VOCAB = 257
"""One token for each byte, and the end of the text."""
_DOCUMENTS_AT_ONCE = 32  # encoded in one call, so that all cores have work
_GROUPS = b"groups"  # key of the metadata

Advance = Callable[[int], None]
"""Called with the bytes that have been read since the last call."""


def read_tokenizer(file: str, special_tokens: Sequence[str]) -> Tokenizer:
    path = Path(file).expanduser()
    if not path.is_file():
        raise DataError(f"data.tokenizer_file: {file}: no such file")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        fix = "name a tokenizer.json of the tokenizers library"
        raise DataError(f"data.tokenizer_file: {file}: {error} · fix: {fix}") from error
    if missing := [token for token in (END_OF_TEXT, *special_tokens) if tokenizer.token_to_id(token) is None]:
        fix = "add them to its special tokens, or leave data.tokenizer_file out to train one"
        raise DataError(f"data.tokenizer_file: {file} has no {', '.join(missing)} · fix: {fix}")
    return tokenizer


def train_tokenizer(
    documents: Sequence[Document], vocab_size: int, special_tokens: Sequence[str], advance: Advance
) -> Tokenizer:
    """Trains a byte-level BPE of at most ``vocab_size`` tokens; a small corpus yields fewer.

    Ids of special tokens, which no text yields, follow that of ``END_OF_TEXT``, from 1 on.
    """

    def texts() -> Iterator[str]:
        for document in documents:
            yield from document.texts()
            advance(document.num_bytes)

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, *special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer


def write_tokens(
    path: Path, documents: Sequence[Document], tokenizer: Tokenizer, groups: Sequence[str], advance: Advance
) -> None:
    """Writes a row for each document: its tokens and ``END_OF_TEXT``, and its group's number in ``groups``.

    ``datasets.Dataset.from_file`` reads the file too.
    """
    dtype = np.dtype(np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32)
    types = {"input_ids": pa.large_list(pa.from_numpy_dtype(dtype)), "group": pa.int64()}
    schema = pa.schema(types, metadata={_GROUPS: json.dumps(groups)})
    end = tokenizer.token_to_id(END_OF_TEXT)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for first in range(0, len(documents), _DOCUMENTS_AT_ONCE):
            some = documents[first : first + _DOCUMENTS_AT_ONCE]
            texts = [list(document.texts()) for document in some]
            encodings = iter(tokenizer.encode_batch_fast(list(chain(*texts)), add_special_tokens=False))
            rows = [np.array([*chain(*(next(encodings).ids for _ in blocks)), end], dtype) for blocks in texts]
            numbers = [groups.index(document.group) for document in some]
            writer.write_batch(pa.record_batch({"input_ids": rows, "group": numbers}, schema=schema))
            advance(sum(document.num_bytes for document in some))


@final
class Tokens:
    """The tokens of documents, end to end, read as sequences of equal length that do not overlap. They stay on disk."""

    # Documents [65, 66, 67] and [68], each ended by 0, are 65 66 67 0 68 0, with ends at 4 and 6. In sequences of 2:
    # [65, 66], [67, 0], [68, 0]. A sequence may hold the end of one document and the begin of the next, and tokens
    # after the last full one are left out.
    def __init__(self, path: Path, seq_length: int) -> None:
        with pa.ipc.open_stream(pa.memory_map(str(path))) as reader:
            table = reader.read_all()
        column = table["input_ids"]
        # Not by `flatten` and `value_lengths`, which import pyarrow.compute. No row is null.
        offsets = [np.from_dlpack(rows.offsets) for rows in column.chunks]
        parts = [rows.values[ends[0] : ends[-1]] for rows, ends in zip(column.chunks, offsets, strict=True)]
        self._tokens = pa.chunked_array(parts, column.type.value_type)
        self._ends = np.cumsum(np.concatenate([np.diff(ends) for ends in offsets]))
        self._groups = _to_numpy(table["group"])
        self._seq_length = seq_length
        self.groups: tuple[str, ...] = tuple(json.loads(table.schema.metadata[_GROUPS]))

    def __len__(self) -> int:
        return self.num_tokens // self._seq_length

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    @property
    def num_documents(self) -> int:
        return len(self._ends)

    def batch(self, indices: Sequence[int] | NDArray[np.int64]) -> Tensor:
        """Returns the sequences with these indices, int64 of shape [B, T]."""
        size = self._seq_length
        return torch.from_numpy(np.stack([self.read(int(n) * size, (int(n) + 1) * size) for n in indices]))

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        return _to_numpy(self._tokens.slice(start, stop - start))

    def span(self, number: int) -> tuple[int, int]:
        """Returns where the tokens of a document are, without the one that ends it."""
        return (int(self._ends[number - 1]) if number else 0), int(self._ends[number]) - 1

    def group(self, number: int) -> int:
        return int(self._groups[number])

    def window(self, index: int, size: int) -> tuple[int, NDArray[np.int64]]:
        """Returns the document in which sequence ``index`` begins, and up to ``size`` of its tokens.

        They begin where the sequence does, or before, so that the document fills the window if it can.
        """
        # Documents of 5 and 9 tokens without their ends, sequences of 4: ends are [6, 16], and sequence 3 begins at 12,
        # in document 1, whose tokens are 6 to 14. With size 6 the window begins at 9 instead, and ends with the
        # document.
        place = index * self._seq_length
        number = int(np.searchsorted(self._ends, place, side="right"))
        start, stop = self.span(number)
        first = max(start, min(place, stop - size))
        return number, self.read(first, min(first + size, stop))


def _to_numpy(values: pa.ChunkedArray) -> NDArray[np.int64]:
    """As Arrow's ``to_numpy``, which imports pandas: a third of a second."""
    return np.concatenate([np.empty(0, np.int64), *(np.from_dlpack(chunk) for chunk in values.chunks if len(chunk))])


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedText:
    train: Tokens
    heldout: Tokens
    tokenizer_file: Path
    """A ``tokenizer.json`` of the tokenizers library."""
    seq_length: int
    vocab_size: int
    """Rows of an embedding of the tokenizer's vocabulary."""
    special_ids: dict[str, int]
    """Ids of the requested special tokens."""
    text_ids: NDArray[np.int64]
    """Ids of the tokens that a text may consist of, in order: all but special ones."""
    line_ends: NDArray[np.int64]
    """Ids of the tokens in which a line ends."""
    groups: tuple[str, ...]
    """Names of the documents' groups, by number."""


def open_tokens(folder: Path, seq_length: int, special_tokens: Sequence[str]) -> PreparedText | None:
    """Returns what ``write_text`` wrote into a folder; ``None`` if it is incomplete."""
    file = folder / "tokenizer.json"
    try:
        train, heldout = (Tokens(folder / f"{name}.arrow", seq_length) for name in ("train", "heldout"))
        tokenizer = Tokenizer.from_file(str(file))
    except Exception:  # the tokenizers library raises a bare one
        return None
    vocabulary = tokenizer.get_vocab()
    special = {END_OF_TEXT, *special_tokens}
    special |= {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    newlines = {"\n", "\u010a"}  # as it is, and as byte-level BPE writes byte 10
    return PreparedText(
        train=train,
        heldout=heldout,
        tokenizer_file=file,
        seq_length=seq_length,
        vocab_size=1 + max(vocabulary.values()),  # a user's tokenizer may leave ids out
        special_ids={token: vocabulary[token] for token in special_tokens},
        text_ids=np.array(sorted(number for token, number in vocabulary.items() if token not in special), np.int64),
        line_ends=np.array(sorted(number for token, number in vocabulary.items() if newlines & set(token)), np.int64),
        groups=train.groups,
    )


@contextmanager
def new_folder(folder: Path, is_complete: Callable[[], bool]) -> Iterator[Path]:
    """Yields an empty folder that becomes ``folder`` at the end; an error leaves nothing behind."""
    where, fix = f"data.cache_dir: {folder.parent}", "set data.cache_dir to a folder that can be written"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # In the folder of its target, as a rename is atomic only within one file system.
        fresh = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".making-"))
    except OSError as error:
        raise DataError(f"{where}: {error.strerror} · fix: {fix}") from error
    try:
        yield fresh
        try:
            fresh.rename(folder)
        except OSError:
            # A rename onto a folder that is not empty fails.
            if not is_complete():  # else another run has written it meanwhile, with the same content
                shutil.rmtree(folder, ignore_errors=True)
                fresh.rename(folder)
    except OSError as error:
        raise DataError(f"{where}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
