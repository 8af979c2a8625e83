"""The output folder of a run, used by one run at a time; nothing is written before the run can start."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from rich.table import Table

from graphckpt.errors import ConfigError
from graphckpt.train.snapshot import folder as snapshot
from graphckpt.train.snapshot.index import BEST, FINAL, LAST, Snapshots
from graphckpt.train.snapshot.lock import FolderLock

LOG, METRICS, CONFIG = "log.txt", "metrics.json", "config.yaml"
PLAN, PICTURE = "plan.yaml", "step.png"
_SCALARS = "events.out.tfevents.*"  # of TensorBoard
_FILES = {
    "weights, config, tokenizer": FINAL,
    "best at the evaluation": BEST,
    "last snapshot, for --resume": LAST,
    "memory of a step": PICTURE,
    "metrics": METRICS,
    "log": LOG,
    "config": CONFIG,
}


@final
class RunFolder:
    """The output folder of a run, which need not exist yet.

    Args:
        path: of the folder.
        resume: resume the run in it.
        overwrite: replace the run in it.
    """

    def __init__(self, path: Path, *, resume: bool = False, overwrite: bool = False) -> None:
        self.path = path
        self._resume = resume
        self._overwrite = overwrite
        self._lock = FolderLock(path)
        self._made: list[Path] = []
        self._is_claimed = False
        self._has_begun = False

    def claim(self) -> None:
        """Locks the folder if a run may start here; otherwise writes nothing.

        Raises:
            ConfigError: another process trains in the folder, or it contains a run that is not resumed or replaced.
            SnapshotError: the run that is to be resumed has no snapshot.
            OSError: the folder cannot be written.
        """
        if self._is_claimed:
            return
        self._lock.check()
        if self._resume:
            Snapshots(self.path).last_name()
        else:
            self._check_free()
        self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
            self._is_claimed = True
            if self._resume:
                snapshot.recover(self.path)
        except BaseException:
            self.release()
            raise

    def begin(self) -> None:
        """Removes the files of a run that is to be replaced.

        Raises:
            ConfigError: another run has begun here.
            OSError: the folder cannot be written.
        """
        self._has_begun = True
        self.path.mkdir(parents=True, exist_ok=True)
        if self._resume:
            return
        self._check_free()
        files = [*map(self.path.joinpath, (LAST, METRICS, LOG, CONFIG, PLAN, PICTURE)), *self.path.glob(_SCALARS)]
        for file in files:
            file.unlink(missing_ok=True)
        for name in Snapshots(self.path).names():
            snapshot.remove(self.path / name)
        snapshot.recover(self.path)

    def release(self) -> None:
        """Unlocks the folder; removes it again if the run has not begun."""
        self._lock.release(discard=not self._has_begun)
        for folder in [] if self._has_begun else self._made:
            with suppress(OSError):  # it is not empty
                folder.rmdir()
        self._is_claimed = self._has_begun = False
        self._made = []

    def held(self) -> list[str]:
        """Returns the names of an earlier run's files."""
        found = [name for name in (LAST, METRICS, LOG, CONFIG) if (self.path / name).exists()]
        return [*Snapshots(self.path).names(), *found]

    def _check_free(self) -> None:
        held = [] if self._overwrite else self.held()
        if not held:
            return
        listed = ", ".join(held[:4]) + (f" and {len(held) - 4} more" if len(held) > 4 else "")
        fixes = "another train.output_dir, or train.overwrite=True to replace it"
        go_on = "--resume to continue it, " if LAST in held else ""
        none = "" if LAST in held else " (--resume needs a snapshot, and there is none)"
        raise ConfigError(f"train.output_dir: {self.path} already contains a run: {listed} · fix: {go_on}{fixes}{none}")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """The result of a run."""

    iterations: int
    is_stopped: bool
    """Whether the user stopped the run."""
    files: dict[str, Path]
    """The files of the run, by description."""

    def table(self) -> Table:
        """Returns a table of the files."""
        how = "stopped" if self.is_stopped else "done"
        title = f"{how} after {self.iterations} iterations"
        table = Table(title=title, title_justify="left", show_header=False, box=None)
        for what, path in self.files.items():
            table.add_row(what, str(path))
        return table


def written_files(folder: Path) -> dict[str, Path]:
    """Returns the files in an output folder, by description."""
    return {what: folder / name for what, name in _FILES.items() if (folder / name).exists()}
