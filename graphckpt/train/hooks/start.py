"""Starts to write to the output folder after the first iteration."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from graphckpt.train.loop import HookBase, Loop


@final
class StartHook(HookBase):
    """Calls ``begin`` after the first iteration of this process; runs before all hooks that write.

    A run that cannot start has failed by then and leaves the folder unchanged.

    Args:
        begin: is called with the number of the iteration before.
    """

    def __init__(self, begin: Callable[[int], None]) -> None:
        self._begin: Callable[[int], None] | None = begin

    def after_step(self, loop: Loop) -> None:
        """Calls ``begin`` once, and opens the log."""
        if self._begin is not None:
            self._begin(loop.start_iter - 1)
            self._begin = None
            loop.report.open_log()
