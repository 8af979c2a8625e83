"""A disk that is full: for a while, to the end, before the run."""

from __future__ import annotations

import errno

from helpers.small_run import rows_of, same_weights, stopped, train

from graphckpt.train import output as files
from graphckpt.train.snapshot import folder as snapshot


def test_a_disk_that_is_full_for_a_while_costs_snapshots_and_not_the_run(place, monkeypatch, capsys):
    assert train("train.output_dir=whole") == 0
    save, calls = snapshot.save_file, iter(range(100))

    def full_for_a_while(*args, **kwargs):
        if next(calls) in {2, 3, 4}:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(*args, **kwargs)

    monkeypatch.setattr(snapshot, "save_file", full_for_a_while)
    capsys.readouterr()
    assert train() == 0
    printed = capsys.readouterr().out
    assert printed.count("No space left on device · no snapshot was saved; training continues") == 3
    assert "out/model_0000007: No space left" in printed
    assert same_weights(place / "whole", place / "out")
    assert snapshot.check(place / "out" / "model_0000003")["done"] == 4
    assert not list((place / "out").glob(".*"))


def test_a_disk_that_stays_full_ends_in_an_error_and_the_last_good_snapshot_is_resumed(place, monkeypatch, capsys):
    assert train("train.output_dir=whole") == 0
    save, calls = snapshot.save_file, iter(range(100))

    def full(*args, **kwargs):
        if next(calls) >= 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "save_file", full)
        assert train() == 2
    assert "error: out: the final state could not be saved · fix: make room" in capsys.readouterr().err
    assert (place / "out" / "last_checkpoint").read_text() == "model_0000003\n"
    assert train("--resume") == 0
    assert same_weights(place / "whole", place / "out")
    assert rows_of(place / "whole") == rows_of(place / "out")


def test_a_disk_that_is_full_before_the_run_is_one_clear_error(place, monkeypatch, capsys):
    stopped("out", 3)
    capsys.readouterr()
    (place / "out" / "metrics.json").write_text("half a li")

    def full(path, text):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(files, "write_text", full)
    assert train("--resume") == 2
    assert capsys.readouterr().err == (
        "error: train.output_dir: out: No space left on device"
        " · fix: name a folder that can be written, on a disk with room\n"
    )
