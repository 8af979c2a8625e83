"""Runs a script in a process of its own, with a time limit."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter


@dataclass(frozen=True)
class Done:
    """How a process ended: its exit status, ``None`` after its time limit, and what it wrote."""

    code: int | None
    stdout: str
    stderr: str
    seconds: float


def run(words: list[str], seconds: float, *, is_forked: bool = False, leads: bool = False) -> Done:
    """Runs ``python`` with ``words``: a script, or ``-m`` and a module, and what it is called with.

    Args:
        words: as on the command line.
        seconds: what it may take; then it is killed.
        is_forked: forks this process, which spares the imports. For dry runs: CUDA does not survive a fork.
        leads: the process leads a group of its own, which is killed with it.
    """
    begin = perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        code = (_forked if is_forked else _started)(words, seconds, out, err, leads)
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in (out, err)]
    return Done(code, *texts, perf_counter() - begin)


def _started(words: list[str], seconds: float, out: Path, err: Path, leads: bool) -> int | None:
    with out.open("w") as stdout, err.open("w") as stderr:
        process = subprocess.Popen([sys.executable, *words], stdout=stdout, stderr=stderr, start_new_session=leads)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            _kill(process.pid, leads)
            process.wait()
            return None


def _forked(words: list[str], seconds: float, out: Path, err: Path, leads: bool) -> int | None:
    process = multiprocessing.get_context("fork").Process(target=_become, args=(words, out, err, leads))
    process.start()
    process.join(seconds)
    if process.is_alive() and process.pid is not None:
        _kill(process.pid, leads)
        process.join()
        return None
    return process.exitcode


def _kill(pid: int, leads: bool) -> None:
    (os.killpg if leads else os.kill)(pid, signal.SIGKILL)


def _become(words: list[str], out: Path, err: Path, leads: bool) -> None:
    if leads:
        os.setsid()
    for number, path in enumerate((out, err), start=1):
        with path.open("w") as file:
            os.dup2(file.fileno(), number)
    warnings.simplefilter("ignore")
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
    sys.stdout.flush()
