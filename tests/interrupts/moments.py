"""Raises KeyboardInterrupt at a chosen moment of a call.

Python delivers a signal when a Python function begins, when a function of C has returned, and when a loop goes round.
:class:`AtEvent` raises at one of the first two, counted from the beginning, so that a moment can be named and tried
again; :class:`AtContext` counts only the contexts that a file enters and leaves. :class:`AfterSeconds` uses a timer, as
a user's Ctrl-C would.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

_EVENTS = ("call", "c_return")


class Moment:
    """Where an interrupt was raised, if it was."""

    def __init__(self) -> None:
        self.stack: list[traceback.FrameSummary] = []

    @property
    def is_in_engine(self) -> bool:
        """Whether the engine was running: what PyTorch or the caller leave behind is theirs."""
        return any("/graphckpt/" in entry.filename or "/checkpoint.py" in entry.filename for entry in self.stack)

    def where(self) -> str:
        """Names the innermost frames."""
        names = [f"{e.filename.rpartition('/')[2]}:{e.lineno} {e.name}" for e in self.stack[-4:]]
        return " > ".join(names)

    def _raise(self, frame: FrameType | None) -> None:
        self.stack = list(traceback.extract_stack(frame))
        raise KeyboardInterrupt


class AtEvent(Moment):
    """Interrupts a call at its event number ``number``."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.count = 0
        self._number = number

    def call(self, function: Callable[[], Any]) -> Any:
        """Calls ``function``."""
        sys.setprofile(self._see)
        try:
            return function()
        finally:
            sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        if self._is_counted(frame, event):
            self.count += 1
            if self.count == self._number:
                self._raise(frame)

    def _is_counted(self, frame: FrameType, event: str) -> bool:
        return event in _EVENTS


class AtContext(AtEvent):
    """Interrupts a call as code of a file is about to enter or leave a context for the ``number``-th time."""

    def __init__(self, filename: str, number: int) -> None:
        super().__init__(number)
        self._filename = filename

    def _is_counted(self, frame: FrameType, event: str) -> bool:
        if event != "call" or frame.f_code.co_name not in ("__enter__", "__exit__"):
            return False
        caller = frame.f_back
        while caller is not None and caller.f_code.co_filename.endswith("contextlib.py"):
            caller = caller.f_back
        return caller is not None and caller.f_code.co_filename.endswith(self._filename)


class AfterSeconds(Moment):
    """Interrupts a call after a time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = max(seconds, 1e-6)

    def call(self, function: Callable[[], Any]) -> Any:
        """Calls ``function``."""
        before = signal.signal(signal.SIGALRM, lambda _, frame: self._raise(frame))
        try:
            signal.setitimer(signal.ITIMER_REAL, self._seconds)
            return function()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def count_events(function: Callable[[], Any]) -> int:
    """Returns the number of moments at which ``function`` could be interrupted."""
    moment = AtEvent(-1)
    moment.call(function)
    return moment.count
