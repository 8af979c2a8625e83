"""Two processes and one output folder."""

# ruff: noqa: F811 - pytest asks for the imported fixture by its name

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import textwrap

import pytest
from small_run import place, train  # noqa: F401 - a fixture

from graphckpt.config.run import trainer_from
from graphckpt.errors import ConfigError
from graphckpt.train import lock
from graphckpt.train.lock import FolderLock

_HOLDER = """
import sys
from pathlib import Path
from graphckpt.train.lock import FolderLock
lock = FolderLock(Path("out"))
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other(place):
    """A process that holds the lock of ``out`` until its input ends."""
    (place / "out").mkdir()
    words = [sys.executable, "-c", textwrap.dedent(_HOLDER)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


@pytest.mark.multi_process
def test_the_second_process_is_told_which_is_the_first_and_harms_nothing(place, other, capsys):
    (place / "out" / "log.txt").write_text("of the first\n")
    (place / "out" / "config.yaml").write_text("of: the first\n")
    for words in ([], ["--resume"]):
        assert train(*words) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: train.output_dir: out: process {other.pid} on ")
        assert f"is training in this folder · fix: wait until it ends, or end it (kill {other.pid} " in error
        assert len(error.splitlines()) == 1
    assert (place / "out" / "log.txt").read_text() == "of the first\n"
    assert (place / "out" / "config.yaml").read_text() == "of: the first\n"


@pytest.mark.multi_process
def test_a_killed_process_leaves_no_lock(place, other):
    with pytest.raises(ConfigError, match="is training in this folder"):
        trainer_from("tiny.py")
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    assert (place / "out" / "run.lock").exists()
    assert trainer_from("tiny.py") is not None


@pytest.mark.multi_process
def test_evaluation_may_look_on(place, other):
    assert trainer_from("tiny.py", eval_only=True) is not None


@pytest.mark.multi_process
def test_a_finished_run_lets_others_in_and_so_does_one_that_is_forgotten(place):
    def is_free():
        code = "from graphckpt.train.lock import *; FolderLock(Path('out')).acquire()"
        return subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0

    first = trainer_from("tiny.py", ["train.train_iter=1", "train.evaluation.enabled=False"])
    assert not is_free()
    second = trainer_from("tiny.py")  # a notebook's cell, run again
    del second
    gc.collect()
    assert not is_free()
    first.train()
    assert is_free()
    third = trainer_from("tiny.py")
    assert not is_free()
    del third
    gc.collect()
    assert is_free()


def test_what_a_file_system_cannot_do_stops_nobody(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", unsupported)
    FolderLock(tmp_path).acquire()


def test_a_full_disk_locks_all_the_same(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        first = FolderLock(tmp_path)
        first.acquire()
    with pytest.raises(ConfigError, match="another process is training in this folder"):
        FolderLock(tmp_path).acquire()
    first.release()
    FolderLock(tmp_path).acquire()
