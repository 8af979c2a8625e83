"""Finds text files, and splits them by a hash of their content into training and held-out documents."""

from __future__ import annotations

import codecs
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, final

from graphckpt.errors import GraphckptError

_BLOCK_BYTES = 1 << 20  # a text is read in blocks of this size, so that no file has to fit into memory
_SNIFF_BYTES = 8192  # a file with a NUL byte at its start is binary, as for git and grep
_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    | {"encodings", "pydoc_data"}  # generated tables, a tenth of the bytes
)


@final
class DataError(GraphckptError, ValueError):
    """There is no data to train on, or not enough of it."""


class Document(Protocol):
    """A text that is in the training or in the held-out split as a whole."""

    @property
    def digest(self) -> str:
        """A hash of the content, in hex digits, which decides the split."""

    @property
    def group(self) -> str:
        """The class of the document, for classification."""

    @property
    def span(self) -> tuple[int, int]:
        """The byte range that is used."""

    @property
    def num_bytes(self) -> int:
        """Length of the text, in bytes."""

    def texts(self) -> Iterator[str]:
        """Yields the text in order."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart:
    """A file, or a byte range of a file, as one document."""

    path: Path
    digest: str
    """SHA-256 of the whole file, in hex digits."""
    start: int
    stop: int
    """The range, in bytes; ``stop`` is outside of it."""
    group: str = "."
    """The folder directly below the given one: the class of a document, for classification."""

    @property
    def span(self) -> tuple[int, int]:
        """The range, in bytes."""
        return self.start, self.stop

    @property
    def num_bytes(self) -> int:
        """Length of the range."""
        return self.stop - self.start

    def texts(self) -> Iterator[str]:
        """Yields the text in blocks; invalid UTF-8 becomes U+FFFD."""
        decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        with self.path.open("rb") as file:
            file.seek(self.start)
            left = self.num_bytes
            while left and (block := file.read(min(_BLOCK_BYTES, left))):
                left -= len(block)
                yield decode(block)
        yield decode(b"", final=True)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The training and held-out parts, each in an order that depends on content only."""

    train: tuple[Document, ...]
    heldout: tuple[Document, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.num_bytes for part in (*self.train, *self.heldout))


def read_corpus(paths: Sequence[str] | None, *, eval_fraction: float, max_bytes: int | None = None) -> Corpus:
    """Finds the text files.

    A file is held out or not by the hash of its content: that another is added, or this one moved, changes
    nothing. A copy of another file counts once. If the corpus is a single file, its end is held out.

    Args:
        paths: text files and folders of them; ``None`` is the source text of Python's standard library.
        eval_fraction: share of the files to hold out, between 0 and 1.
        max_bytes: if set, takes files, in an order fixed by their content, until there are so many bytes.

    Raises:
        DataError: a path does not exist or cannot be read, or there is no text.
    """
    found = _standard_library() if paths is None else _user_files(paths)
    parts = _distinct(found)
    where = "the standard library" if paths is None else ", ".join(paths) or "an empty list"
    return split(parts, eval_fraction=eval_fraction, max_bytes=max_bytes, where=f"data.paths: no text in {where}")


def split(documents: Sequence[Document], *, eval_fraction: float, max_bytes: int | None, where: str) -> Corpus:
    """Takes documents up to ``max_bytes`` and splits them, both by their content only.

    Raises:
        DataError: there are none, which ``where`` then says.
    """
    taken = _subset(documents, max_bytes)
    if not taken:
        raise DataError(f"{where} · fix: name text files, folders or a data set that hold some")
    if len(taken) == 1 and isinstance(taken[0], TextPart):
        return _cut(taken[0], eval_fraction)
    taken.sort(key=lambda document: document.digest)
    count = sum(int(document.digest[:8], 16) < eval_fraction * 16**8 for document in taken)
    count = min(max(count, 1), len(taken) - 1)  # both splits are non-empty, also of a small corpus
    return Corpus(train=tuple(taken[count:]), heldout=tuple(taken[:count]))


def _standard_library() -> Iterator[tuple[Path, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = set(folders) - _SKIPPED  # with all packages in one of them
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    yield from ((path, _group(path, root)) for path in sorted(found))


def _group(path: Path, root: Path) -> str:
    return next(iter(path.relative_to(root).parent.parts), ".")


def _user_files(paths: Iterable[str]) -> Iterator[tuple[Path, str]]:
    for name in paths:
        path = Path(name).expanduser()
        if path.is_dir():
            below = (file for file in sorted(path.rglob("*")) if file.is_file())
            for file in below:
                is_hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
                if not is_hidden and _is_text(file):
                    yield file, _group(file, path)
        elif path.is_file():
            yield path, "."
        else:
            raise DataError(f"data.paths: {name}: no such file or folder")


def _is_text(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return b"\0" not in file.read(_SNIFF_BYTES)
    except OSError as error:
        raise DataError(f"data.paths: {path}: {error.strerror}") from error


def _distinct(paths: Iterable[tuple[Path, str]]) -> list[TextPart]:
    parts: dict[str, TextPart] = {}
    for path, group in paths:
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                num_bytes = file.tell()
        except OSError as error:
            raise DataError(f"data.paths: {path}: {error.strerror}") from error
        if num_bytes:
            parts.setdefault(digest, TextPart(path=path, digest=digest, start=0, stop=num_bytes, group=group))
    return list(parts.values())


def _subset(documents: Sequence[Document], max_bytes: int | None) -> list[Document]:
    if max_bytes is None:
        return list(documents)
    taken: list[Document] = []
    left = max_bytes
    for document in sorted(documents, key=lambda document: document.digest[::-1]):  # not the order of the split
        if left <= 0:
            break
        taken.append(document)
        left -= document.num_bytes
    return taken


def _cut(part: TextPart, eval_fraction: float) -> Corpus:
    """Splits a single file at the first line end after ``1 - eval_fraction`` of it."""
    cut = int(part.num_bytes * (1 - eval_fraction))
    with part.path.open("rb") as file:
        file.seek(cut)
        line = file.readline(_BLOCK_BYTES)
    if line.endswith(b"\n") and cut + len(line) < part.stop:
        cut += len(line)
    cut = min(max(cut, 1), part.stop - 1)
    return Corpus(train=(replace(part, stop=cut),), heldout=(replace(part, start=cut),))
