"""The loop over iterations and the hooks around it. Knows no model, no data and no graph."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import final

from torch import Tensor

from graphckpt.errors import GraphckptError
from graphckpt.train.report import Report


@final
class TrainError(GraphckptError, RuntimeError):
    """Training cannot go on."""


class HookBase:
    """Does something beside the step. Overrides what it needs; hooks run in the order of their list."""

    def before_train(self, loop: Loop) -> None:
        """Runs once, before the first iteration."""

    def before_step(self, loop: Loop) -> None:
        """Runs before each iteration."""

    def after_step(self, loop: Loop) -> None:
        """Runs after each iteration; ``loop.loss`` is its loss, and ``loop.done`` counts it."""

    def after_train(self, loop: Loop) -> None:
        """Runs once, after the last iteration or the user's stop; not after an error."""


@final
class Loop:
    """Calls ``step``, which returns losses by name, until ``train_iter`` iterations are done or the user stops it."""

    def __init__(
        self,
        step: Callable[[int], Mapping[str, Tensor]],
        *,
        train_iter: int,
        report: Report,
        hooks: Sequence[HookBase] = (),
        start_iter: int = 0,
    ) -> None:
        self.report = report
        self.train_iter = train_iter
        self.start_iter = start_iter
        self.done = start_iter
        """Iterations of the run that are done, also those before this loop's start."""
        self.losses: Mapping[str, Tensor] = {}
        """Losses of the last iteration, ``total_loss`` first, scalars on the device; reading them waits for it."""
        self.metrics: dict[str, float] = {}
        """What the hooks measured in this iteration, in their order; empty again at the next."""
        self.is_stopped = False
        """Whether the user asked to stop."""
        self._step = step
        self._hooks = tuple(hooks)

    @property
    def loss(self) -> Tensor | None:
        """``total_loss`` of the last iteration; ``None`` before the first."""
        return self.losses.get("total_loss")

    @property
    def is_last(self) -> bool:
        """Whether no iteration follows."""
        return self.is_stopped or self.done >= self.train_iter

    def run(self) -> None:
        """Runs all iterations that are left.

        The first Ctrl-C ends the loop after the iteration that is running, so that no weight is half
        updated; the second raises ``KeyboardInterrupt`` at once.
        """
        with self._stops_on_interrupt():
            for hook in self._hooks:
                hook.before_train(self)
            with self.report.progress("training", self.train_iter - self.done, counts=True) as advance:
                while not self.is_last:
                    self._iterate()
                    advance(1)
            for hook in self._hooks:
                hook.after_train(self)

    def _iterate(self) -> None:
        self.metrics = {}
        for hook in self._hooks:
            hook.before_step(self)
        self.losses = self._step(self.done)
        self.done += 1
        for hook in self._hooks:
            hook.after_step(self)

    @contextmanager
    def _stops_on_interrupt(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # elsewhere signals cannot be handled
            yield
            return

        def stop(number: int, frame: FrameType | None) -> None:
            if self.is_stopped:
                raise KeyboardInterrupt
            self.is_stopped = True
            with suppress(OSError):  # past the console, which may be printing at this moment
                os.write(2, b"\nstopping after this iteration; press Ctrl-C again to stop at once\n")

        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
