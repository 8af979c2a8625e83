"""Text as sequences of tokens in memory-mapped files, prepared once and kept in a cache."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graphckpt.train.corpus import Corpus, DataError, read_corpus
from graphckpt.train.report import Report
from graphckpt.train.tokenizer import SMALLEST_VOCAB, token_dtype, train_tokenizer, write_tokens
from graphckpt.units import format_bytes

# Legend: B sequences, T tokens of a sequence
_FORMAT = 1  # of the cache; a change of what is written needs a new number


@final
class TokenFile:
    """A file of tokens, read as sequences of equal length that do not overlap. The file stays on disk."""

    def __init__(self, path: Path, dtype: np.dtype[np.unsignedinteger], seq_length: int) -> None:
        self._tokens = np.memmap(path, dtype=dtype, mode="r")
        self._seq_length = seq_length

    def __len__(self) -> int:
        return len(self._tokens) // self._seq_length

    @property
    def num_tokens(self) -> int:
        """Tokens in the file, with those of an unfinished last sequence."""
        return len(self._tokens)

    def batch(self, indices: Sequence[int] | NDArray[np.int64]) -> Tensor:
        """Returns the sequences with these indices, int64 of shape [B, T]."""
        starts = np.asarray(indices, np.int64)[:, None] * self._seq_length  # [B, 1]
        return torch.from_numpy(self._tokens[starts + np.arange(self._seq_length)].astype(np.int64))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Data that is ready to be trained on."""

    train: TokenFile
    heldout: TokenFile
    tokenizer_file: Path
    """A ``tokenizer.json`` of the tokenizers library."""
    seq_length: int


