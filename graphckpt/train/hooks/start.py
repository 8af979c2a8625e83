"""Begins to write into the output folder once an iteration is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from graphckpt.train.loop import HookBase, Loop


@final
class StartHook(HookBase):
    """Calls ``begin`` after the first iteration of this process; comes before all hooks that write.

    Whatever cannot run at all has failed by then, without a trace in the folder.

    Args:
        begin: is called with the number of the iteration before.
    """

    def __init__(self, begin: Callable[[int], None]) -> None:
        self._begin: Callable[[int], None] | None = begin

    def after_step(self, loop: Loop) -> None:
        """Calls ``begin`` once, and has the log written from now on."""
        if self._begin is not None:
            self._begin(loop.start_iter - 1)
            self._begin = None
            loop.report.open_log()
