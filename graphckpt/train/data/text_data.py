"""Tokenized text, prepared once and cached: the section ``data`` of a config."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

from tokenizers import Tokenizer

from graphckpt.errors import ConfigError
from graphckpt.train.data.documents import Corpus, DataError, read_dataset, read_files, split_documents
from graphckpt.train.data.samples import Opened
from graphckpt.train.data.tokens import (
    SMALLEST_VOCAB,
    PreparedText,
    new_folder,
    open_tokens,
    read_tokenizer,
    train_tokenizer,
    write_tokens,
)
from graphckpt.train.output import Report
from graphckpt.units import format_bytes

_KEY_VERSION = 2  # of the hash that names cached tokens; snapshots hold it, so another one refuses to resume them
_FORMATS = ("csv", "json", "parquet", "text")  # of files that ``datasets`` reads by the name of their format


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
    """A Hugging Face data set by its name, instead of ``paths``, such as ``"Salesforce/wikitext"``. Or the format of
    ``paths``, of which each row is a text: ``"csv"``, ``"json"``, ``"parquet"``, or ``"text"`` for lines."""
    dataset_config: str | None = None
    """Which of its configurations, such as ``"wikitext-2-raw-v1"``."""
    dataset_split: str = "train"
    """Its split; a share of it is held out, as of any text."""
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
        if self.dataset is not None and self.paths is not None and self.dataset not in _FORMATS:
            yield f"dataset: {self.dataset!r}, and data.paths is set too · fix: set one of them to null"
        if self.dataset in _FORMATS and self.paths is None:
            yield f"dataset: {self.dataset!r} is the format of files · fix: name them in data.paths"

    def open(self, task: Any, *, seed: int, report: Report) -> Opened:
        """Prepares the text and creates the samples of ``task``.

        Raises:
            ConfigError: ``task`` does not support text.
            DataError: no text, too little of it, or the cache cannot be written.
        """
        if not hasattr(task, "samples"):
            fix = "use graphckpt.train.tasks.CausalLM or another task on text, or your own data"
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
            smallest = f"{SMALLEST_VOCAB + len(special_tokens)} or more, with one for {', '.join(special_tokens)} each"
            raise DataError(f"data.vocab_size: expected {smallest}, got {self.vocab_size}")
        corpus = self._corpus()
        counts = f"{len(corpus.train)} documents to train on, {len(corpus.heldout)} held out"
        report.line(f"data: {counts}, {format_bytes(corpus.num_bytes)}")
        user_tokenizer = read_tokenizer(self.tokenizer_file, special_tokens) if self.tokenizer_file else None
        if self.cache_dir:  # the only one for a user without a home
            cache = Path(self.cache_dir).expanduser()
        else:
            cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graphckpt"
        folder = cache / f"tokens-{self._key(corpus, special_tokens, user_tokenizer)}"
        text = open_tokens(folder, self.seq_length, special_tokens)
        if text is None:
            with new_folder(folder, lambda: open_tokens(folder, 1, special_tokens) is not None) as fresh:
                self._write(fresh, corpus, special_tokens, user_tokenizer, report)
            text = open_tokens(folder, self.seq_length, special_tokens)
            assert text is not None
        faults = [
            f"data: {tokens.num_tokens} tokens {what}, fewer than one sequence of {self.seq_length}"
            f" · fix: add text, lower data.seq_length{more}"
            for tokens, what, more in (
                (text.train, "to train on", ""),
                (text.heldout, "held out for evaluation", " or raise data.eval_fraction"),
            )
            if tokens.num_tokens < self.seq_length
        ]
        if faults:
            raise DataError("\n".join(faults))
        counts = f"{text.train.num_tokens:,} tokens to train on, {text.heldout.num_tokens:,} held out"
        report.line(f"data: {counts}, vocabulary of {text.vocab_size:,}")
        return text

    def _corpus(self) -> Corpus:
        paths = [self.paths] if isinstance(self.paths, str) else self.paths
        if self.dataset is None:
            documents = read_files(paths)
            where = "the standard library" if paths is None else ", ".join(paths) or "an empty list"
            where = f"data.paths: no text in {where}"
        else:
            documents = read_dataset(
                self.dataset,
                files=paths,
                config=self.dataset_config,
                split=self.dataset_split,
                text_column=self.text_column,
                label_column=self.label_column,
            )
            where = f"data.dataset: too few texts in column {self.text_column!r} of {self.dataset}"
        if not documents:
            raise DataError(f"{where} · fix: name text files, folders or a data set that hold some")
        return split_documents(documents, eval_fraction=self.eval_fraction, max_bytes=self.max_bytes)

    def _key(self, corpus: Corpus, special_tokens: Sequence[str], user_tokenizer: Tokenizer | None) -> str:
        """Returns a hash of what the tokens depend on: content, split, groups and vocabulary."""
        # Without seq_length: tokens are stored end to end, and are divided into sequences when they are read.
        parts = {
            name: [(document.digest, document.span, document.group) for document in documents]
            for name, documents in corpus._asdict().items()
        }
        tokenizer = user_tokenizer.to_str() if user_tokenizer else self.vocab_size
        described = json.dumps([_KEY_VERSION, tokenizer, list(special_tokens), parts])
        return hashlib.sha256(described.encode()).hexdigest()[:16]

    def _write(
        self,
        folder: Path,
        corpus: Corpus,
        special_tokens: Sequence[str],
        user_tokenizer: Tokenizer | None,
        report: Report,
    ) -> None:
        tokenizer = user_tokenizer
        if tokenizer is None:
            num_bytes = sum(document.num_bytes for document in corpus.train)
            with report.progress("training the tokenizer", num_bytes) as advance:
                tokenizer = train_tokenizer(corpus.train, self.vocab_size, special_tokens, advance)
        tokenizer.save(str(folder / "tokenizer.json"))
        groups = sorted({document.group for document in (*corpus.train, *corpus.heldout)})
        with report.progress("tokenizing", corpus.num_bytes) as advance:
            for name, documents in corpus._asdict().items():
                write_tokens(folder / f"{name}.arrow", documents, tokenizer, groups, advance)
