"""Snapshots on disk: each a folder that is complete or absent; in an output folder, one of them is the last."""

from __future__ import annotations

import json
import re
import shlex
import warnings
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

import torch
from safetensors.torch import save_file
from torch import Tensor

from graphckpt.errors import GraphckptError, first_line
from graphckpt.train.output import hidden, sync, write_text
from graphckpt.train.output import remove as remove_path
from graphckpt.train.snapshot.schema import (
    FORMAT,
    MANIFEST,
    OWN_CHECKSUMS,
    STATE,
    WEIGHTS,
    FormatError,
    RunInfo,
    SnapshotError,
    read_format,
    reading,
    validate,
)

BEST, FINAL = "model_best", "model_final"
LAST = "last_checkpoint"
"""libai's name: a text file that holds the name of a folder."""
_PERIODIC = re.compile(r"model_\d{7,}")
_RUST_IO = re.compile(r"I/O error: (.*?) \(os error \d+\)")  # how safetensors words what the system says
_LEFT = re.compile(  # hidden names that a run writes under, and moves aside to
    r"\.(?P<name>model_(?:\d{7,}|best|final)|last_checkpoint|log\.txt|metrics\.json|config\.yaml|plan\.yaml|step\.png)"
    r"\.(?P<kind>tmp|old|trash)(?:\.\w+)?"
)
_CHUNK_BYTES = 1 << 22  # a file is checked in pieces of this size


@final
class SnapshotWriteError(GraphckptError, OSError):
    """A snapshot could not be written; nothing of it is left, and what was there before still is."""


def write(
    folder: Path,
    *,
    weights: Mapping[str, Tensor] | None,
    states: Mapping[str, Any],
    info: Mapping[str, Any],
    companions: Callable[[Path], None] = lambda folder: None,
    has_shards: bool = False,
) -> None:
    """Writes a snapshot under a temporary name, syncs it to disk, and renames it to ``folder``, which it replaces.

    A process that is killed at any moment leaves the old folder or the new one under this name, or, for the moment
    between two renames, the old one under a name that ``recover`` knows.

    Args:
        folder: the snapshot.
        weights: of the model, none of which shares memory with another; ``None`` if the shards alone hold them.
        states: tensors and plain values by the name of their file; what ``weights_only`` loads.
        info: metadata of the snapshot, as JSON.
        companions: writes more files into the folder that it is called with.
        has_shards: the shards are in ``hidden(folder, "tmp")`` already.
    """
    fresh = hidden(folder, "tmp")
    try:
        if not has_shards:
            remove_path(fresh)
            fresh.mkdir(parents=True)
        if weights is not None:
            save_file(dict(weights), fresh / WEIGHTS, metadata={"format": "pt"})  # Transformers asks for the format
        for name, state in states.items():
            with (fresh / STATE.format(name)).open("wb") as file:
                torch.save(state, file)
        companions(fresh)
        files: dict[str, dict[str, int]] = {}
        for path in sorted(path for path in fresh.rglob("*") if path.is_file()):
            entry = files[path.relative_to(fresh).as_posix()] = {"bytes": path.stat().st_size}
            if path.suffix != OWN_CHECKSUMS:
                entry["crc32"] = _crc32(path)
        # Last, with the sizes of all other files: a folder with a manifest was complete when it was written.
        manifest = json.dumps({"format": FORMAT, **info, "files": files}, indent=2)
        (fresh / MANIFEST).write_text(manifest + "\n", encoding="utf-8")
        if weights is not None:
            (fresh / WEIGHTS).chmod((fresh / MANIFEST).stat().st_mode)  # safetensors makes it the owner's alone
        # Before the rename: a file system may write it to disk before the data, and a crash would leave empty files.
        for path in (*fresh.rglob("*"), fresh):
            sync(path)
        _put_in_place(fresh, folder)
    except Exception as error:  # also of the companions: training continues without this snapshot
        remove_path(fresh)
        raise SnapshotWriteError(f"{folder}: {_reason(error)}") from error


def _crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while piece := file.read(_CHUNK_BYTES):
            checksum = zlib.crc32(piece, checksum)
    return checksum


def _put_in_place(fresh: Path, folder: Path) -> None:
    # A folder cannot be renamed onto one that is not empty, so there are two renames:
    #
    #   killed before both     `.tmp` is incomplete: `recover` removes it
    #   killed between them    `.old` alone has the snapshot: `recover` renames it back
    #   killed after both      `.old` is superfluous: `recover` removes it
    old = hidden(folder, "old")
    remove_path(old)
    if folder.exists():
        folder.rename(old)
    try:
        fresh.rename(folder)
    except (OSError, KeyboardInterrupt):
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise
    sync(folder.parent)
    remove_path(old)


def _reason(error: BaseException) -> str:
    cause: BaseException | None = error  # PyTorch's writer wraps the error of the system
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    match = _RUST_IO.search(str(error))
    return match[1] if match else first_line(error)


def recover(folder: Path) -> None:
    """Repairs what a killed process left in an output folder; other hidden files are kept."""
    for path in list(folder.glob(".*")):
        left = _LEFT.fullmatch(path.name)
        if left is None:
            continue
        target = folder / left["name"]
        if left["kind"] == "old" and not target.exists():
            path.rename(target)
        else:
            remove_path(path)


