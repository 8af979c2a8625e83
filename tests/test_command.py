"""The console script ends in an orderly way whatever its output goes to, and writes no noise to stderr."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import graphckpt
from graphckpt.cli import main
from graphckpt.progress import CommandProgress

COMMAND = [sys.executable, "-m", "graphckpt", "--help"]


def test_a_closed_pipe_is_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ran = subprocess.run(COMMAND, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert ran.returncode in (0, 1)  # argparse may pass over the error; 120 is what Python returns by itself
    assert ran.stderr == ""


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_closed_stream_is_no_traceback(stream: str) -> None:
    closing = f'import runpy, sys; sys.{stream} = None; runpy.run_module("graphckpt", run_name="__main__")'
    ran = subprocess.run([sys.executable, "-c", closing, "--help"], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ("usage: graphckpt" in ran.stdout) is (stream == "stderr")


class InterruptedAsItEnds:
    """Python swallows what is raised here."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("has_more", [True, False])
def test_an_interrupt_in_a_destructor_is_not_lost(monkeypatch: pytest.MonkeyPatch, has_more: bool) -> None:
    swallowed = []
    monkeypatch.setattr("sys.unraisablehook", lambda ignored: swallowed.append(ignored.exc_type))

    def work() -> None:
        with CommandProgress() as progress:
            del [InterruptedAsItEnds()][:]
            assert swallowed == [KeyboardInterrupt]
            if has_more:
                progress.begin("more")
                pytest.fail("expected an interrupt before what follows")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # workers of pytest ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            work()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


CONFIG = ("--config-file", str(Path(__file__).parents[1] / "configs" / "quickstart.py"))
COMMANDS = {
    "train": ("train", *CONFIG, "--fast-dev-run"),
    "plan, absent device": ("plan", *CONFIG, "--device", "h200", "--memory-budget", "1GiB"),
    "plan, no plan fits": ("plan", *CONFIG, "--memory-budget", "1KiB"),
    "fit": ("fit", *CONFIG, "--device", "h200", "--batch-sizes", "1,8"),
}
PROGRESS = re.compile(r"planning, \d+ s: .*\n")


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_stderr_has_progress_and_errors_alone(name: str, tmp_path: Path) -> None:
    """What PyTorch and Triton print as a process ends is noise; `make newest` shows it for the newest releases."""
    command = [sys.executable, "-m", "graphckpt", *COMMANDS[name]]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    rest = PROGRESS.sub("", ran.stderr)
    if name == "plan, no plan fits":
        assert ran.returncode == 2
        assert re.fullmatch(r"error: memory_budget 1.00 KiB: no plan fits .*\n", rest)
    else:
        assert (ran.returncode, rest) == (0, "")


def test_an_unknown_command_is_named_with_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["trian", "--config-file", "quickstart.py"])
    assert "unknown command 'trian' · did you mean 'train'? · fix: use one of train, plan, " in capsys.readouterr().err


def test_dir_lists_public_names_alone() -> None:
    names = {name for name in dir(graphckpt) if not name.startswith("__")}
    assert names == set(graphckpt.__all__)
