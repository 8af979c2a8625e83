"""Documents to train on: found in text files or in a data set, and split by their content."""

from __future__ import annotations

import codecs
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, final

from graphckpt.errors import GraphckptError, did_you_mean, first_line
from graphckpt.extras import require

_BLOCK_BYTES = 1 << 20  # a text is decoded in blocks of this size, and so are its tokens: another size changes them
_SNIFF_BYTES = 8192  # a file with a NUL byte at its start is binary, as for git and grep
_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    | {"encodings", "pydoc_data"}  # generated tables, a tenth of the bytes
)


@final
class DataError(GraphckptError, ValueError):
    """Data to train on is missing, or too little."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A text that is in the training or in the held-out split as a whole."""

    digest: str
    """SHA-256 of the content, in hex digits, which decides the split."""
    span: tuple[int, int]
    """The bytes of the content that are used; the second number is that of the first byte after them."""
    group: str = "."
    """The class of the document, for classification: the folder directly below the given one, or a row's label."""
    source: Path | Callable[[], str]
    """The file, or the function that reads the row of a data set."""

    @property
    def num_bytes(self) -> int:
        return self.span[1] - self.span[0]

    def texts(self) -> Iterator[str]:
        if not isinstance(self.source, Path):
            yield self.source()
            return
        decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        with self.source.open("rb") as file:
            file.seek(self.span[0])
            left = self.num_bytes
            while left and (block := file.read(min(_BLOCK_BYTES, left))):
                left -= len(block)
                yield decode(block)
        # A character cut by the end of the span becomes U+FFFD; one cut by the end of a block does not.
        yield decode(b"", final=True)


class Corpus(NamedTuple):
    """The training and held-out documents, each in an order that depends on content only."""

    train: tuple[Document, ...]
    heldout: tuple[Document, ...]

    @property
    def num_bytes(self) -> int:
        return sum(document.num_bytes for document in (*self.train, *self.heldout))


def read_files(paths: Sequence[str] | None) -> list[Document]:
    """Returns the distinct texts in files and folders; ``None`` is the source text of Python's standard library."""
    documents: dict[str, Document] = {}
    for path, group in _standard_library() if paths is None else _user_files(paths):
        try:
            with path.open("rb") as file:
                is_text = b"\0" not in file.read(_SNIFF_BYTES)
                file.seek(0)
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                num_bytes = file.tell()
        except OSError as error:
            raise DataError(f"data.paths: {path}: {error.strerror}") from error
        if num_bytes and is_text:
            documents.setdefault(digest, Document(digest=digest, span=(0, num_bytes), group=group, source=path))
    return list(documents.values())


def _standard_library() -> Iterator[tuple[Path, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - _SKIPPED  # with all packages in one of them
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    yield from ((path, _group(path, root)) for path in sorted(paths))


def _user_files(paths: Iterable[str]) -> Iterator[tuple[Path, str]]:
    for name in paths:
        path = Path(name).expanduser()
        if path.is_dir():
            for file in sorted(file for file in path.rglob("*") if file.is_file()):
                if not any(part.startswith(".") for part in file.relative_to(path).parts):
                    yield file, _group(file, path)
        elif path.is_file():
            yield path, "."
        else:
            raise DataError(f"data.paths: {name}: no such file or folder")


def _group(path: Path, root: Path) -> str:
    return next(iter(path.relative_to(root).parent.parts), ".")


def read_dataset(
    name: str,
    *,
    files: Sequence[str] | None,
    config: str | None,
    split: str,
    text_column: str,
    label_column: str | None,
) -> list[Document]:
    """Returns the distinct rows with text of a Hugging Face data set, or of ``files`` in the format ``name``."""
    require("train", "datasets")
    from datasets import load_dataset  # noqa: PLC0415 - half a second, for those who need it

    try:
        rows = load_dataset(name, config, split=split, **({} if files is None else {"data_files": files}))
    except Exception as error:  # any error of the network, the disk or the code of the data set
        fix = "check data.dataset, data.dataset_config and data.dataset_split"
        raise DataError(f"data.dataset: {name!r}: {type(error).__name__}: {first_line(error)} · fix: {fix}") from error
    columns = {"text_column": text_column, "label_column": label_column}
    faults = [
        f"data.{key}: expected a column of the data set, got {column!r}{did_you_mean(column, rows.column_names)}"
        f" · fix: use one of {', '.join(rows.column_names)}"
        for key, column in columns.items()
        if column is not None and column not in rows.column_names
    ]
    if faults:
        raise DataError("\n".join(faults))
    names = getattr(rows.features.get(label_column), "names", None) if label_column else None
    documents: dict[str, Document] = {}
    for number, row in enumerate(rows):
        text, label = row[text_column], row[label_column] if label_column else "."
        if isinstance(text, str) and text.strip():
            raw = text.encode()
            digest, group = hashlib.sha256(raw).hexdigest(), str(names[label] if names else label)
            read = partial(_read_row, rows, number, text_column)  # which keeps the text in the data set
            documents.setdefault(digest, Document(digest=digest, span=(0, len(raw)), group=group, source=read))
    return list(documents.values())


def _read_row(rows: Any, number: int, column: str) -> str:
    text: str = rows[number][column]
    return text


def split_documents(documents: Sequence[Document], *, eval_fraction: float, max_bytes: int | None = None) -> Corpus:
    """Splits documents by their content, so that no other document and no name changes where one goes.

    At least one document is needed. Of a single file, the end is held out. With ``max_bytes``, documents are taken in
    an order fixed by their content until there are so many bytes.
    """
    subset = list(documents)
    if max_bytes is not None:
        # The split takes the lowest digests for evaluation. In the same order `max_bytes` would take those first, and
        # leave nothing to train on; the reversed digits are independent of it.
        subset.sort(key=lambda document: document.digest[::-1])
        starts = accumulate((document.num_bytes for document in subset), initial=0)
        subset = [document for document, start in zip(subset, starts, strict=False) if start < max_bytes]
    if len(subset) == 1 and isinstance(subset[0].source, Path):
        return _split_file(subset[0], subset[0].source, eval_fraction)
    # With eval_fraction 0.05 a document is held out if its digest is below 0ccccccc..., whatever else is there. So a
    # corpus that grows moves none from one split to the other.
    subset.sort(key=lambda document: document.digest)
    count = sum(int(document.digest[:8], 16) < eval_fraction * 16**8 for document in subset)
    count = min(max(count, 1), len(subset) - 1)  # both splits are non-empty, also of a small corpus
    return Corpus(train=tuple(subset[count:]), heldout=tuple(subset[:count]))


def _split_file(document: Document, path: Path, eval_fraction: float) -> Corpus:
    start, stop = document.span
    # Then on to the end of the line, unless it is longer than a block, or the last one.
    middle = int(stop * (1 - eval_fraction))
    with path.open("rb") as file:
        file.seek(middle)
        line = file.readline(_BLOCK_BYTES)
    if line.endswith(b"\n") and middle + len(line) < stop:
        middle += len(line)
    middle = min(max(middle, 1), stop - 1)
    return Corpus(train=(replace(document, span=(start, middle)),), heldout=(replace(document, span=(middle, stop)),))
