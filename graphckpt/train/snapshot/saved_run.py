"""A run on disk: finds the snapshot to resume from, and restores the state."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
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


@final
class SavedRun:
    """A run in its output folder: a new one or a resumed one.

    Args:
        folder: of the run.
        resume: resume from the snapshot that ``last_checkpoint`` names; it is checked here.
        overwrite: replace an existing run.
        eval_only: change nothing.
        batch_size: sequences in one iteration.
        ranks: the processes of the run; rank 0 writes.

    Raises:
        ConfigError: another process trains in the folder, or it contains another run.
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
        """Whether this run has written files to the folder."""
        self._run_folder = RunFolder(folder, resume=resume, overwrite=overwrite)
        self._at_start: list[Callable[[], None]] = []
        self._batch_size = batch_size
        self.source: Path | None = None
        """The snapshot to resume from; ``None`` for a new run."""
        self._info: RunInfo | None = None
        if not eval_only and ranks.is_main:  # reading while another process writes is safe
            self._run_folder.claim()
        try:
            if resume and not eval_only:
                self.source, self._info = self.snapshots.last_run()
        except BaseException:
            self._run_folder.release()
            raise
        info = self._info
        self.run = info.run if info else secrets.token_hex(8)
        """An id of the run and of all runs resumed from it."""
        self.start_iter = info.done if info else 0
        """Iterations done before this process."""
        self._start_samples = info.consumed_samples if info else 0

    def consumed_samples(self, done: int) -> int:
        """Returns the samples consumed by ``done`` iterations, also if the batch size was another before."""
        return self._start_samples + (done - self.start_iter) * self._batch_size

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes from training in the folder, until the context ends.

        Raises:
            ConfigError: another process trains there, the folder contains another run, or it cannot be written.
        """
        self.ranks.run_on_main(self._claim, ConfigError)
        try:
            yield
        finally:
            self._run_folder.release()

    def _claim(self) -> None:
        with writing_to(self.folder):
            self._run_folder.claim()

    def at_start(self, action: Callable[[], None]) -> None:
        """Calls ``action``, which writes into the folder, on rank 0 once the run begins."""
        if self.has_begun:
            action()
        else:
            self._at_start.append(action)

    def begin(self, last_iteration: int) -> None:
        """Begins to write; a failure before the first iteration is done leaves the folder unchanged.

        Collective.

        Args:
            last_iteration: the last one before this process; later lines of the log and the metrics are dropped.

        Raises:
            ConfigError: the folder or its log files cannot be written.
        """
        self.ranks.run_on_main(lambda: self._begin(last_iteration), ConfigError)
        self.has_begun = True

    def _begin(self, last_iteration: int) -> None:
        with writing_to(self.folder):
            self._run_folder.begin()
            cut_log(self.folder / LOG, last_iteration)
            cut_metrics(self.folder / METRICS, last_iteration)
            for action in self._at_start:
                action()

    def restore(self, state: RunState, loop: Loop, *, data: dict[str, Any], report: Report) -> None:
        """Restores the state of a resumed run; call it right before the loop.

        Args:
            state: the state to restore.
            loop: the loop whose hooks are restored too.
            data: plain values that identify the data.
            report: receives what happened.

        Raises:
            SnapshotError: the snapshot does not fit the model, the optimizer or the schedule.
        """
        source, info = self.source, self._info
        if source is None or info is None:
            return
        trainer, graph = (snapshot.read_state(source, name) for name in ("trainer", "graph"))
        now = rounding_environment(self.ranks)
        state.load_weights(source)
        state.check(graph, trainer, source, done=info.done, num_states=info.optimizer_states)
        with reading(source / snapshot.STATE.format("trainer")):
            mapping(item(trainer["hooks"], "LogHook-0"), "hooks.LogHook-0")  # present in every run
            loop.load_hook_states(trainer["hooks"])
        state.load_states(self._graph_state(graph, source, state), trainer, str(source))
        report.line(f"resumed from {source}, after {loop.position}")
        if names := [name for name in state.changes(trainer["settings"]) if name != "initial_lr"]:
            report.line(f"optim, train.scheduler: {', '.join(names)} changed since, which takes effect now", "yellow")
        if (then := info.data) != data:
            text = f"the data changed since: {_changes(then, data)}"
            report.line(f"{text}; the run sees other text from now on", "yellow")
        if (then := info.machine) != now:
            text = f"the machine or the processes changed since: {_changes(then, now)}"
            report.line(f"{text}; sums may be rounded differently, so results may not be bitwise equal", "yellow")
        if loop.is_last:
            report.line("already finished · fix: raise train.train_iter to train on", "yellow")

    def _graph_state(self, graph: dict[str, Any], source: Path, state: RunState) -> dict[str, Any]:
        graph = state.local_part(graph)
        if not (source / snapshot.SHARDS).is_dir():
            return graph
        from graphckpt.train.snapshot import dcp  # noqa: PLC0415 - takes a second, for those who need it

        found = dcp.read(source / snapshot.SHARDS, state.load_templates(graph), self.ranks.control)
        whole: dict[str, Any] = restore_sharded(graph, found)
        return whole


def rounding_environment(ranks: TrainRanks) -> dict[str, Any]:
    """Returns what affects the rounding of sums, such as the number of threads."""
    kinds = ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size")
    sizes = {name: getattr(ranks.config, name) for name in kinds}
    machine = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    return machine | {name: size for name, size in sizes.items() if size > 1}


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Names the output folder in the error if it cannot be written.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        fix = "name a folder that can be written, on a disk with room"
        raise ConfigError(f"train.output_dir: {folder}: {error.strerror or error} · fix: {fix}") from error


def weights_folder(name: str, folder: Path) -> Path:
    """Returns the folder of the weights to evaluate: the named one, or the last snapshot.

    Raises:
        SnapshotError: there is neither.
    """
    if name:
        return Path(name).expanduser()
    try:
        return Snapshots(folder).checked_last()[0]
    except SnapshotError as error:
        raise SnapshotError(f"nothing to evaluate: {error} · or name weights: train.load_weight=folder") from error


def _changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describes what has changed.

    >>> _changes({"torch": "2.13.0", "threads": 1}, {"torch": "2.13.0", "threads": 2})
    'threads 1 -> 2'
    """
    names = [name for name in dict.fromkeys([*then, *now]) if then.get(name) != now.get(name)]
    return ", ".join(f"{name} {then.get(name)} -> {now.get(name)}" for name in names)
