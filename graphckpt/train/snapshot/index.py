"""The snapshots in an output folder: names, the last one, and pruning."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

from graphckpt.train.files import write_text
from graphckpt.train.snapshot import folder as snapshot
from graphckpt.train.snapshot.folder import SnapshotError
from graphckpt.train.snapshot.run_info import RunInfo

BEST, FINAL = "model_best", "model_final"
LAST = "last_checkpoint"
"""libai's name: a text file that holds the name of a folder."""
_PERIODIC = re.compile(r"model_\d{7,}")


def periodic_name(iteration: int) -> str:
    """Returns the name of the snapshot that is taken after ``iteration``, counted from 0.

    >>> periodic_name(19)
    'model_0000019'
    """
    return f"model_{iteration:07d}"


@final
class Snapshots:
    """The snapshots in a folder; changes nothing unless ``is_writer``."""

    def __init__(self, folder: Path, *, is_writer: bool = True) -> None:
        self.folder = folder
        self._is_writer = is_writer

    def names(self) -> list[str]:
        """Returns the names of all snapshots, periodic ones first, in their order."""
        if not self.folder.is_dir():
            return []
        found = {path.name for path in self.folder.iterdir() if path.is_dir()}
        periodic = sorted((name for name in found if _PERIODIC.fullmatch(name)), key=_iteration)
        return [*periodic, *(name for name in (BEST, FINAL) if name in found)]

    def last_name(self) -> str:
        """Returns the name in ``last_checkpoint``; whether there is such a snapshot is another question.

        Raises:
            SnapshotError: there is no such file, or it holds no name of a folder.
        """
        try:
            name = (self.folder / LAST).read_text(encoding="utf-8").strip()
        except FileNotFoundError as error:
            where = f"train.output_dir: {self.folder} holds no {LAST}, so there is nothing to resume"
            fix = "start without --resume, or name the folder of the run"
            raise SnapshotError(f"{where} · fix: {self._offer() or fix}") from error
        except (OSError, UnicodeDecodeError) as error:
            raise SnapshotError(f"{self.folder / LAST}: cannot be read ({error})") from error
        if name in {"", ".."} or Path(name).name != name or not name.isprintable():
            raise SnapshotError(f"{self.folder / LAST}: expected the name of a folder, got {name!r}{self._fix()}")
        return name

    def last(self) -> Path:
        """Returns the snapshot that ``last_checkpoint`` names.

        Raises:
            SnapshotError: there is no such file, or it names no folder.
        """
        name = self.last_name()
        if not (self.folder / name).is_dir():
            raise SnapshotError(f"{self.folder / LAST}: names {name}, which is not there{self._fix(name)}")
        return self.folder / name

    def checked_last(self) -> tuple[Path, dict[str, Any]]:
        """Returns the last snapshot, after reading every byte of it, and its metadata.

        Raises:
            SnapshotError: it is missing or broken; the message names the one before it.
        """
        path = self.last()
        try:
            return path, snapshot.check(path)
        except SnapshotError as error:
            raise SnapshotError(f"{error}{self._fix(path.name)}") from error

    def last_run(self) -> tuple[Path, RunInfo]:
        """Returns the last snapshot, every byte of which was read once, and where its run was.

        Raises:
            SnapshotError: it is missing or broken; the message names the one before it.
        """
        path, info = self.checked_last()
        try:
            return path, RunInfo.read(info, path)
        except SnapshotError as error:
            raise SnapshotError(f"{error}{self._fix(path.name)}") from error

    def mark_last(self, name: str) -> None:
        """Makes ``name`` the one that ``last`` returns.

        Raises:
            OSError: the file cannot be written.
        """
        if self._is_writer:
            write_text(self.folder / LAST, f"{name}\n")

    def prune(self, newest: str, max_to_keep: int, run: str) -> None:
        """Keeps ``newest`` and the ``max_to_keep - 1`` periodic snapshots of the same run before it.

        Those of other runs stay; those beyond ``newest`` do, until the run that was taken back reaches them.

        Raises:
            OSError: one cannot be removed.
        """
        if not self._is_writer:
            return
        older = [name for name in self.names() if _PERIODIC.fullmatch(name) and _iteration(name) < _iteration(newest)]
        own = [name for name in older if self._run_of(name) == run]
        for name in own[: max(0, len(own) - (max_to_keep - 1))]:
            snapshot.remove(self.folder / name)

    def _run_of(self, name: str) -> str | None:
        try:
            return snapshot.read_info(self.folder / name).get("run")
        except SnapshotError:
            return None

    def _fix(self, broken: str = "") -> str:
        offer = self._offer(broken)
        return f" · fix: {offer}" if offer else " · fix: no other snapshot here is whole; start without --resume"

    def _offer(self, broken: str = "") -> str:
        """Returns how to resume from the newest intact snapshot before ``broken``, or an empty string."""
        for name in self._whole_before(broken):
            command = f"echo {name} > {shlex.quote(str(self.folder / LAST))}"
            return f"resume from {name}, the previous one: {command}, then --resume"
        return ""

    def _whole_before(self, broken: str) -> Iterator[str]:
        periodic = [name for name in self.names() if _PERIODIC.fullmatch(name) and name != broken]
        if _PERIODIC.fullmatch(broken):
            periodic = [name for name in periodic if _iteration(name) < _iteration(broken)]
        for name in (*reversed(periodic), *(name for name in (BEST,) if name != broken and name in self.names())):
            try:
                snapshot.check(self.folder / name)
            except SnapshotError:
                continue
            yield name


def _iteration(name: str) -> int:
    return int(name.removeprefix("model_"))