@final
@dataclass(frozen=True, kw_only=True)
class TextData:
    """Text to learn to continue, token by token. The fields are the keys of ``data`` in a config."""

    paths: str | list[str] | None = None
    """Text files and folders of text files; ``None`` is the source text of Python's standard library."""
    vocab_size: int = 8192
    """Tokens of the byte-level BPE that is trained on the text."""
    seq_length: int = 256
    """Tokens of one sequence."""
    eval_fraction: float = 0.05
    """Share of the files that is held out for evaluation."""
    max_bytes: int | None = None
    """If set, uses files up to this many bytes, chosen by their content."""
    cache_dir: str | None = None
    """Where tokens are kept; ``None`` is ``$XDG_CACHE_HOME/graphckpt`` or ``~/.cache/graphckpt``."""

    def faults(self) -> Iterator[str]:
        """Yields what is wrong with the fields."""
        if self.vocab_size < SMALLEST_VOCAB:
            yield f"vocab_size: {self.vocab_size} · fix: use {SMALLEST_VOCAB} or more, for each byte"
        if self.seq_length < 2:
            yield f"seq_length: {self.seq_length} · fix: use 2 or more, for there must be a next token"
        if not 0 < self.eval_fraction < 1:
            yield f"eval_fraction: {self.eval_fraction} · fix: use a share between 0 and 1"
        if self.max_bytes is not None and self.max_bytes < 1:
            yield f"max_bytes: {self.max_bytes} · fix: use 1 or more, or null"

    def prepare(self, report: Report) -> Prepared:
        """Finds the text, trains a tokenizer and writes the tokens, unless the cache holds them already.

        Raises:
            DataError: no text, too little of it, or the cache cannot be written.
        """
        if faults := list(self.faults()):
            raise DataError("\n".join(f"data.{fault}" for fault in faults))
        paths = [self.paths] if isinstance(self.paths, str) else self.paths
        corpus = read_corpus(paths, eval_fraction=self.eval_fraction, max_bytes=self.max_bytes)
        counts = f"{len(corpus.train)} files to train on, {len(corpus.heldout)} held out"
        report.line(f"data: {counts}, {format_bytes(corpus.num_bytes)}")
        folder = self._cache() / f"tokens-{self._key(corpus)}"
        if not _is_whole(folder):
            with _fresh_folder(folder) as made:
                self._write(made, corpus, report)
        meta = _meta(folder)
        if faults := list(self._too_short(meta["num_tokens"])):
            raise DataError("\n".join(faults))
        dtype = np.dtype(meta["dtype"])
        prepared = Prepared(
            train=TokenFile(folder / "train.bin", dtype, self.seq_length),
            heldout=TokenFile(folder / "heldout.bin", dtype, self.seq_length),
            tokenizer_file=folder / "tokenizer.json",
            seq_length=self.seq_length,
        )
        counts = f"{prepared.train.num_tokens:,} tokens to train on, {prepared.heldout.num_tokens:,} held out"
        report.line(f"data: {counts}, vocabulary of {meta['vocab_size']:,}")
        return prepared

    def _too_short(self, num_tokens: dict[str, int]) -> Iterator[str]:
        for name, what, more in (
            ("train", "to train on", ""),
            ("heldout", "held out for evaluation", " or raise data.eval_fraction"),
        ):
            if num_tokens[name] < self.seq_length:
                fault = f"data: {num_tokens[name]} tokens {what}, fewer than one sequence of {self.seq_length}"
                yield f"{fault} · fix: add text, lower data.seq_length{more}"

    def _cache(self) -> Path:
        if self.cache_dir:
            return Path(self.cache_dir).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graphckpt"

    def _key(self, corpus: Corpus) -> str:
        """Returns a name for what the tokens depend on: content, split and vocabulary."""
        split = {
            name: [(part.digest, part.start, part.stop) for part in parts]
            for name, parts in (("train", corpus.train), ("heldout", corpus.heldout))
        }
        described = json.dumps([_FORMAT, self.vocab_size, split])
        return hashlib.sha256(described.encode()).hexdigest()[:16]

    def _write(self, folder: Path, corpus: Corpus, report: Report) -> None:
        with report.progress("training the tokenizer", sum(part.num_bytes for part in corpus.train)) as advance:
            tokenizer = train_tokenizer(corpus.train, self.vocab_size, advance)
        tokenizer.save(str(folder / "tokenizer.json"))
        with report.progress("tokenizing", corpus.num_bytes) as advance:
            num_tokens = {
                "train": write_tokens(folder / "train.bin", corpus.train, tokenizer, advance),
                "heldout": write_tokens(folder / "heldout.bin", corpus.heldout, tokenizer, advance),
            }
        vocab_size = tokenizer.get_vocab_size()
        meta = {"vocab_size": vocab_size, "dtype": token_dtype(vocab_size).name, "num_tokens": num_tokens}
        (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")


def _meta(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def _is_whole(folder: Path) -> bool:
    """Returns whether a cached folder holds every file, in full."""
    try:
        meta = _meta(folder)
        width = np.dtype(meta["dtype"]).itemsize
        sizes = {name: (folder / f"{name}.bin").stat().st_size for name in meta["num_tokens"]}
        return (folder / "tokenizer.json").is_file() and sizes == {
            name: width * counted for name, counted in meta["num_tokens"].items()
        }
    except (OSError, ValueError, KeyError, AssertionError):
        return False


@contextmanager
def _fresh_folder(folder: Path) -> Iterator[Path]:
    """Gives an empty folder that becomes ``folder`` at the end, in one move; an error leaves nothing."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".making-"))
    except OSError as error:
        fix = "set data.cache_dir to a folder that can be written"
        raise DataError(f"data.cache_dir: {folder.parent}: {error.strerror} · fix: {fix}") from error
    try:
        yield made
        try:
            made.rename(folder)
        except OSError:
            if not _is_whole(folder):  # what is there is broken; if it is whole, another run was faster
                shutil.rmtree(folder, ignore_errors=True)
                made.rename(folder)
    except OSError as error:
        raise DataError(f"data.cache_dir: {folder.parent}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
