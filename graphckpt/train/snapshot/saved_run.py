"""What of a run is on the disk: finds where to go on, puts the state back, and writes it. Knows no data and no step."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import torch

from graphckpt.errors import ConfigError
from graphckpt.train.console import Report
from graphckpt.train.files import cut_log, cut_metrics
from graphckpt.train.loop import Loop
from graphckpt.train.parallel.ranks import TrainRanks
from graphckpt.train.parallel.sharding import restore_sharded
from graphckpt.train.snapshot import folder as snapshot
from graphckpt.train.snapshot.fields import item, mapping, reading
from graphckpt.train.snapshot.folder import SnapshotError
from graphckpt.train.snapshot.index import Snapshots
from graphckpt.train.snapshot.run_folder import LOG, METRICS, RunFolder
from graphckpt.train.snapshot.run_info import RunInfo
from graphckpt.train.snapshot.run_state import RunState
from graphckpt.train.snapshot.weights import read_weights


@final
class SavedRun:
    """What the output folder holds of a run, which starts anew there or goes on.

    Args:
        folder: of the run.
        resume: whether to go on from the snapshot that ``last_checkpoint`` names, which is checked here.
        overwrite: whether a run that is there already may be replaced.
        eval_only: leave all as it is.
        batch_size: sequences in one iteration.
        ranks: the processes of the run, of which the main one writes.

    Raises:
        ConfigError: another process trains in the folder, or another run is there.
        SnapshotError: ``resume``, and there is no snapshot, or it is broken.
        OSError: the folder cannot be written.
    """

    def __init__(
        self, folder: Path, *, resume: bool, overwrite: bool, eval_only: bool, batch_size: int, ranks: TrainRanks
    ) -> None:
        self.folder = folder
        self.snapshots = Snapshots(folder, is_writer=ranks.is_main)
        self.ranks = ranks
        self.has_begun = False
        """Whether files of this run are in the folder."""
        self._run_folder = RunFolder(folder, resume=resume, overwrite=overwrite)
        self._at_start: list[Callable[[], None]] = []
        if not eval_only and ranks.is_main:  # to look at what another process writes is no harm
            self._run_folder.claim()
        try:
            self._read_last(resume=resume and not eval_only, batch_size=batch_size)
        except BaseException:
            self._run_folder.release()
            raise

    def _read_last(self, *, resume: bool, batch_size: int) -> None:
        self.source: Path | None = None
        """The snapshot to go on from; ``None`` for a new run."""
        self._info: RunInfo | None = None
        if resume:
            self.source, self._info = self.snapshots.last_run()
        info = self._info
        self.run = info.run if info else secrets.token_hex(8)
        """A name for the run and all that goes on from it."""
        self.start_iter = info.done if info else 0
        """Iterations that are done already."""
        self._batch_size = batch_size
        self._start_samples = info.consumed_samples if info else 0

    def consumed_samples(self, done: int) -> int:
        """Returns the sequences that ``done`` iterations have seen, also if their size was another before."""
        return self._start_samples + (done - self.start_iter) * self._batch_size

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lets no other process train in the folder meanwhile; nor before, since this object was made.

        Raises:
            ConfigError: another process does, another run is there, or the folder cannot be written.
        """
        self.ranks.run_on_main(self._claim, ConfigError)
        try:
            yield
        finally:
            self._run_folder.release()

    def _claim(self) -> None:
        try:
            self._run_folder.claim()
        except OSError as error:
            raise unwritable_error(self.folder, error) from error

    def at_start(self, action: Callable[[], None]) -> None:
        """Calls ``action``, which writes into the folder, on the main process, once the run begins there."""
        if self.has_begun:
            action()
        else:
            self._at_start.append(action)

    def begin(self, last_iteration: int) -> None:
        """Begins to write: all before an iteration is done may fail, and then leaves the folder as it was.

        All processes call this.

        Args:
            last_iteration: before those of this process; what the log and the metrics hold beyond it is dropped.

        Raises:
            ConfigError: the files of an earlier process cannot be cut, or the folder cannot be written.
        """
        self.ranks.run_on_main(lambda: self._begin(last_iteration), ConfigError)
        self.has_begun = True

    def _begin(self, last_iteration: int) -> None:
        try:
            self._run_folder.begin()
            cut_log(self.folder / LOG, last_iteration)
            cut_metrics(self.folder / METRICS, last_iteration)
            for action in self._at_start:
                action()
        except OSError as error:
            raise unwritable_error(self.folder, error) from error

    def restore(self, state: RunState, loop: Loop, *, data: dict[str, Any], report: Report) -> None:
        """Puts back the state of the run, if it goes on; call it last before the loop.

        Args:
            state: where the state goes.
            loop: whose hooks have a state too.
            data: plain values that differ if the data does.
            report: is told what happened.

        Raises:
            SnapshotError: the snapshot does not fit the model, the optimizer or the schedule.
        """
        source, info = self.source, self._info
        if source is None or info is None:
            return
        trainer, graph = (snapshot.read_state(source, name) for name in ("trainer", "graph"))
        now = rounding_environment(self.ranks)
        weights = read_weights(source, like=state.tensors(), group=self.ranks.control)
        state.load_weights(weights, str(source))
        state.check(
            graph,
            trainer,
            source,
            done=info.done,
            num_states=info.optimizer_states,
            is_same_torch=info.machine["torch"] == now["torch"],
        )
        with reading(source / snapshot.STATE.format("trainer")):
            mapping(item(trainer["hooks"], "LogHook-0"), "hooks.LogHook-0")  # every run has it
            loop.load_hook_states(trainer["hooks"])
        state.load_states(self._graph_state(graph, source, state), trainer, str(source))
        report.line(f"resumed from {source}, after iteration: {loop.iteration}/{loop.train_iter}")
        if (then := info.data) != data:
            report.line(
                f"the data changed since: {then} then, {data} now; the run sees other text from here on", "yellow"
            )
        if (then := info.machine) != now:
            text = f"the machine changed since: {then} then, {now} now"
            report.line(f"{text}; sums may round otherwise, so the bits may differ", "yellow")
        if loop.is_last:
            report.line("nothing is left to do · fix: raise train.train_iter to train on", "yellow")

    def _graph_state(self, graph: dict[str, Any], source: Path, state: RunState) -> dict[str, Any]:
        graph = state.local_part(graph)
        if not (source / snapshot.SHARDS).is_dir():
            return graph
        from graphckpt.train.snapshot import dcp  # noqa: PLC0415 - takes a second, for those who need it

        found = dcp.read(source / snapshot.SHARDS, state.load_templates(graph), self.ranks.control)
        whole: dict[str, Any] = restore_sharded(graph, found)
        return whole


def rounding_environment(ranks: TrainRanks) -> dict[str, Any]:
    """Returns what changes how sums are rounded: a sum over two threads is not that over one, to the last bit."""
    kinds = ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size")
    sizes = {name: getattr(ranks.config, name) for name in kinds}
    machine = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    return machine | {name: size for name, size in sizes.items() if size > 1}


def unwritable_error(folder: Path, error: OSError) -> ConfigError:
    """Returns what to raise when the output folder cannot be written before a run starts."""
    fix = "name a folder that can be written, on a disk with room"
    return ConfigError(f"train.output_dir: {folder}: {error.strerror or error} · fix: {fix}")


def weights_folder(name: str, folder: Path) -> Path:
    """Returns the folder whose weights to evaluate: the one that is named, or else the last snapshot.

    Raises:
        SnapshotError: there is neither.
    """
    if name:
        return Path(name).expanduser()
    try:
        return Snapshots(folder).checked_last()[0]
    except SnapshotError as error:
        raise SnapshotError(f"nothing to evaluate: {error} · or name weights: train.load_weight=folder") from error
