"""Tokens: trained once, cached whole or not at all, read in a fixed order."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from graphckpt.train.data.documents import DataError
from graphckpt.train.data.samples import ShuffledOrder
from graphckpt.train.data.text_data import TextData
from graphckpt.train.output import Report

_WORDS = ["the", "step", "keeps", "what", "a", "block", "needs", "and", "runs", "the", "rest", "again", "for", "it"]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    generator = random.Random(0)
    for index in range(20):
        words = " ".join(generator.choices(_WORDS, k=400))
        (folder / f"{index}.txt").write_text(f"text {index}: {words}\n", encoding="utf-8")
    return folder


@pytest.fixture
def data(texts: Path, tmp_path: Path) -> Callable[..., TextData]:
    fields = {"paths": str(texts), "vocab_size": 300, "seq_length": 16, "eval_fraction": 0.2}
    return lambda **more: TextData(**{**fields, "cache_dir": str(tmp_path / "cache"), **more})


def _folders(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache").iterdir())


def test_tokens_say_the_text_again_and_heldout_text_is_nowhere_in_the_training_tokens(
    data: Callable[..., TextData], texts: Path, quiet: Report
) -> None:
    prepared = data().prepare(quiet)
    tokenizer = Tokenizer.from_file(str(prepared.tokenizer_file))
    decoded = []
    for file in (prepared.train, prepared.heldout):
        rows = file.batch(range(len(file)))
        assert rows.dtype.is_signed
        assert rows.shape == (len(file), 16)
        decoded.append(tokenizer.decode(rows.flatten().tolist(), skip_special_tokens=False))
    train, heldout = decoded
    documents = {*train.split("<|endoftext|>"), *heldout.split("<|endoftext|>")}
    written = {path.read_text(encoding="utf-8") for path in texts.iterdir()}
    assert len(written & documents) >= 18  # of 20: the last document of each file loses the end that fills no sequence
    assert all((text[:60] in train) != (text[:60] in heldout) for text in written)
    assert tokenizer.token_to_id("<|endoftext|>") == 0


def test_cached_tokens_are_read_without_the_functions_of_arrow_which_take_long_to_import(
    data: Callable[..., TextData], quiet: Report
) -> None:
    folder = data().prepare(quiet).tokenizer_file.parent
    tokens = f"open_tokens(Path({str(folder)!r}), 16, [])"
    code = f"import sys; from graphckpt.train.data.tokens import *; {tokens}.train.read(0, 3)"
    subprocess.run([sys.executable, "-c", f"{code}; sys.exit('pyarrow.compute' in sys.modules)"], check=True)


def test_cache_is_used_again_and_keyed_by_content_and_vocabulary(
    data: Callable[..., TextData], texts: Path, tmp_path: Path, quiet: Report
) -> None:
    first = data().prepare(quiet)
    stamp = first.tokenizer_file.stat().st_mtime_ns
    assert data(seq_length=8).prepare(quiet).tokenizer_file.stat().st_mtime_ns == stamp
    assert len(_folders(tmp_path)) == 1
    data(vocab_size=280).prepare(quiet)
    assert len(_folders(tmp_path)) == 2
    (texts / "0.txt").write_text("something else " * 100, encoding="utf-8")
    data().prepare(quiet)
    assert len(_folders(tmp_path)) == 3


def test_broken_cache_is_made_again(data: Callable[..., TextData], quiet: Report) -> None:
    folder = data().prepare(quiet).tokenizer_file.parent
    whole = {name: (folder / name).read_bytes() for name in ("train.arrow", "heldout.arrow", "tokenizer.json")}
    for name, content in whole.items():
        (folder / name).unlink()
        if name.endswith(".arrow"):
            (folder / name).write_bytes(content[:-10])
        assert data().prepare(quiet).tokenizer_file.parent == folder
        assert {name: (folder / name).read_bytes() for name in whole} == whole


def test_interrupted_making_leaves_nothing(
    data: Callable[..., TextData], tmp_path: Path, quiet: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("graphckpt.train.data.text_data.write_tokens", interrupt)
    with pytest.raises(KeyboardInterrupt):
        data().prepare(quiet)
    assert _folders(tmp_path) == []


def test_default_cache_follows_the_environment(
    data: Callable[..., TextData], tmp_path: Path, quiet: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    prepared = data(cache_dir=None).prepare(quiet)
    assert prepared.tokenizer_file.is_relative_to(tmp_path / "xdg" / "graphckpt")


def test_a_folder_for_the_cache_needs_no_home(
    data: Callable[..., TextData], quiet: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pathlib.Path.home", lambda: pytest.fail("a user without one"))
    assert data().prepare(quiet).vocab_size


def test_faults(data: Callable[..., TextData], tmp_path: Path, quiet: Report) -> None:
    with pytest.raises(DataError) as caught:
        data(seq_length=100_000).prepare(quiet)
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    assert "tokens to train on, fewer than one sequence of 100000 · fix: add text, lower data.seq_length" in lines[0]
    assert "tokens held out for evaluation" in lines[1]
    with pytest.raises(DataError, match=r"data\.vocab_size: expected 257 or more, one for each byte, got 10"):
        data(vocab_size=10).prepare(quiet)
    blocked = tmp_path / "a_file"
    blocked.touch()
    with pytest.raises(DataError, match=r"data\.cache_dir: .*a_file.* · fix: set data\.cache_dir"):
        data(cache_dir=str(blocked / "below")).prepare(quiet)


def test_order_is_fixed_by_the_seed_and_sees_all_once_an_epoch() -> None:
    order = ShuffledOrder(num_sequences=50, seed=3)
    taken = np.concatenate([order.take(start=start, count=20) for start in range(0, 100, 20)])
    assert sorted(taken[:50]) == sorted(taken[50:]) == list(range(50))
    assert not np.array_equal(taken[:50], taken[50:])
    assert not np.array_equal(taken[:50], np.arange(50))
    again = ShuffledOrder(num_sequences=50, seed=3)
    assert np.array_equal(again.take(start=37, count=45), taken[37:82])  # no state: it can start anywhere
    assert not np.array_equal(ShuffledOrder(num_sequences=50, seed=4).take(start=0, count=50), taken[:50])
    assert len(ShuffledOrder(num_sequences=3, seed=0).take(start=0, count=10)) == 10
