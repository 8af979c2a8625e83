"""A run in its output folder: one process at a time, nothing replaced unasked, and resumed from its last snapshot."""

from __future__ import annotations

import errno
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from filelock import FileLock, Timeout
from rich.table import Table

from graphckpt.errors import ConfigError
from graphckpt.train.loop import Loop
from graphckpt.train.output import Report, cut_log, cut_metrics
from graphckpt.train.parallel.ranks import TrainRanks
from graphckpt.train.snapshot import folder as snapshot
from graphckpt.train.snapshot.folder import BEST, FINAL, LAST, Snapshots
from graphckpt.train.snapshot.run_state import RunState
from graphckpt.train.snapshot.schema import STATE, RunInfo, SnapshotError, reading

LOG, METRICS, CONFIG = "log.txt", "metrics.json", "config.yaml"
PLAN, PICTURE = "plan.yaml", "step.png"
LOCK = "run.lock"
"""The locked file. It remains in the folder: only the lock on it matters, not that it exists."""
_SCALARS = "events.out.tfevents.*"  # of TensorBoard
_FILES = {
    "weights": FINAL,
    "best at the evaluation": BEST,
    "last snapshot, for --resume": LAST,
    "memory of a step": PICTURE,
    "metrics": METRICS,
    "log": LOG,
    "config": CONFIG,
}

_COMPANIONS = {"config": "config.json", "tokenizer": "tokenizer.json"}


@final
class FolderLock:
    """A lock on a folder that one run at a time holds. A file system without locks lets every process in."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / LOCK
        self._is_new = not self.file.exists()
        # The operating system releases the lock with its process, however that ends: a file that is left behind locks
        # nothing.
        self._lock = FileLock(self.file, mode=0o644, thread_local=False, blocking=False)

    def acquire(self) -> None:
        try:
            self._lock.acquire()
        except Timeout:
            holder = self.file.read_text("utf-8", errors="replace").strip()
            number = holder.split()[1] if holder.count(" ") >= 3 else "its number"
            what = f"train.output_dir: {self.file.parent}: {holder or 'another process'} is training in this folder"
            end = f"wait until it ends, or end it (kill {number} stops it with a snapshot)"
            raise ConfigError(f"{what} · fix: {end}, or name another folder: train.output_dir=...") from None
        except OSError as error:
            if error.errno not in {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP}:
                raise

    def sign(self) -> None:
        with suppress(OSError):  # on a full disk it is locked all the same, by a process without a name
            self.file.write_text(f"process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")

    def release(self, *, discard: bool) -> None:
        """Releases the lock; with ``discard``, removes the file if this object created it."""
        if discard and self._is_new and self._lock.is_locked:
            with suppress(OSError):
                self.file.unlink()
        # `_claimed` acquires a file that exists twice, and filelock counts.
        self._lock.release(force=True)


@final
class SavedRun:
    def __init__(self, folder: Path, *, resume: bool, overwrite: bool, batch_size: int, ranks: TrainRanks) -> None:
        self.folder = folder
        self.snapshots = Snapshots(folder)
        self.ranks = ranks
        self.has_begun = False
        """Whether this run has written files to the folder."""
        self.source: Path | None = None
        """The snapshot to resume from; ``None`` for a new run."""
        self._info: RunInfo | None = None
        self._resume = resume
        self._overwrite = overwrite
        self._batch_size = batch_size
        self._at_start: list[Callable[[], None]] = []
        self._id = secrets.token_hex(8)

    @property
    def run(self) -> str:
        """An id of the run and of all runs resumed from it."""
        return self._info["run"] if self._info else self._id

    @property
    def start_iter(self) -> int:
        return self._info["done"] if self._info else 0

    def consumed_samples(self, done: int) -> int:
        """Returns the samples consumed by ``done`` iterations, also if the batch size was another before."""
        before = self._info["consumed_samples"] if self._info else 0
        return before + (done - self.start_iter) * self._batch_size

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the folder if a run may start here, and finds the snapshot to resume from; collective."""
        # The lock is entered within `main_first` and stays: the stack ends with this context. Other ranks read the
        # folder after rank 0 has it.
        with ExitStack() as stack:
            with writing_to(self.folder), self.ranks.main_first():
                if self.ranks.is_main:
                    stack.enter_context(self._claimed())
                if self._resume:
                    self.source, self._info = self.snapshots.last()
            yield

    @contextmanager
    def _claimed(self) -> Iterator[None]:
        """Locks the folder; writes nothing if that fails, and removes it again if the run has not begun."""
        new_folders = [folder for folder in (self.folder, *self.folder.parents) if not folder.exists()]
        lock = FolderLock(self.folder)
        try:
            # A lock cannot be taken before its folder exists, and a run that is refused must create none. So: lock an
            # existing folder, check it, create it, lock it. Two new runs may both pass the check, and one of them
            # the lock; `_begin` checks again, as the winner of an earlier race may have finished by then.
            if lock.file.exists():  # first, so that the message names the process, not the files that it has written
                lock.acquire()
            self._check_free()
            self.folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()
            lock.sign()
            if self._resume:
                snapshot.recover(self.folder)
            yield
        finally:
            lock.release(discard=not self.has_begun)
            for folder in [] if self.has_begun else new_folders:
                with suppress(OSError):  # it is not empty
                    folder.rmdir()

    def _check_free(self) -> None:
        if self._resume:
            self.snapshots.last_name()
            return
        files = [name for name in (LAST, METRICS, LOG, CONFIG) if (self.folder / name).exists()]
        names = [] if self._overwrite else [*self.snapshots.names(), *files]
        if not names:
            return
        listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        fix = "another train.output_dir, or train.overwrite=True to replace it"
        none = " (--resume needs a snapshot, and there is none)"
        fix = f"--resume to continue it, {fix}" if LAST in names else fix + none
        raise ConfigError(f"train.output_dir: {self.folder} already contains a run: {listed} · fix: {fix}")

    def at_start(self, action: Callable[[], None]) -> None:
        """Calls ``action``, which writes into the folder, on rank 0 once the run begins."""
        if self.has_begun:
            action()
        else:
            self._at_start.append(action)

    def begin(self, last_iteration: int) -> None:
        """Begins to write; a failure before the first iteration is done leaves the folder unchanged. Collective."""
        self.ranks.run_on_main(lambda: self._begin(last_iteration), ConfigError)
        self.has_begun = True

    def _begin(self, last_iteration: int) -> None:
        with writing_to(self.folder):
            if not self._resume:  # replaces a run, ``last_checkpoint`` first
                self.folder.mkdir(parents=True, exist_ok=True)
                self._check_free()
                names = (LAST, METRICS, LOG, CONFIG, PLAN, PICTURE)
                # `last_checkpoint` first: a process that is killed in the middle then leaves a folder that offers
                # nothing to resume, and not one that names a snapshot which is gone.
                for file in (*map(self.folder.joinpath, names), *self.folder.glob(_SCALARS)):
                    file.unlink(missing_ok=True)
                for name in self.snapshots.names():
                    snapshot.remove(self.folder / name)
                snapshot.recover(self.folder)
            # A run that was killed may have logged iterations after its last snapshot: the resumed run logs them again.
            cut_log(self.folder / LOG, last_iteration)
            cut_metrics(self.folder / METRICS, last_iteration)
            for action in self._at_start:
                action()

    def restore(self, state: RunState, loop: Loop, *, data: dict[str, Any], report: Report) -> None:
        """Restores the state of a resumed run; call it right before the loop."""
        source, info = self.source, self._info
        if source is None or info is None:
            return
        states = {name: snapshot.read_state(source, name) for name in ("trainer", "graph")}
        state.load_weights(source)
        defaults = state.add_defaults(states, source, info)
        trainer, graph = states["trainer"], states["graph"]
        state.check(graph, trainer, source, info)
        with reading(source / STATE.format("trainer")):
            loop.load_hook_states(trainer["hooks"])
        # Last, as it sets the random generators.
        state.load_states(graph, trainer, source)
        report.line(f"resumed from {source}, after {loop.position}")
        for line in defaults:
            report.line(line, "yellow")
        if names := [name for name in state.changes(trainer["settings"]) if name != "initial_lr"]:
            report.line(f"optim, train.scheduler: {', '.join(names)} changed since, which takes effect now", "yellow")
        machine, rounded = rounding_environment(self.ranks), "sums may be rounded differently"
        for what, then, now, effect in (
            ("data", info["data"], data, "the run sees other text from now on"),
            ("machine or the processes", info["machine"], machine, f"{rounded}, so results may not be bitwise equal"),
        ):
            if then != now:
                report.line(f"the {what} changed since: {_changes(then, now)}; {effect}", "yellow")
        if loop.is_last:
            report.line("already finished · fix: raise train.train_iter to train on", "yellow")


