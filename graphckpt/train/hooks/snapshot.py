"""Takes snapshots: periodically, at the end, when the user stops the run, and at the best evaluation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, final

from graphckpt.train.loop import HookBase, Loop
from graphckpt.train.snapshot.fields import item, number
from graphckpt.train.snapshot.folder import SnapshotWriteError
from graphckpt.train.snapshot.index import BEST, FINAL, Snapshots, periodic_name
from graphckpt.train.snapshot.writer import SnapshotWriter
from graphckpt.units import format_seconds

SaveSnapshot = Callable[[str, Loop, Callable[[], None]], None]
"""Writes the snapshot of a name and then calls a function; see ``SnapshotWriter.save``."""


@final
class SnapshotHook(HookBase):
    """Saves every ``period`` iterations and at the end. Runs after all hooks whose state is saved.

    In libai it runs before evaluation. Here it runs last, so that all iterations in a snapshot are evaluated and logged
    even if the run is killed right after it.
    """

    def __init__(
        self, writer: SnapshotWriter, snapshots: Snapshots, *, period: int, max_to_keep: int, run: str
    ) -> None:
        self._writer = writer
        self._snapshots = snapshots
        self._period = period
        self._max_to_keep = max_to_keep
        self._run = run
        self._saved_at = -1

    def after_step(self, loop: Loop) -> None:
        """Saves ``model_<iteration>`` and removes the oldest beyond ``max_to_keep``."""
        self._writer.poll()
        if loop.done % self._period == 0 and loop.done < loop.train_iter:
            self._take(periodic_name(loop.iteration), loop)

    def after_train(self, loop: Loop) -> None:
        """Saves ``model_final``, or the current state if the user stopped the run.

        Raises:
            SnapshotWriteError: the last state could not be saved.
        """
        if loop.done not in {loop.start_iter, self._saved_at}:
            self._take(FINAL if loop.done >= loop.train_iter else periodic_name(loop.iteration), loop)
        try:
            self._writer.join()
        except SnapshotWriteError as error:
            _complain(loop, str(error))
            self._saved_at = -1
        if loop.done == loop.start_iter:
            return
        if self._saved_at != loop.done:
            fix = "make room or name another train.output_dir, and run again with --resume if there is a snapshot"
            raise SnapshotWriteError(f"{self._snapshots.folder}: what was trained could not be saved · fix: {fix}")

    def _take(self, name: str, loop: Loop) -> None:
        if _saves(self._writer.save, name, loop, partial(self._mark, name, loop)):
            self._saved_at = loop.done

    def _mark(self, name: str, loop: Loop) -> None:
        try:
            self._snapshots.mark_last(name)
            if name != FINAL:
                self._snapshots.prune(name, self._max_to_keep, self._run)
        except OSError as error:
            what = f"{self._snapshots.folder}: {error.strerror or error}"
            loop.report.line(f"{name} was saved, but not all around it could be written: {what}", "red")


@final
class BestHook(HookBase):
    """Saves ``model_best`` when an evaluation metric improves; runs right before ``SnapshotHook``.

    Args:
        save: writes a snapshot.
        metric: name among the metrics of the evaluation.
        mode: whether less or more is better.
    """

    def __init__(self, save: SaveSnapshot, *, metric: str, mode: Literal["min", "max"]) -> None:
        self._save = save
        self._metric = metric
        self._sign = 1 if mode == "max" else -1
        self._best: float | None = None
        self._has_complained = False

    def state_dict(self) -> dict[str, Any]:
        """Returns the best value so far."""
        return {"best": self._best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the best value so far.

        Raises:
            FieldError: it is not a number.
        """
        best = item(state, "best")
        self._best = None if best is None else number(best, "hooks.BestHook-0.best")

    def after_step(self, loop: Loop) -> None:
        """Saves if this iteration was evaluated, and is the best."""
        value = loop.metrics.get(self._metric)
        if value is None:
            self._complain_of_name(loop)
        elif math.isfinite(value) and (self._best is None or value * self._sign > self._best * self._sign):
            before, self._best = self._best, value
            if not _saves(self._save, BEST, loop):
                self._best = before

    def _complain_of_name(self, loop: Loop) -> None:
        measured = [name for name in loop.metrics if name.startswith("eval_")]
        if measured and not self._has_complained:
            self._has_complained = True
            fix = f"use one of {', '.join(measured)}"
            where = f"train.evaluation.eval_metric: {self._metric!r} was not measured"
            loop.report.line(f"{where}, so there will be no {BEST} · fix: {fix}", "yellow")


def _saves(save: SaveSnapshot, name: str, loop: Loop, then: Callable[[], None] = lambda: None) -> bool:
    loop.synchronize()
    started = time.perf_counter()
    where = loop.position

    def done() -> None:
        seconds = format_seconds(time.perf_counter() - started)
        loop.report.line(f"{where}  saved {name} in {seconds}")
        then()

    try:
        save(name, loop, done)
    except SnapshotWriteError as error:
        _complain(loop, str(error))
        return False
    return True


def _complain(loop: Loop, what: str) -> None:
    text = "no snapshot was saved; training continues, and the last good snapshot is kept"
    loop.report.line(f"snapshot at {loop.position}: {what} · {text}", "red")
