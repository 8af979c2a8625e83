"""Two processes and one output folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from helpers.small_run import train, trainer_of

from graphckpt.errors import ConfigError
from graphckpt.train.loop import HookBase, Loop
from graphckpt.train.snapshot.saved_run import FolderLock

pytestmark = pytest.mark.usefixtures("place")

BRIEF = ["train.train_iter=1", "train.evaluation.enabled=False"]

_HOLDERS = """
import os, signal, sys
from pathlib import Path
from graphckpt.errors import ConfigError
from graphckpt.train.snapshot.saved_run import FolderLock
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
for folder in sys.stdin:
    if os.fork() == 0:
        lock = FolderLock(Path(folder.strip()))
        try:
            lock.acquire()
            lock.sign()
        except ConfigError:
            print(0, flush=True)
            os._exit(0)
        print(os.getpid(), flush=True)
        signal.pause()
"""


@pytest.fixture(scope="module")
def hold() -> Iterator[Callable[[Path], int]]:
    """Has another process lock a folder until it is killed, and returns its number; 0 if it is locked already.

    These processes are children of one that has imported what they need, which takes seconds.
    """
    words = [sys.executable, "-c", _HOLDERS]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def hold(folder: Path) -> int:
            process.stdin.write(f"{folder}\n")
            process.stdin.flush()
            return int(process.stdout.readline())

        yield hold
        process.stdin.close()


def end(number: int) -> None:
    """Kills a process, and waits until it is gone."""
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(number, signal.SIGKILL)
            time.sleep(0.005)


@pytest.fixture
def other(place: Path, hold: Callable[[Path], int]) -> Iterator[int]:
    """A process that holds the lock of ``out``."""
    (place / "out").mkdir()
    number = hold(place / "out")
    assert number > 0
    yield number
    end(number)


@pytest.mark.multi_process
def test_the_second_process_is_told_which_is_the_first_until_that_is_killed(
    place: Path, other: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "out" / "log.txt").write_text("of the first\n")
    (place / "out" / "config.yaml").write_text("of: the first\n")
    for words in ([], ["--resume"]):
        assert train(*words) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: train.output_dir: out: process {other} on ")
        assert f"is training in this folder · fix: wait until it ends, or end it (kill {other} " in error
        assert len(error.splitlines()) == 1
    assert (place / "out" / "log.txt").read_text() == "of the first\n"
    assert (place / "out" / "config.yaml").read_text() == "of: the first\n"
    end(other)
    assert (place / "out" / "run.lock").exists()
    assert train(*BRIEF, "train.overwrite=True") == 0


@pytest.mark.multi_process
def test_evaluation_may_look_on(place: Path, other: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("train.output_dir=good", *BRIEF) == 0
    assert train("--eval-only", "train.load_weight=good/model_final") == 0
    assert train("--eval-only") == 2
    assert "nothing to evaluate: train.output_dir: out holds no last_checkpoint" in capsys.readouterr().err


@pytest.mark.multi_process
@pytest.mark.parametrize("is_good", [True, False])
def test_a_run_lets_others_in_once_it_has_ended(place: Path, hold: Callable[[Path], int], is_good: bool) -> None:
    def is_free() -> bool:
        number = hold(place / "out")
        if number:
            end(number)
        return number > 0

    class Looks(HookBase):
        is_free = None

        def before_step(self, loop: Loop) -> None:
            self.is_free = is_free()
            with pytest.raises(ConfigError, match=f"process {os.getpid()} on .* is training in this folder"):
                trainer_of("out", "train.overwrite=True").train()
            if not is_good:
                raise OSError("the machine is gone")

    with nullcontext() if is_good else pytest.raises(OSError, match="the machine is gone"):
        trainer_of("out", *BRIEF, hooks=(looks := Looks(),)).train()
    assert looks.is_free is False
    assert is_free()


def test_a_file_system_without_locks_stops_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    FolderLock(tmp_path).acquire()


@pytest.mark.multi_process
def test_a_full_disk_locks_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hold: Callable[[Path], int]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        first = FolderLock(tmp_path)
        first.acquire()
        first.sign()
    assert hold(tmp_path) == 0
    first.release(discard=False)
    number = hold(tmp_path)
    assert number > 0
    end(number)
