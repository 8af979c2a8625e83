"""Files that are replaced as one, and appended on a disk that is full."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from graphckpt.train import output
from graphckpt.train.output import AppendFile, cut_log, cut_metrics, replacing, write_text


class _Killed(BaseException):
    """Ends the writer where it is."""


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), _Killed()])
@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_file_is_the_old_one_until_the_new_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any, call: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("old: 1\n")

    def fails(*args: Any, **kwargs: Any) -> None:
        raise error

    if call == "write":
        monkeypatch.setattr(Path, "write_text", fails)
    else:
        monkeypatch.setattr(os, call, fails)
    with pytest.raises(type(error)):
        write_text(path, "new: 2\n")
    monkeypatch.undo()
    assert {found.name: found.read_text() for found in tmp_path.iterdir()} == {"config.yaml": "old: 1\n"}


def test_a_file_half_written_by_another_library_is_not_put_in_place(tmp_path: Path) -> None:
    path = tmp_path / "step.png"
    path.write_bytes(b"old")

    def draw() -> None:
        with replacing(path) as fresh:
            assert fresh.suffix == ".png"
            fresh.write_bytes(b"half")
            raise ValueError("draw")

    with pytest.raises(ValueError, match="draw"):
        draw()
    assert [found.name for found in tmp_path.iterdir()] == ["step.png"]
    assert path.read_bytes() == b"old"


def test_a_cut_history_is_the_old_one_until_the_new_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.json"
    path.write_text('{"iteration": 1}\n{"iteration": 9}\n')

    def fails(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(output, "sync", fails)
    with pytest.raises(OSError, match="Input/output error"):
        cut_metrics(path, 1)
    assert path.read_text() == '{"iteration": 1}\n{"iteration": 9}\n'


def test_lines_that_a_full_disk_refused_come_with_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, complaints = AppendFile(tmp_path / "log.txt"), []
    file.append("a\n", complaints.append)
    opened = type(tmp_path).open

    class HalfFull:
        def __init__(self, file: Any) -> None:
            self.file = file
            self.is_full = False

        def write(self, data: Any) -> Any:
            if self.is_full:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.is_full = True
            return self.file.write(data[:1])

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    with monkeypatch.context() as patch:
        patch.setattr(type(tmp_path), "open", lambda *args, **kwargs: HalfFull(opened(*args, **kwargs)))
        file.append("bcd\n", complaints.append)
        file.append("é\n", complaints.append)
    assert (tmp_path / "log.txt").read_text() == "a\n"
    file.append("z\n", complaints.append)
    what = f"{file.path}: No space left on device; its lines wait until they can be written"
    assert complaints == [what]
    assert (tmp_path / "log.txt").read_text(encoding="utf-8") == "a\nbcd\né\nz\n"


def test_history_beyond_the_snapshot_is_dropped(tmp_path: Path) -> None:
    metrics, log = tmp_path / "metrics.json", tmp_path / "log.txt"
    metrics.write_text('{"iteration": 3}\n{"iteration": 7}\n{"iteration": 8}\n{"iterat')
    log.write_text("[x]: model\n[x]: eta: 0  iteration: 8/9  total\n[x]: eta: 0  iteration: 9/9  total\n[x]: a table")
    cut_metrics(metrics, 7)
    cut_log(log, 7)
    assert metrics.read_text() == '{"iteration": 3}\n{"iteration": 7}\n'
    assert log.read_text() == "[x]: model\n[x]: eta: 0  iteration: 8/9  total\n[x]: a table\n"
    cut_log(tmp_path / "none", 7)
