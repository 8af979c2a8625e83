"""Prints progress lines of operations that take longer than two seconds, and ends a command on Ctrl-C. No torch."""

from __future__ import annotations

import signal
import sys
import threading
import time
from typing import Self, final

SHOW_AFTER = 2.0  # seconds


class Progress:
    """Prints one line for each stage, from two seconds on.

    Args:
        task: What each line begins with.
        is_shown: Whether to print at all; ``None``: in a terminal and in a notebook.
    """

    def __init__(self, task: str = "planning", *, is_shown: bool | None = True) -> None:
        self._task = task
        self._in_notebook = _in_notebook()
        if is_shown is None:
            is_shown = self._in_notebook or (sys.stderr is not None and sys.stderr.isatty())
        self._is_shown = is_shown
        self._began = time.monotonic()
        self._text = ""
        self._timer = threading.Timer(SHOW_AFTER, self._show)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        if self._is_shown:
            self._timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()

    def begin(self, text: str) -> None:
        """Names the stage that begins."""
        self._text = text
        if self._is_shown and time.monotonic() - self._began >= SHOW_AFTER:
            self._show()

    def report(self, text: str) -> None:
        """Prints a line at once, which is not about a stage."""
        if self._is_shown:
            self._print(f"graphckpt: {text}")

    def _show(self) -> None:
        self._print(f"{self._task}, {time.monotonic() - self._began:.0f} s: {self._text}")

    def _print(self, line: str) -> None:
        file = sys.stdout if self._in_notebook else sys.stderr  # a notebook shows stderr as an error
        print(line, file=file, flush=True)


@final
class CommandProgress(Progress):
    """Ends a command on Ctrl-C as well.

    Python swallows a ``KeyboardInterrupt`` that is raised within a destructor: it is then raised where the next thing
    begins.
    """

    def __init__(self, task: str = "planning") -> None:
        super().__init__(task)
        self._is_interrupted = False
        self._handles_interrupts = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # others cannot set a handler
            self._handles_interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._handles_interrupts:
            signal.signal(signal.SIGINT, self._interrupt)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self._handles_interrupts:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        # A swallowed one ends the command here at the latest, before its result is printed; an error ends it anyway.
        if error[:1] == (None,):
            self._check_interrupts()

    def begin(self, text: str) -> None:
        self._check_interrupts()
        super().begin(text)

    def _interrupt(self, *_: object) -> None:
        self._is_interrupted = True
        raise KeyboardInterrupt

    def _check_interrupts(self) -> None:
        if self._is_interrupted:
            raise KeyboardInterrupt


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")
