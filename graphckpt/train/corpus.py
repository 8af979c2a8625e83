"""Finds text files, and says by their content which are held out. Knows nothing of tokens."""

from __future__ import annotations

import codecs
import hashlib
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from graphckpt.errors import GraphckptError

_BLOCK_BYTES = 1 << 20  # a text is read in blocks of this size, so that no file has to fit into memory
_SNIFF_BYTES = 8192  # a file with a NUL in its first bytes is no text; what git and grep look at too
_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    | {"encodings", "pydoc_data"}  # generated tables, a tenth of the bytes
)


@final
class DataError(GraphckptError, ValueError):
    """There is no text to train on, or not enough of it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A file, or the byte range of a file, that is trained on or evaluated on as one document."""

    path: Path
    digest: str
    """SHA-256 of the whole file, in hex digits."""
    start: int
    stop: int
    """The range, in bytes; ``stop`` is outside of it."""

    @property
    def num_bytes(self) -> int:
        """Length of the range."""
        return self.stop - self.start

    def texts(self) -> Iterator[str]:
        """Yields the text in order, a block at a time; a byte that is no UTF-8 becomes U+FFFD."""
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
    """The parts to train on and those held out, each in an order that depends on content alone."""

    train: tuple[Part, ...]
    heldout: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.num_bytes for part in (*self.train, *self.heldout))


def read_corpus(paths: Sequence[str] | None, *, eval_fraction: float, max_bytes: int | None = None) -> Corpus:
    """Reads which text there is.

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
    parts = _subset(_distinct(found), max_bytes)
    if not parts:
        where = "the standard library" if paths is None else ", ".join(paths) or "an empty list"
        raise DataError(f"data.paths: no text in {where} · fix: name text files, or folders that hold some")
    parts.sort(key=lambda part: part.digest)
    if len(parts) == 1:
        return _cut(parts[0], eval_fraction)
    count = sum(int(part.digest[:8], 16) < eval_fraction * 16**8 for part in parts)
    count = min(max(count, 1), len(parts) - 1)  # a small corpus, too, has both
    return Corpus(train=tuple(parts[count:]), heldout=tuple(parts[:count]))


def _standard_library() -> Iterator[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not _SKIPPED.intersection(path.relative_to(root).parts):
            yield path


def _user_files(paths: Iterable[str]) -> Iterator[Path]:
    for name in paths:
        path = Path(name).expanduser()
        if path.is_dir():
            below = (file for file in sorted(path.rglob("*")) if file.is_file())
            yield from (file for file in below if not _is_hidden(file.relative_to(path)) and _is_text(file))
        elif path.is_file():
            yield path
        else:
            raise DataError(f"data.paths: {name}: no such file or folder")


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _is_text(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return b"\0" not in file.read(_SNIFF_BYTES)
    except OSError as error:
        raise DataError(f"data.paths: {path}: {error.strerror}") from error


def _distinct(paths: Iterable[Path]) -> list[Part]:
    parts: dict[str, Part] = {}
    for path in paths:
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                num_bytes = file.tell()
        except OSError as error:
            raise DataError(f"data.paths: {path}: {error.strerror}") from error
        if num_bytes:
            parts.setdefault(digest, Part(path=path, digest=digest, start=0, stop=num_bytes))
    return list(parts.values())


def _subset(parts: list[Part], max_bytes: int | None) -> list[Part]:
    if max_bytes is None:
        return parts
    taken: list[Part] = []
    left = max_bytes
    for part in sorted(parts, key=lambda part: part.digest[::-1]):  # not the order that decides what is held out
        if left <= 0:
            break
        taken.append(part)
        left -= part.num_bytes
    return taken


def _cut(part: Part, eval_fraction: float) -> Corpus:
    """Cuts the only file at the line end nearest after ``1 - eval_fraction`` of it."""
    cut = int(part.num_bytes * (1 - eval_fraction))
    with part.path.open("rb") as file:
        file.seek(cut)
        line = file.readline(_BLOCK_BYTES)
    if line.endswith(b"\n") and cut + len(line) < part.stop:
        cut += len(line)
    cut = min(max(cut, 1), part.stop - 1)
    return Corpus(
        train=(Part(path=part.path, digest=part.digest, start=0, stop=cut),),
        heldout=(Part(path=part.path, digest=part.digest, start=cut, stop=part.stop),),
    )
