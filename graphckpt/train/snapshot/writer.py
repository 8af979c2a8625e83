"""Writes the snapshots of a run: synchronously or in the background; as one file or in shards.

Sharded tensors are written by each rank. ``model_best`` and ``model_final`` also contain the full weights in the file
that Transformers loads; for periodic snapshots that would cost an extra all-gather.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, final

from torch import Tensor, nn

from graphckpt.train.data.tokens import END_OF_TEXT
from graphckpt.train.loop import Loop, TrainError
from graphckpt.train.parallel.sharding import on_cpu
from graphckpt.train.snapshot import folder as snapshot
from graphckpt.train.snapshot.folder import SnapshotWriteError
from graphckpt.train.snapshot.index import BEST, FINAL
from graphckpt.train.snapshot.run_folder import CONFIG
from graphckpt.train.snapshot.run_state import RunState
from graphckpt.train.snapshot.saved_run import SavedRun, rounding_environment

Done = Callable[[], None]
"""Called once a snapshot is complete."""


@final
class SnapshotWriter:
    """Writes snapshots of a state. All methods but ``poll`` are collective.

    Args:
        saved: the run on disk.
        state: what to write.
        data: plain values that differ if the data does.
        companions: writes more files into the folder that it is called with.
        is_async: write a copy in the background.
    """

    def __init__(
        self,
        saved: SavedRun,
        state: RunState,
        *,
        data: dict[str, Any],
        companions: Callable[[Path], None],
        is_async: bool = False,
    ) -> None:
        self._saved = saved
        self._ranks = saved.ranks
        self._state = state
        self.data = data
        """Plain values that differ if the data does."""
        self._companions = companions
        self._thread = ThreadPoolExecutor(1, "snapshot") if is_async else None
        self._pending: tuple[Future[None], Done] | None = None

    def save(self, name: str, loop: Loop, done: Done) -> None:
        """Writes the snapshot of this name and then calls ``done`` on each rank; with ``is_async``, later.

        Raises:
            SnapshotWriteError: it could not be written.
            TrainError: a loss or a weight is not finite. Nothing is written or removed then.
        """
        try:
            self.join()
        except SnapshotWriteError as error:  # of the previous one: this one is written all the same
            loop.report.line(f"{error} · the snapshot before this one is missing", "red")
        hooks = loop.hook_states()  # raises if a loss is not finite
        self._check_weights(loop.done)
        folder = self._saved.folder / name
        shards: dict[str, Tensor] | None = {} if self._state.is_sharded else None
        states = self._state.states(shards)
        states["trainer"]["hooks"] = hooks
        needs_whole = shards is None or name in {BEST, FINAL}
        weights = self._state.weights() if needs_whole else None
        write = partial(
            snapshot.write,
            folder,
            info=self._info(loop, states["graph"]),
            companions=self._add_files,
            has_shards=shards is not None,
        )
        begun = None if shards is None else self._write_sharded(folder, shards, later=self._thread is not None)
        if self._thread is None:
            self._ranks.run_on_main(partial(write, weights=weights, states=states), SnapshotWriteError)
            done()
            return
        if self._ranks.is_main:
            write = partial(write, weights=on_cpu(weights, copy=True), states=on_cpu(states, copy=True))
        else:
            write = partial(_nothing)
        self._pending = self._thread.submit(_after, begun, snapshot.shards_folder(folder), write), done

    def poll(self) -> None:
        """Calls ``done`` for a snapshot that was completed in the background."""
        if self._pending is None or not self._pending[0].done() or self._pending[0].exception() is not None:
            return
        (future, done), nothing = self._pending, partial(_nothing)
        self._pending = future, nothing
        done()

    def join(self) -> None:
        """Waits for a snapshot that is being written.

        Raises:
            SnapshotWriteError: it could not be written; raised on all ranks.
        """
        if self._pending is None:
            return
        (future, done), self._pending = self._pending, None
        fault: str | None = None
        try:
            future.result()
        except SnapshotWriteError as error:
            fault = str(error)
        if (fault := self._ranks.broadcast(fault)) is not None:
            raise SnapshotWriteError(fault)
        done()

    def close(self) -> None:
        """Ends the thread, if there is one."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    def _check_weights(self, iteration: int) -> None:
        """Raises on all ranks if a weight of one is not finite: of a gradient that was not, although the loss was."""
        broken = [name for names in self._ranks.all_gather(self._state.not_finite()) for name in names]
        if broken:
            what = f"{broken[0]} is not finite after iteration {iteration}, although the loss is"
            fix = "--resume from the last one, and find the op by torch.autograd.set_detect_anomaly(True)"
            raise TrainError(f"{what}; no snapshot is written · fix: {fix}, or lower optim.lr")

    def _write_sharded(self, folder: Path, tensors: dict[str, Tensor], *, later: bool) -> Future[Any] | None:
        from graphckpt.train.snapshot import dcp  # noqa: PLC0415 - takes a second, for those who need it

        parts = dcp.full_where_packed(tensors)
        self._ranks.run_on_main(partial(snapshot.begin, folder), SnapshotWriteError)
        target = snapshot.shards_folder(folder)
        if later:
            return dcp.write_later(target, parts, self._ranks.background)
        dcp.write(target, parts, self._ranks.control)
        return None

    def _add_files(self, folder: Path) -> None:
        self._companions(folder)
        if (self._saved.folder / CONFIG).exists():
            shutil.copyfile(self._saved.folder / CONFIG, folder / "run.yaml")

    def _info(self, loop: Loop, graph: dict[str, Any]) -> dict[str, Any]:
        return {
            "run": self._saved.run,
            "iteration": loop.iteration,
            "done": loop.done,
            "consumed_samples": self._saved.consumed_samples(loop.done),
            "data": self.data,
            "metrics": {key: value for key, value in loop.metrics.items() if math.isfinite(value)},
            "machine": rounding_environment(self._ranks),
            "optimizer_states": sum(len(graph[key]["state"]) for key in graph if "Optimizer" in key),
        }


def _nothing() -> None:
    pass


def _after(begun: Future[Any] | None, folder: Path, write: Callable[[], None]) -> None:
    """Waits for the shards of all ranks, and writes the rest."""
    if begun is not None:
        from graphckpt.train.snapshot import dcp  # noqa: PLC0415 - takes a second, for those who need it

        dcp.wait(begun, folder)
    write()


def export(model: Any, architecture: str, tokenizer_file: Path | None, folder: Path, *, seq_length: int) -> None:
    """Writes the config of a Transformers model, if it is one, and the tokenizer, if any, into ``folder``.

    Args:
        model: that was trained.
        architecture: the name of its class before sharding.
        tokenizer_file: its tokenizer file, if any.
        folder: the target.
        seq_length: tokens per sample.
    """
    if _is_of_transformers(model):
        model.config.architectures = [architecture]
        model.config.save_pretrained(folder)
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.save_pretrained(folder)
    if tokenizer_file is None:
        return
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - takes seconds, which other models can do without

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer_file), eos_token=END_OF_TEXT, model_max_length=seq_length
    )
    tokenizer.save_pretrained(folder)


def _is_of_transformers(model: nn.Module) -> bool:
    if "transformers" not in sys.modules:  # then no model can be one of its classes
        return False
    from transformers import PreTrainedModel  # noqa: PLC0415 - as above

    return isinstance(model, PreTrainedModel)
