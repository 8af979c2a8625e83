"""The loop over iterations, the hooks around it, and the errors of other code that end it."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, final

from torch import Tensor

from graphckpt.errors import GraphckptError
from graphckpt.graph.out_of_memory import is_out_of_memory
from graphckpt.ledger.explanation import Explanation
from graphckpt.train.output import Report
from graphckpt.train.parallel.ranks import is_connection_error


@final
class TrainError(GraphckptError, RuntimeError):
    """Training cannot continue."""


_MAX_CHARACTERS = 400  # of the message of another error


@contextmanager
def attribute_errors(keys: str, what: str) -> Iterator[None]:
    """Raises a ``TrainError`` for an error of other code, with the config ``keys``, what failed, file and line."""
    try:
        yield
    except Exception as error:
        # These name their cause already, or a context around this one does: `translate_errors`,
        # `_explain_out_of_memory`.
        if isinstance(error, GraphckptError) or is_out_of_memory(error) or is_connection_error(error):
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        message = " ".join(str(error).split())[:_MAX_CHARACTERS]  # in one line
        text = f"{keys}: {what} failed, {type(error).__name__}: {message} (at {frame.filename}:{frame.lineno})"
        # PEP 479 turns a StopIteration in a generator into a RuntimeError whose cause it is. `contextmanager` undoes
        # this (bpo-29692), so with that cause our TrainError, a RuntimeError, would be replaced by the StopIteration.
        cause = None if isinstance(error, StopIteration) else error
        raise TrainError(f"{text} · fix: check these keys of the config") from cause


class HookBase:
    """Base class of hooks; override the methods you need. Hooks run in the order of their list."""

    def before_train(self, loop: Loop) -> None:
        """Runs once, before the first iteration."""

    def before_step(self, loop: Loop) -> None:
        """Runs before each iteration."""

    def after_step(self, loop: Loop) -> None:
        """Runs after each iteration; ``loop.loss`` is its loss, and ``loop.done`` counts it."""

    def after_train(self, loop: Loop) -> None:
        """Runs once, after the last iteration or when the user stops the run; not after an error."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the hook's state for snapshots: tensors and plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``state_dict`` returned, before the loop is resumed."""


@final
class Loop:
    """Calls ``step``, which returns losses by name, until ``train_iter`` iterations are done or the user stops it.

    With several processes, ``agree`` returns before each iteration whether any of them was asked to stop.
    ``synchronize`` waits for the device to finish the steps launched so far.
    """

    def __init__(
        self,
        step: Callable[[int], Mapping[str, Tensor]],
        *,
        train_iter: int,
        report: Report,
        hooks: Sequence[HookBase] = (),
        start_iter: int = 0,
        agree: Callable[[bool], bool] = bool,
        synchronize: Callable[[], object] = lambda: None,
    ) -> None:
        self.report = report
        self.train_iter = train_iter
        self.start_iter = start_iter
        self.done = start_iter
        """Iterations done, including those before this process."""
        self.losses: Mapping[str, Tensor] = {}
        """Losses of the last iteration, ``total_loss`` first: scalars on the device; reading them synchronizes."""
        self.metrics: dict[str, float] = {}
        """Metrics that hooks add in this iteration; cleared before the next."""
        self.late_metrics: list[tuple[int, dict[str, float]]] = []
        """Metrics of earlier iterations that were read from the device in this one, with the iteration of each."""
        self.waited_seconds = 0.0
        """Seconds that hooks waited for the device since the last step began."""
        self.is_stopped = False
        """Whether the user stopped the run."""
        self.data_seconds = 0.0
        """Seconds that the last iteration waited for its data; set by the step."""
        self.explanation: Explanation | None = None
        """The bytes that each block saved; set at the end of training."""
        self.picture: Path | None = None
        """The picture of a step's memory, a ``.png``; set at the end of training."""
        self._step = step
        self._hooks = tuple(hooks)
        self._agree = agree
        self._synchronize = synchronize
        self._is_asked = False

    @property
    def loss(self) -> Tensor | None:
        """``total_loss`` of the last iteration; ``None`` before the first."""
        return self.losses.get("total_loss")

    @property
    def iteration(self) -> int:
        """Number of the last iteration, from 0, as in metrics and names of snapshots; -1 before the first."""
        return self.done - 1

    @property
    def position(self) -> str:
        """The last iteration, from 1, as lines of the log name it."""
        return f"iteration: {self.done}/{self.train_iter}"

    @property
    def rows(self) -> list[tuple[int, dict[str, float]]]:
        """The metrics to write in this iteration, with the iteration of each."""
        return [*self.late_metrics, *([(self.iteration, self.metrics)] if self.metrics else [])]

    def synchronize(self) -> None:
        """Waits for the device. Hooks that read from it call this first, so that the wait counts as step time."""
        started = time.perf_counter()
        self._synchronize()
        self.waited_seconds += time.perf_counter() - started

    def hook_states(self) -> dict[str, dict[str, Any]]:
        """Returns the states of the hooks that have one, by class name and index within the class."""
        return {name: state for name, hook in self._named_hooks() if (state := hook.state_dict())}

    def load_hook_states(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Restores the hooks from what ``hook_states`` returned."""
        for name, hook in self._named_hooks():
            if name in states:
                hook.load_state_dict(states[name])

    def _named_hooks(self) -> Iterator[tuple[str, HookBase]]:
        counts: Counter[str] = Counter()
        for hook in self._hooks:
            kind = type(hook).__name__
            yield f"{kind}-{counts[kind]}", hook
            counts[kind] += 1

    @property
    def is_last(self) -> bool:
        """Whether no iteration follows."""
        return self.is_stopped or self.done >= self.train_iter

    def run(self) -> None:
        """Runs the remaining iterations.

        The first Ctrl-C or SIGTERM ends the loop after the current iteration, so that no update is left
        incomplete; the second raises ``KeyboardInterrupt`` at once.
        """
        with self._stops_on_interrupt():
            for hook in self._hooks:
                hook.before_train(self)
            with self.report.progress("training", self.train_iter - self.done, counts=True) as advance:
                while True:
                    # Agreed on by all ranks, between two iterations: a signal reaches them at different moments, and
                    # one that left before the others would let them wait in a collective until its timeout.
                    self.is_stopped = self._agree(self._is_asked)
                    if self.is_last:
                        break
                    # Cleared here and not at the end: the final snapshot stores the metrics of the last iteration.
                    self.metrics, self.late_metrics = {}, []
                    for hook in self._hooks:
                        hook.before_step(self)
                    self.losses = self._step(self.done)
                    # Before the hooks: from here on a snapshot has this update, so it must count it.
                    self.done += 1
                    for hook in self._hooks:
                        hook.after_step(self)
                    advance(1)
            # Those of the last iteration are written. LogHook, the first, adds the line that is still on the device.
            self.late_metrics = []
            for hook in self._hooks:
                hook.after_train(self)

    @contextmanager
    def _stops_on_interrupt(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # signals can be handled in the main thread only
            yield
            return

        # Python runs this in the main thread between any two bytecodes: within an optimizer's loop over weights, or
        # within a print. So it only sets a flag, which the loop reads between two updates. A console that is
        # interrupted while it prints, and is used here, prints its line twice; `os.write` shares no buffer with it.
        def stop(number: int, frame: FrameType | None) -> None:
            if self._is_asked:
                raise KeyboardInterrupt
            self._is_asked = True
            with suppress(OSError):  # of a closed stderr
                os.write(2, b"\nstopping after this iteration; press Ctrl-C again to stop at once\n")

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
