"""Which text there is, and which of it is held out."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from graphckpt.train.data.documents import Corpus, DataError, Document, read_files, split_documents
from graphckpt.train.data.text_data import TextData
from graphckpt.train.output import Report


def _names(documents: Iterable[Document]) -> set[str]:
    return {document.source.name for document in documents}


def read_corpus(paths: list[str] | None, **options: Any) -> Corpus:
    return split_documents(read_files(paths), **options)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    folder = tmp_path / "library"
    for index in range(60):
        file = folder / f"shelf{index % 3}" / f"{index}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"text number {index}\n" * (index + 1), encoding="utf-8")
    return folder


def test_heldout_files_are_disjoint_and_fixed_by_content_and_a_copy_counts_once(library: Path, tmp_path: Path) -> None:
    corpus = read_corpus([str(library)], eval_fraction=0.2)
    train, heldout = _names(corpus.train), _names(corpus.heldout)
    assert not train & heldout
    assert len(train | heldout) == 60
    assert 5 <= len(heldout) <= 20
    (library / "copy.txt").write_bytes((library / "shelf0" / "0.txt").read_bytes())
    assert read_corpus([str(library)], eval_fraction=0.2).num_bytes == corpus.num_bytes
    (library / "copy.txt").unlink()
    moved = library.rename(tmp_path / "elsewhere")
    (moved / "new.txt").write_text("one more", encoding="utf-8")
    again = read_corpus([str(moved)], eval_fraction=0.2)
    assert _names(again.heldout) - {"new.txt"} == heldout
    assert _names(again.train) - {"new.txt"} == train


def test_only_file_is_cut_at_a_line_and_nothing_is_lost(tmp_path: Path) -> None:
    file = tmp_path / "only.txt"
    file.write_text("".join(f"line {n} äöü\n" for n in range(1000)), encoding="utf-8")
    corpus = read_corpus([str(file)], eval_fraction=0.1)
    train, heldout = ("".join(part.texts()) for part in (*corpus.train, *corpus.heldout))
    assert train + heldout == file.read_text(encoding="utf-8")
    assert train.endswith("\n")
    assert 0.08 < len(heldout) / len(train + heldout) < 0.12


def test_two_files_are_one_for_each(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text(name * 100, encoding="utf-8")
    for fraction in (0.0001, 0.9999):
        corpus = read_corpus([str(tmp_path)], eval_fraction=fraction)
        assert (len(corpus.train), len(corpus.heldout)) == (1, 1)


def test_folders_yield_text_alone(tmp_path: Path) -> None:
    (tmp_path / "text.md").write_text("text", encoding="utf-8")
    (tmp_path / "more.txt").write_text("more", encoding="utf-8")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "empty.txt").touch()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden", encoding="utf-8")
    corpus = read_corpus([str(tmp_path)], eval_fraction=0.5)
    assert _names((*corpus.train, *corpus.heldout)) == {"text.md", "more.txt"}


def test_bytes_that_are_no_utf8_become_marks(tmp_path: Path) -> None:
    file = tmp_path / "latin.txt"
    file.write_bytes(b"caf\xe9 " * 10 + "é".encode() * 3)
    corpus = read_corpus([str(file)], eval_fraction=0.1)
    assert "".join(corpus.train[0].texts()).startswith("caf� ")


def test_text_across_blocks_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "long.txt"
    text = "ä" * (3 << 19) + "\n" + "end" * 1000  # 3 MiB: the first block ends within a character's bytes or not
    file.write_text("x" + text, encoding="utf-8")
    corpus = read_corpus([str(file)], eval_fraction=0.0005)
    parts = (*corpus.train, *corpus.heldout)
    assert "".join(text for part in parts for text in part.texts()) == "x" + text


def test_max_bytes_takes_a_fixed_subset(library: Path) -> None:
    some = read_corpus([str(library)], eval_fraction=0.2, max_bytes=5000)
    more = read_corpus([str(library)], eval_fraction=0.2, max_bytes=9000)
    everything = read_corpus([str(library)], eval_fraction=0.2)
    assert 5000 <= some.num_bytes < 6500 < more.num_bytes < everything.num_bytes
    assert _names((*some.train, *some.heldout)) < _names((*more.train, *more.heldout))
    assert _names(some.heldout) <= _names(everything.heldout)


def test_standard_library_without_tests_and_tables() -> None:
    corpus = read_corpus(None, eval_fraction=0.05)
    parts = (*corpus.train, *corpus.heldout)
    assert corpus.num_bytes > 5_000_000
    assert len(corpus.heldout) > 5
    assert not any({"test", "tests", "site-packages", "encodings"} & set(part.source.parts) for part in parts)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["no/such"], r"data\.paths: no/such: no such file or folder"),
        ([], r"data\.paths: no text in an empty list · fix: name text files"),
        (["empty"], r"data\.paths: no text in empty · fix: name text files"),
        ("picture.png", r"data\.paths: no text in picture\.png · fix: name text files"),
    ],
)
def test_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: Report, paths: Any, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "nothing.txt").touch()
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    with pytest.raises(DataError, match=message):
        TextData(paths=paths).prepare(quiet)
