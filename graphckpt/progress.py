"""Prints progress lines of operations that take longer than two seconds. No torch."""

from __future__ import annotations

import sys
import threading
import time
from typing import Self

SHOW_AFTER = 2.0  # seconds


class Progress:
    """Prints one line for each stage, from two seconds on.

    Args:
        is_shown: Whether to print at all; ``None``: in a terminal and in a notebook.
    """

    def __init__(self, *, is_shown: bool | None = True) -> None:
        self._in_notebook = _in_notebook()
        is_watched = self._in_notebook or (sys.stderr is not None and sys.stderr.isatty())
        self._is_shown = is_watched if is_shown is None else is_shown
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
        """Names what begins now."""
        self._text = text
        if self._is_shown and time.monotonic() - self._began >= SHOW_AFTER:
            self._show()

    def _show(self) -> None:
        file = sys.stdout if self._in_notebook else sys.stderr  # a notebook shows stderr as an error
        print(f"planning, {time.monotonic() - self._began:.0f} s: {self._text}", file=file, flush=True)


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")
