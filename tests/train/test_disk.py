"""A disk that is full: for a while, to the end, before the run."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from helpers.small_run import rows_of, same_weights, stopped, train

from graphckpt.train import output as files
from graphckpt.train.snapshot import folder as snapshot


def train_with_full_disk(monkeypatch: pytest.MonkeyPatch, first: int, last: int, *words: str) -> int:
    """Has calls number ``first`` to ``last`` of the writer of weights meet a full disk."""
    save, calls = snapshot.save_file, iter(range(100))

    def full(*args: Any, **kwargs: Any) -> None:
        if first <= next(calls) <= last:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "save_file", full)
        return train(*words)


def test_a_disk_that_is_full_costs_snapshots_and_the_end_of_the_run(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("train.output_dir=whole") == 0
    capsys.readouterr()
    assert train_with_full_disk(monkeypatch, 2, 4, "train.output_dir=for a while") == 0
    printed = capsys.readouterr().out
    assert printed.count("No space left on device · no snapshot was saved; training continues") == 3
    assert "for a while/model_0000007: No space left" in printed
    assert same_weights(place / "whole", place / "for a while")
    assert snapshot.check(place / "for a while" / "model_0000003")["done"] == 4
    assert not list((place / "for a while").glob(".*"))

    assert train_with_full_disk(monkeypatch, 2, 99) == 2
    assert "error: out: the final state could not be saved · fix: make room" in capsys.readouterr().err
    assert (place / "out" / "last_checkpoint").read_text() == "model_0000003\n"
    assert train("--resume") == 0
    assert same_weights(place / "whole", place / "out")
    assert rows_of(place / "whole") == rows_of(place / "out")


def test_a_disk_that_is_full_before_the_run_is_one_clear_error(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped("out", 3)
    capsys.readouterr()
    (place / "out" / "metrics.json").write_text("half a li")

    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(files, "write_text", full)
    assert train("--resume") == 2
    assert capsys.readouterr().err == (
        "error: train.output_dir: out: No space left on device"
        " · fix: name a folder that can be written, on a disk with room\n"
    )
