"""Runs a programme in a process of its own, so that a crash or a hang of it is an outcome like any other."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import warnings
from dataclasses import asdict
from typing import TYPE_CHECKING

from fuzz.execute import Outcome, execute

if TYPE_CHECKING:
    from collections.abc import Callable

    from fuzz.programme import Programme


def execute_apart(
    programme: Programme, *, seconds: float = 60.0, execute: Callable[[Programme], Outcome] = execute
) -> Outcome:
    """Runs a programme in a child that is forked from this process.

    Args:
        programme: The programme.
        seconds: A child that takes longer has hung.
        execute: What runs it.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks of processes that have threads
        child = os.fork()
    if not child:
        _run_and_end(programme, writer, seconds, execute)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return Outcome("died", signal.Signals(os.WTERMSIG(status)).name)
    if not told:
        return Outcome("died", f"no end within {seconds:g} seconds")
    return Outcome(**json.loads(told))


def _run_and_end(programme: Programme, writer: int, seconds: float, execute: Callable[[Programme], Outcome]) -> None:
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        with os.fdopen(writer, "w") as pipe:
            json.dump(asdict(execute(programme)), pipe)
    finally:
        os._exit(0)