def remove(folder: Path) -> None:
    # Removing takes many calls: killed among them, a folder under its final name would look like a broken snapshot.
    trash = hidden(folder, "trash")
    folder.rename(trash)
    remove_path(trash)


def read_info(folder: Path) -> RunInfo:
    if not folder.is_dir():
        raise SnapshotError(f"{folder}: no such snapshot")
    try:
        content = (folder / MANIFEST).read_bytes()
    except FileNotFoundError as error:
        raise SnapshotError(f"{folder}: expected a snapshot, found no {MANIFEST}") from error
    except OSError as error:
        raise SnapshotError(f"{folder / MANIFEST}: cannot be read ({error.strerror})") from error
    read_format(content, folder / MANIFEST)
    with reading(folder / MANIFEST):
        info: RunInfo = validate(RunInfo, content, is_json=True)
    return info


def check(folder: Path) -> RunInfo:
    """Reads every byte of a snapshot once, and returns what ``read_info`` does."""
    info = read_info(folder)
    for name, entry in info["files"].items():
        path = folder / name
        try:
            num_bytes = path.stat().st_size
            if num_bytes != entry["bytes"]:
                raise SnapshotError(f"{path}: is broken, {num_bytes:,} bytes of {entry['bytes']:,}")
            if "crc32" in entry and _crc32(path) != entry["crc32"]:
                raise SnapshotError(f"{path}: is broken: its checksum does not match")
        except OSError as error:
            raise SnapshotError(f"{path}: {error.strerror}") from error
    return info


def read_state(folder: Path, name: str) -> Any:
    """Reads a state, on the CPU. Only tensors and plain values are ever unpickled."""
    path = folder / STATE.format(name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about an unknown pickle, which is an error below
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of whatever a broken pickle leads to
        raise SnapshotError(f"{path}: cannot be read ({first_line(error)})") from error


def periodic_name(iteration: int) -> str:
    """Returns the name of the snapshot that is taken after ``iteration``, counted from 0.

    >>> periodic_name(19)
    'model_0000019'
    """
    return f"model_{iteration:07d}"


def _iteration(name: str) -> int:
    return int(name.removeprefix("model_"))


@final
class Snapshots:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self) -> list[str]:
        """Returns the names of all snapshots, periodic ones first, in their order."""
        names = {path.name for path in self.folder.iterdir() if path.is_dir()} if self.folder.is_dir() else set()
        periodic = sorted((name for name in names if _PERIODIC.fullmatch(name)), key=_iteration)
        return [*periodic, *(name for name in (BEST, FINAL) if name in names)]

    def last_name(self) -> str:
        path = self.folder / LAST
        try:
            name = path.read_text(encoding="utf-8").strip()
        except FileNotFoundError as error:
            what = f"train.output_dir: {self.folder} holds no {LAST}, so there is nothing to resume"
            fix = self._offer() or "start without --resume, or name the folder of the run"
            raise SnapshotError(f"{what} · fix: {fix}") from error
        except (OSError, UnicodeDecodeError) as error:
            raise SnapshotError(f"{path}: cannot be read ({error})") from error
        if name in {"", ".."} or Path(name).name != name or not name.isprintable():
            raise SnapshotError(f"{path}: expected the name of a folder, got {name!r} · fix: {self._fix()}")
        return name

    def last(self) -> tuple[Path, RunInfo]:
        """Returns the snapshot that ``last_checkpoint`` names, after reading every byte of it, and its metadata."""
        path = self.folder / self.last_name()
        try:
            return path, check(path)
        except FormatError:  # it is whole: going back to another one would lose iterations
            raise
        except SnapshotError as error:
            what = error if path.is_dir() else f"{self.folder / LAST}: names {path.name}, which is not there"
            raise SnapshotError(f"{what} · fix: {self._fix(path.name)}") from error

    def mark_last(self, name: str) -> None:
        write_text(self.folder / LAST, f"{name}\n")

    def prune(self, newest: str, max_to_keep: int, run: str) -> None:
        """Keeps ``newest`` and the ``max_to_keep - 1`` periodic snapshots of the same run before it.

        Those of other runs stay; those beyond ``newest`` do, until the run that was taken back reaches them.
        """
        older = [name for name in self._before(newest) if self._run_of(name) == run]
        for name in older[: max(0, len(older) - (max_to_keep - 1))]:
            remove(self.folder / name)

    def _run_of(self, name: str) -> str | None:
        try:
            return read_info(self.folder / name)["run"]
        except SnapshotError:
            return None

    def _before(self, newest: str) -> list[str]:
        """Returns the names of periodic snapshots before one; of all others, if it is not periodic."""
        names = [name for name in self.names() if _PERIODIC.fullmatch(name)]
        return [name for name in names if not _PERIODIC.fullmatch(newest) or _iteration(name) < _iteration(newest)]

    def _fix(self, broken: str = "") -> str:
        return self._offer(broken) or "no other snapshot here is whole; start without --resume"

    def _offer(self, broken: str = "") -> str:
        """Returns how to resume from the newest intact snapshot before ``broken``, or an empty string."""
        # Every byte of each is read until one is intact: this is the path of an error, and the advice should work.
        for name in (*reversed(self._before(broken)), *({BEST} & set(self.names()) - {broken})):
            try:
                check(self.folder / name)
            except SnapshotError:
                continue
            command = f"echo {name} > {shlex.quote(str(self.folder / LAST))}"
            return f"resume from {name}, the previous one: {command}, then --resume"
        return ""