def _changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describes what has changed.

    >>> _changes({"torch": "2.13.0", "threads": 1}, {"torch": "2.13.0", "threads": 2})
    'threads 1 -> 2'
    """
    names = [name for name in dict.fromkeys([*then, *now]) if then.get(name) != now.get(name)]
    return ", ".join(f"{name} {then.get(name)} -> {now.get(name)}" for name in names)


def rounding_environment(ranks: TrainRanks) -> dict[str, Any]:
    kinds = ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size")
    sizes = {name: size for name in kinds if (size := getattr(ranks.config, name)) > 1}
    return {"torch": torch.__version__, "threads": torch.get_num_threads(), **sizes}


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        fix = "name a folder that can be written, on a disk with room"
        raise ConfigError(f"train.output_dir: {folder}: {error.strerror or error} · fix: {fix}") from error


def weights_folder(name: str, folder: Path) -> Path:
    if name:
        return Path(name).expanduser()
    try:
        return Snapshots(folder).last()[0]
    except SnapshotError as error:
        fault = str(error).partition(", so there is nothing to resume")[0].partition(" · fix: ")[0]
        fix = "name the folder of a run in train.output_dir, or one with weights in train.load_weight"
        raise SnapshotError(f"nothing to evaluate: {fault} · fix: {fix}") from error


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    iterations: int
    is_stopped: bool
    """Whether the user stopped the run."""
    files: dict[str, Path]
    """The files of the run, by description."""

    def table(self) -> Table:
        title = f"{'stopped' if self.is_stopped else 'done'} after {self.iterations} iterations"
        table = Table(title=title, title_justify="left", show_header=False, box=None)
        for what, path in self.files.items():
            table.add_row(what, str(path))
        return table


def written_files(folder: Path) -> dict[str, Path]:
    there = {what: folder / name for what, name in _FILES.items() if (folder / name).exists()}
    return {", ".join([what, *_companions(path)]) if path.name == FINAL else what: path for what, path in there.items()}


def _companions(weights: Path) -> list[str]:
    """Names what lies beside the weights, for programs that load them."""
    return [what for what, name in _COMPANIONS.items() if (weights / name).exists()]
