"""Tokenized text, prepared once and cached: the section ``data`` of a config."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, final

import numpy as np
from tokenizers import Tokenizer

from graphckpt.errors import ConfigError
from graphckpt.train.console import Report
from graphckpt.train.data.corpus import Corpus, DataError, Document, read_corpus, split
from graphckpt.train.data.hub import read_rows
from graphckpt.train.data.samples import Opened, SampleMaker
from graphckpt.train.data.token_cache import SPLITS, cache_root, documents, fresh_folder, is_whole, read_meta
from graphckpt.train.data.token_file import PreparedText, TokenFile
from graphckpt.train.data.tokenizer import (
    SMALLEST_VOCAB,
    line_ends,
    read_tokenizer,
    special_ids,
    token_dtype,
    train_tokenizer,
    write_tokens,
)
from graphckpt.units import format_bytes

_FORMAT = 2  # of the cache; increase it when the written files change


class Data(Protocol):
    """The data of a run."""

    def open(self, task: object, *, seed: int, report: Report) -> Opened:
        """Prepares the data for ``task``; ``seed`` makes random choices reproducible."""


@final
@dataclass(frozen=True, kw_only=True)
class TextData:
    """Text and its tokens. The fields are the keys of ``data`` in a config."""

    paths: str | list[str] | None = None
    """Text files and folders of text files; ``None`` is the source text of Python's standard library."""
    dataset: str | None = None
    """A Hugging Face data set by its name, instead of ``paths``, such as ``"Salesforce/wikitext"``."""
    dataset_config: str | None = None
    """Which of its configurations, such as ``"wikitext-2-raw-v1"``."""
    dataset_split: str = "train"
    """Its split; a part of it is held out, as of any text."""
    text_column: str = "text"
    """Its column of texts."""
    label_column: str | None = None
    """Its column of classes, for classification."""
    tokenizer_file: str | None = None
    """A ``tokenizer.json`` to use; ``None`` trains a byte-level BPE on the text."""
    vocab_size: int = 8192
    """Tokens of the byte-level BPE that is trained on the text."""
    seq_length: int = 256
    """Tokens of one sequence."""
    eval_fraction: float = 0.05
    """Fraction of the files that is held out for evaluation."""
    max_bytes: int | None = None
    """If set, uses files up to this many bytes, chosen by their content."""
    cache_dir: str | None = None
    """Folder of the cached tokens; ``None`` is ``$XDG_CACHE_HOME/graphckpt`` or ``~/.cache/graphckpt``."""

    def faults(self) -> Iterator[str]:
        """Yields the faults of the fields."""
        if self.vocab_size < SMALLEST_VOCAB:
            yield f"vocab_size: expected {SMALLEST_VOCAB} or more, one for each byte, got {self.vocab_size}"
        if self.seq_length < 2:
            yield f"seq_length: expected 2 or more, got {self.seq_length}: the last token has no next one"
        if not 0 < self.eval_fraction < 1:
            yield f"eval_fraction: expected a share between 0 and 1, got {self.eval_fraction}"
        if self.max_bytes is not None and self.max_bytes < 1:
            yield f"max_bytes: expected null or 1 or more, got {self.max_bytes}"
        if self.dataset is not None and self.paths is not None:
            yield f"dataset: {self.dataset!r}, and data.paths is set too · fix: set one of them to null"

    def open(self, task: object, *, seed: int, report: Report) -> Opened:
        """Prepares the text and creates the samples of ``task``.

        Raises:
            ConfigError: ``task`` does not support text.
            DataError: no text, too little of it, or the cache cannot be written.
        """
        if not isinstance(task, SampleMaker):
            fix = "use graphckpt.train.tasks.CausalLM or another task on text, or data of your own"
            raise ConfigError(f"task: {type(task).__name__} does not support text · fix: {fix}")
        text = self.prepare(report, task.special_tokens)
        train, heldout = (task.samples(tokens, text, seed) for tokens in (text.train, text.heldout))
        return Opened(train=train, heldout=heldout, text=text)

    def prepare(self, report: Report, special_tokens: Sequence[str] = ()) -> PreparedText:
        """Finds the text, trains a tokenizer and writes the tokens, unless they are cached.

        Raises:
            DataError: no text, too little of it, or the cache cannot be written.
        """
        if faults := list(self.faults()):
            raise DataError("\n".join(f"data.{fault}" for fault in faults))
        if self.vocab_size < SMALLEST_VOCAB + len(special_tokens):
            least = f"{SMALLEST_VOCAB + len(special_tokens)} or more, with one for {', '.join(special_tokens)} each"
            raise DataError(f"data.vocab_size: expected {least}, got {self.vocab_size}")
        corpus = self._corpus()
        counts = f"{len(corpus.train)} documents to train on, {len(corpus.heldout)} held out"
        report.line(f"data: {counts}, {format_bytes(corpus.num_bytes)}")
        given = read_tokenizer(self.tokenizer_file, special_tokens) if self.tokenizer_file else None
        folder = cache_root(self.cache_dir) / f"tokens-{self._key(corpus, special_tokens, given)}"
        if not is_whole(folder):
            with fresh_folder(folder) as made:
                self._write(made, corpus, special_tokens, given, report)
        prepared = self._read(folder, special_tokens)
        counts = f"{prepared.train.num_tokens:,} tokens to train on, {prepared.heldout.num_tokens:,} held out"
        report.line(f"data: {counts}, vocabulary of {prepared.vocab_size:,}")
        return prepared

    def _corpus(self) -> Corpus:
        if self.dataset is None:
            paths = [self.paths] if isinstance(self.paths, str) else self.paths
            return read_corpus(paths, eval_fraction=self.eval_fraction, max_bytes=self.max_bytes)
        rows = read_rows(
            self.dataset,
            config=self.dataset_config,
            split=self.dataset_split,
            text_column=self.text_column,
            label_column=self.label_column,
        )
        where = f"data.dataset: too few texts in column {self.text_column!r} of {self.dataset}"
        return split(rows, eval_fraction=self.eval_fraction, max_bytes=self.max_bytes, where=where)

    def _read(self, folder: Path, special_tokens: Sequence[str]) -> PreparedText:
        meta = read_meta(folder)
        if faults := list(self._too_short(meta["num_tokens"])):
            raise DataError("\n".join(faults))
        files = {}
        for name in SPLITS:
            lengths, groups = documents(folder, name).T
            dtype = np.dtype(meta["dtype"])
            files[name] = TokenFile(folder / f"{name}.bin", dtype, self.seq_length, lengths=lengths, groups=groups)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        return PreparedText(
            train=files["train"],
            heldout=files["heldout"],
            tokenizer_file=folder / "tokenizer.json",
            seq_length=self.seq_length,
            vocab_size=meta["vocab_size"],
            special_ids=special_ids(tokenizer, special_tokens),
            line_ends=line_ends(tokenizer),
            groups=tuple(meta["groups"]),
        )

    def _too_short(self, num_tokens: dict[str, int]) -> Iterator[str]:
        for name, what, more in (
            ("train", "to train on", ""),
            ("heldout", "held out for evaluation", " or raise data.eval_fraction"),
        ):
            if num_tokens[name] < self.seq_length:
                fault = f"data: {num_tokens[name]} tokens {what}, fewer than one sequence of {self.seq_length}"
                yield f"{fault} · fix: add text, lower data.seq_length{more}"

    def _key(self, corpus: Corpus, special_tokens: Sequence[str], given: Tokenizer | None) -> str:
        """Returns a hash of what the tokens depend on: content, split, groups and vocabulary."""
        parts = {
            name: [(document.digest, document.span, document.group) for document in found]
            for name, found in (("train", corpus.train), ("heldout", corpus.heldout))
        }
        tokenizer = given.to_str() if given else self.vocab_size
        described = json.dumps([_FORMAT, tokenizer, list(special_tokens), parts])
        return hashlib.sha256(described.encode()).hexdigest()[:16]

    def _write(
        self, folder: Path, corpus: Corpus, special_tokens: Sequence[str], given: Tokenizer | None, report: Report
    ) -> None:
        tokenizer = given
        if tokenizer is None:
            num_bytes = sum(document.num_bytes for document in corpus.train)
            with report.progress("training the tokenizer", num_bytes) as advance:
                tokenizer = train_tokenizer(corpus.train, self.vocab_size, special_tokens, advance)
        tokenizer.save(str(folder / "tokenizer.json"))
        splits: dict[str, tuple[Document, ...]] = {"train": corpus.train, "heldout": corpus.heldout}
        groups = sorted({document.group for found in splits.values() for document in found})
        num_tokens = {}
        with report.progress("tokenizing", corpus.num_bytes) as advance:
            for name, found in splits.items():
                lengths = write_tokens(folder / f"{name}.bin", found, tokenizer, advance)
                rows = [(n, groups.index(document.group)) for n, document in zip(lengths, found, strict=True)]
                np.save(folder / f"{name}.documents.npy", np.array(rows, np.int64).reshape(-1, 2))
                num_tokens[name] = sum(lengths)
        vocab_size = tokenizer.get_vocab_size()
        meta = {
            "vocab_size": vocab_size,
            "dtype": token_dtype(vocab_size).name,
            "num_tokens": num_tokens,
            "groups": groups,
        }
        (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
