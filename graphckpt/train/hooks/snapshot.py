"""Writes snapshots: periodically, at the end, when the user stops the run, and at the best evaluation.

Sharded tensors are written by each rank. ``model_best`` and ``model_final`` also contain the full weights in the file
that Transformers loads; for periodic snapshots that would cost an extra all-gather.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal, final

from torch import Tensor

from graphckpt.engine.values import report_differences
from graphckpt.train.data.tokens import END_OF_TEXT
from graphckpt.train.loop import HookBase, Loop, TrainError
from graphckpt.train.output import hidden
from graphckpt.train.output import remove as remove_path
from graphckpt.train.parallel.sharding import on_cpu
from graphckpt.train.snapshot import folder as snapshot
from graphckpt.train.snapshot.folder import BEST, FINAL, SnapshotWriteError, periodic_name
from graphckpt.train.snapshot.run_state import RunState
from graphckpt.train.snapshot.saved_run import CONFIG, SavedRun, rounding_environment
from graphckpt.train.snapshot.schema import OPTIMIZER, SHARDS
from graphckpt.units import format_seconds

# Note [Snapshots in the background]
#
#   main thread of each rank                     its snapshot thread
#   save A: gather, copy to the CPU, submit      write shards, collectively; rank 0 then writes the other files
#   iterations, `poll` after each                ends
#   save B: join A, gather, ...                  ...
#
# Two threads of a rank run collectives at the same time. On one process group they might begin in another order than
# on another rank, and would then match the wrong ones: the thread has a separate group (`TrainRanks.background`).
#
# `poll` must not communicate, as ranks see their thread end in different iterations. So it only calls `then`, which
# marks the snapshot as the last one: a run that is killed an hour before the next snapshot resumes from this one. An
# error waits for `join`, where all ranks raise it together.


@final
class SnapshotWriter:
    """Writes snapshots of a state, synchronously or in the background. All methods but ``poll`` are collective."""

    def __init__(
        self,
        saved: SavedRun,
        state: RunState,
        *,
        data: dict[str, Any],
        companions: Callable[[Path], None],
        is_async: bool = False,
    ) -> None:
        self.saved = saved
        self._ranks = saved.ranks
        self._state = state
        self.data = data
        """Plain values that differ if the data does."""
        self._companions = companions
        self._thread = ThreadPoolExecutor(1, "snapshot") if is_async else None
        self._pending: tuple[Future[None], Callable[[], None], Callable[[], None]] | None = None

    def save(
        self,
        name: str,
        loop: Loop,
        then: Callable[[], None] = lambda: None,
        otherwise: Callable[[], None] = lambda: None,
    ) -> bool:
        """Writes the snapshot of this name, and calls ``then`` on each rank once it is complete, or ``otherwise``.

        Returns ``False``, after a line in the log, if it cannot be written; in the background, ``join`` raises that.
        """
        where = loop.position
        loop.synchronize()
        # A recomputation with other values is an error of an earlier step: raised before its update is saved.
        report_differences()
        started = time.perf_counter()

        def done() -> None:
            loop.report.line(f"{where}  saved {name} in {format_seconds(time.perf_counter() - started)}")
            then()

        try:
            self.join()
        except SnapshotWriteError as error:  # of the previous one: this one is written all the same
            loop.report.line(f"{error} · the snapshot before this one is missing", "red")
        try:
            self._save(name, loop, done, otherwise)
        except SnapshotWriteError as error:
            otherwise()
            self.complain(error, loop)
            return False
        return True

    def complain(self, error: SnapshotWriteError, loop: Loop) -> None:
        text = "no snapshot was saved; training continues, and the last good snapshot is kept"
        loop.report.line(f"snapshot at {loop.position}: {error} · {text}", "red")

    def _save(self, name: str, loop: Loop, done: Callable[[], None], otherwise: Callable[[], None]) -> None:
        # Before the weights are looked at: where a loss is not finite, its message names the iteration.
        hooks = loop.hook_states()
        self._check_weights(loop.done)
        folder, is_sharded, shards = self.saved.folder / name, self._state.is_sharded, dict[str, Tensor]()
        states = self._state.states(shards)
        states["trainer"]["hooks"] = hooks
        weights = self._state.weights() if not is_sharded or name in {BEST, FINAL} else None
        info = {
            "run": self.saved.run,
            "iteration": loop.iteration,
            "done": loop.done,
            "consumed_samples": self.saved.consumed_samples(loop.done),
            "data": self.data,
            "metrics": {key: value for key, value in loop.metrics.items() if math.isfinite(value)},
            "machine": rounding_environment(self._ranks),
            "optimizer_states": len(states["graph"][OPTIMIZER]["state"]),
        }
        write = partial(snapshot.write, folder, info=info, companions=self._add_files, has_shards=is_sharded)
        write_shards = self._shards_writer(folder, shards) if is_sharded else lambda: None
        if self._thread is None:
            write_shards()
            self._ranks.run_on_main(partial(write, weights=weights, states=states), SnapshotWriteError)
            done()
            return
        # From here on the loop changes weights and states in place: the thread writes copies.
        is_main = self._ranks.is_main
        parts = {"weights": on_cpu(weights, copy=True), "states": on_cpu(states, copy=True)} if is_main else {}

        def write_all() -> None:
            write_shards()
            if is_main:
                write(**parts)

        self._pending = self._thread.submit(write_all), done, otherwise

    def poll(self) -> None:
        """Calls ``then`` for a snapshot that was completed in the background."""
        if self._pending is not None and self._pending[0].done() and self._pending[0].exception() is None:
            (future, done, otherwise), nothing = self._pending, lambda: None
            self._pending = future, nothing, otherwise  # all ranks have to join it at the same time
            done()

    def join(self) -> None:
        if self._pending is None:
            return
        (future, done, otherwise), self._pending = self._pending, None
        fault: str | None = None
        try:
            future.result()
        except SnapshotWriteError as error:
            fault = str(error)
        if (fault := self._ranks.broadcast(fault)) is not None:
            otherwise()
            raise SnapshotWriteError(fault)
        done()

    def _check_weights(self, iteration: int) -> None:
        """Raises on all ranks if a weight of one is not finite: of a gradient that was not, although the loss was."""
        names = [name for part in self._ranks.all_gather(self._state.not_finite()) for name in part]
        if names:
            what = f"{names[0]} is not finite after iteration {iteration}, although the loss is"
            fix = "--resume from the last one, and find the op by torch.autograd.set_detect_anomaly(True)"
            raise TrainError(f"{what}; no snapshot is written · fix: {fix}, or lower optim.lr")

    def _shards_writer(self, folder: Path, shards: dict[str, Tensor]) -> Callable[[], None]:
        """Returns a function that writes the present shards of this rank; both are collective."""
        from graphckpt.train.snapshot import dcp  # noqa: PLC0415 - takes a second, for those who need it

        is_async, fresh = self._thread is not None, hidden(folder, "tmp")
        parts = on_cpu(dcp.full_where_packed(shards), copy=True) if is_async else dcp.full_where_packed(shards)
        self._ranks.run_on_main(partial(remove_path, fresh), SnapshotWriteError)  # before any rank writes there
        # `background` is read here and not in the thread: its first access creates the group, which is collective.
        return partial(dcp.write, fresh / SHARDS, parts, self._ranks.background if is_async else self._ranks.control)

    def _add_files(self, folder: Path) -> None:
        self._companions(folder)
        if (self.saved.folder / CONFIG).exists():
            shutil.copyfile(self.saved.folder / CONFIG, folder / "run.yaml")


def export(model: Any, architecture: str, tokenizer_file: Path | None, folder: Path, *, seq_length: int) -> None:
    """Writes the config of a Transformers model, if it is one, and the tokenizer, if any, into ``folder``."""
    # By name: a model that is not of Transformers need not wait seconds for its import.
    if any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__):
        model.config.architectures = [architecture]
        model.config.save_pretrained(folder)
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.save_pretrained(folder)
    if tokenizer_file is not None:
        from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - takes seconds, for those who need it

        file, length = str(tokenizer_file), seq_length
        PreTrainedTokenizerFast(tokenizer_file=file, eos_token=END_OF_TEXT, model_max_length=length).save_pretrained(
            folder
        )


@final
class SnapshotHook(HookBase):
    """Saves every ``period`` iterations and at the end.

    It runs after all hooks whose state is saved, so that all iterations in a snapshot are evaluated and logged even if
    the run is killed right after it. In libai it runs before evaluation.
    """

    def __init__(self, writer: SnapshotWriter, *, period: int, max_to_keep: int) -> None:
        self._writer = writer
        self._saved = writer.saved
        self._period = period
        self._max_to_keep = max_to_keep
        self._saved_at = -1

    def after_step(self, loop: Loop) -> None:
        self._writer.poll()
        if loop.done % self._period == 0 and loop.done < loop.train_iter:
            self._take(periodic_name(loop.iteration), loop)

    def after_train(self, loop: Loop) -> None:
        # Nothing to save if no iteration ran, or if the last one has a periodic snapshot, as after Ctrl-C.
        if loop.done not in {loop.start_iter, self._saved_at}:
            self._take(FINAL if loop.done >= loop.train_iter else periodic_name(loop.iteration), loop)
        try:
            self._writer.join()
        except SnapshotWriteError as error:
            self._writer.complain(error, loop)
            self._saved_at = -1
        # A periodic snapshot may fail, as a later one may succeed. None comes after this one, so this is an error.
        if self._saved_at != loop.done != loop.start_iter:
            fix = "make room or name another train.output_dir, and run again with --resume if there is a snapshot"
            raise SnapshotWriteError(f"{self._saved.folder}: the final state could not be saved · fix: {fix}")

    def _take(self, name: str, loop: Loop) -> None:
        if self._writer.save(name, loop, partial(self._mark, name, loop)):
            self._saved_at = loop.done

    def _mark(self, name: str, loop: Loop) -> None:
        if not self._saved.ranks.is_main:
            return
        try:
            self._saved.snapshots.mark_last(name)
            # After the mark: killed in between, the folder has one snapshot too many, and never lacks the marked one.
            if name != FINAL:
                self._saved.snapshots.prune(name, self._max_to_keep, self._saved.run)
        except OSError as error:
            what = f"{self._saved.folder}: {error.strerror or error}"
            loop.report.line(f"{name} was saved, but not all around it could be written: {what}", "red")


@final
class BestHook(HookBase):
    """Saves ``model_best`` when an evaluation metric improves; runs right before ``SnapshotHook``."""

    def __init__(self, save: Callable[..., object], *, metric: str, mode: Literal["min", "max"]) -> None:
        self._save = save
        self._metric = metric
        self._sign = 1 if mode == "max" else -1
        self._best: float | None = None
        self._written: float | None = None  # the best one whose snapshot is complete
        self._has_complained = False

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._best = self._written = state["best"]

    def after_step(self, loop: Loop) -> None:
        value = loop.metrics.get(self._metric)
        if value is None:
            measured = [name for name in loop.metrics if name.startswith("eval_")]
            if measured and not self._has_complained:
                self._has_complained = True
                what = f"train.evaluation.eval_metric: {self._metric!r} was not measured, so there will be no {BEST}"
                loop.report.line(f"{what} · fix: use one of {', '.join(measured)}", "yellow")
        elif math.isfinite(value) and (self._best is None or value * self._sign > self._best * self._sign):
            # Set before saving, as it belongs to the snapshot.
            self._best = value
            self._save(BEST, loop, then=partial(self._confirm, value), otherwise=partial(self._revoke, value))

    def _confirm(self, value: float) -> None:
        self._written = value

    def _revoke(self, value: float) -> None:
        if self._best == value:  # a failure in the background may be noticed when a better one is about to be saved
            self._best = self._written
