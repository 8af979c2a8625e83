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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

# Asking whether there is a device then does not initialize CUDA, which no fork survives.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
FORKS = "BENCHMARKS_FORK"
"""The variable that is 1 if processes are forked from this one, which has imported what they need."""
_POLL_SECONDS = 0.5
_Started = tuple[int, Callable[[float | None], int | None]]
"""A process's id, and what waits for its exit status: for some seconds, or to the end."""


@dataclass(frozen=True)
class Done:
    """How a process ended: its exit status, ``None`` after its time limit, and what it wrote."""

    code: int | None
    stdout: str
    stderr: str
    seconds: float


def run(
    words: list[str],
    seconds: float,
    *,
    is_forked: bool | None = None,
    leads: bool = False,
    on_line: Callable[[str], None] = lambda line: None,
) -> Done:
    """Runs ``python`` with ``words``: a script, or ``-m`` and a module, and what it is called with.

    Args:
        words: as on the command line.
        seconds: what it may take; then it is killed.
        is_forked: forks this process, which spares the imports: as :data:`FORKS` says, unless this one has used CUDA.
        leads: the process leads a group of its own, which is killed with it.
        on_line: called with each line of its output, soon after it was written.
    """
    begin = perf_counter()
    is_forked = can_fork() if is_forked is None else is_forked
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        out.touch()
        pid, code_within = (_fork if is_forked else _start)(words, out, err, leads)
        rest = ""
        with out.open(encoding="utf-8", errors="replace") as lines:
            code, is_over = None, False
            while not is_over:
                left = seconds - (perf_counter() - begin)
                code = code_within(max(min(left, _POLL_SECONDS), 0))
                is_over = code is not None or left <= 0
                if is_over and code is None:
                    (os.killpg if leads else os.kill)(pid, signal.SIGKILL)
                    code_within(None)
                *whole, rest = (rest + lines.read()).split("\n")
                for line in whole:
                    on_line(line)
        if rest:
            on_line(rest)
        stdout, stderr = (path.read_text(encoding="utf-8", errors="replace") for path in (out, err))
    return Done(code, stdout, stderr, perf_counter() - begin)


def can_fork() -> bool:
    """Whether processes are forked: they are to be, and this one has not used CUDA, which they could not use then."""
    torch: Any = sys.modules.get("torch")
    if os.environ.get(FORKS) != "1":
        return False
    if torch is not None and torch.cuda.is_initialized():
        print("this process has used CUDA: others import everything anew", file=sys.stderr, flush=True)
        return False
    return True


def _start(words: list[str], out: Path, err: Path, leads: bool) -> _Started:
    with out.open("w") as stdout, err.open("w") as stderr:
        process = subprocess.Popen([sys.executable, *words], stdout=stdout, stderr=stderr, start_new_session=leads)

    def code_within(seconds: float | None) -> int | None:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    return process.pid, code_within


def _fork(words: list[str], out: Path, err: Path, leads: bool) -> _Started:
    process = multiprocessing.get_context("fork").Process(target=_become, args=(words, out, err, leads))
    process.start()
    assert process.pid is not None

    def code_within(seconds: float | None) -> int | None:
        process.join(seconds)
        return process.exitcode

    return process.pid, code_within


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
