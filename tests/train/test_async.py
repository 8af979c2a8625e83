"""Snapshots that are written while training continues: the same files, and never half of one under its name."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.small_run import rows_of, same_weights, train

from graphckpt.train.snapshot import folder as snapshot
from graphckpt.train.snapshot.folder import SnapshotWriteError
from graphckpt.train.snapshot.weights import read_weights

ASYNC = "train.checkpointer.async_save=True"


def test_the_files_are_those_of_a_run_that_waits(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train("train.output_dir=waits") == 0
    threads = set()
    write = snapshot.write

    def noted(folder: Path, **parts: Any) -> None:
        threads.add(threading.current_thread().name)
        write(folder, **parts)

    monkeypatch.setattr(snapshot, "write", noted)
    assert train("train.output_dir=goes on", ASYNC) == 0
    assert threads == {"snapshot_0"}
    waits, goes_on = place / "waits", place / "goes on"
    assert [path.name for path in sorted(goes_on.iterdir())] == [path.name for path in sorted(waits.iterdir())]
    assert (goes_on / "last_checkpoint").read_text() == "model_final\n"
    assert rows_of(goes_on) == rows_of(waits)
    assert same_weights(waits, goes_on)
    for name in ("model_0000003", "model_0000007", "model_best"):
        one, other = read_weights(waits / name), read_weights(goes_on / name)
        assert all(torch.equal(one[key], other[key]) for key in one)
        assert snapshot.check(goes_on / name)["iteration"] == snapshot.check(waits / name)["iteration"]
        states = [snapshot.read_state(folder / name, "graph") for folder in (waits, goes_on)]
        assert str(states[0]) == str(states[1])


def test_a_full_disk_is_told_and_the_next_one_is_written_but_the_last_one_has_to_be(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = snapshot.write

    def full(folder: Path, **parts: Any) -> None:
        if folder.name in {"model_0000003", "model_best"} or folder.parent.name == "full":
            raise SnapshotWriteError(f"{folder}: No space left on device")
        write(folder, **parts)

    monkeypatch.setattr(snapshot, "write", full)
    assert train(ASYNC) == 0
    assert {path.name for path in (place / "out").glob("model_*")} == {"model_0000007", "model_final"}
    out = capsys.readouterr().out
    assert "model_0000003: No space left on device · the snapshot before this one is missing" in out
    assert "saved model_0000003" not in out
    assert "saved model_final in" in out
    assert train(ASYNC, "train.output_dir=full") == 2
    assert "the final state could not be saved · fix: make room" in capsys.readouterr().err
    assert not (place / "full" / "last_checkpoint").exists()
