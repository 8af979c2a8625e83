"""Writes the snapshots of a run: at once, or while training goes on; whole, or each process its own share.

What is cut over processes is written share by share. ``model_best`` and ``model_final`` hold the whole weights as
well, in the one file that Transformers knows; to put them together for each of the others would be a gather too many.
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

from graphckpt.train.data.tokenizer import END_OF_TEXT
from graphckpt.train.loop import Loop
from graphckpt.train.parallel.sharding import on_cpu
from graphckpt.train.snapshot import folder as snapshot
from graphckpt.train.snapshot.folder import SnapshotWriteError
from graphckpt.train.snapshot.index import BEST, FINAL
from graphckpt.train.snapshot.run_folder import CONFIG
from graphckpt.train.snapshot.run_state import RunState
from graphckpt.train.snapshot.saved_run import SavedRun, rounding_environment

Done = Callable[[], None]
"""What to do once a snapshot bears its name."""


@final
class SnapshotWriter:
    """Writes snapshots of a state. All processes call its methods at the same moments, but for ``poll``.

    Args:
        saved: the run's folder.
        state: what to write.
        data: plain values that differ if the data does.
        companions: writes more files into the folder that it is called with.
        is_async: write a copy while training goes on.
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
        """Writes the snapshot of this name, and then calls ``done``, on each process; later, if it is to be so.

        Raises:
            SnapshotWriteError: it could not be written.
        """
        try:
            self.join()
        except SnapshotWriteError as error:  # of the one before this, and no reason to leave this one out
            loop.report.line(f"{error} · the snapshot before this one is missing", "red")
        folder = self._saved.folder / name
        shards: dict[str, Tensor] | None = {} if self._state.is_sharded else None
        states = self._state.states(shards)
        states["trainer"]["hooks"] = loop.hook_states()
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
        """Calls what is to be done for a snapshot that has been written meanwhile."""
        if self._pending is None or not self._pending[0].done() or self._pending[0].exception() is not None:
            return
        (future, done), nothing = self._pending, partial(_nothing)
        self._pending = future, nothing
        done()

    def join(self) -> None:
        """Waits for a snapshot that is being written.

        Raises:
            SnapshotWriteError: it could not be written; on all processes.
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

    def _write_sharded(self, folder: Path, tensors: dict[str, Tensor], *, later: bool) -> Future[Any] | None:
        from graphckpt.train.snapshot import dcp  # noqa: PLC0415 - takes a second, for those who need it

        parts = dcp.full_where_packed(tensors)
        self._ranks.run_on_main(lambda: _begin(folder), SnapshotWriteError)
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


def _begin(folder: Path) -> None:
    snapshot.begin(folder)


def _nothing() -> None:
    pass


def _after(begun: Future[Any] | None, folder: Path, write: Callable[[], None]) -> None:
    """Waits for the shards of all processes, and writes the rest."""
    if begun is not None:
        from graphckpt.train.snapshot import dcp  # noqa: PLC0415 - takes a second, for those who need it

        dcp.wait(begun, folder)
    write()


def export(model: Any, architecture: str, tokenizer_file: Path | None, folder: Path, *, seq_length: int) -> None:
    """Writes the config of a Transformers model, if it is one, and the tokenizer, if any, into ``folder``.

    Args:
        model: that was trained.
        architecture: the name of its class, which is another where its weights are cut.
        tokenizer_file: its tokenizer, if any.
        folder: where to.
        seq_length: tokens of a sample.
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
        tokenizer_file=str(tokenizer_file),
        eos_token=END_OF_TEXT,
        model_max_length=seq_length,
    )
    tokenizer.save_pretrained(folder)


def _is_of_transformers(model: nn.Module) -> bool:
    if "transformers" not in sys.modules:  # then nobody can have made one
        return False
    from transformers import PreTrainedModel  # noqa: PLC0415 - as above

    return isinstance(model, PreTrainedModel)
