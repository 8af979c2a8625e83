"""One snapshot: a folder that is whole or absent. Knows no run, only tensors, plain values and files."""

from __future__ import annotations

import json
import re
import warnings
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import torch
from safetensors.torch import save_file
from torch import Tensor

from graphckpt.errors import GraphckptError, first_line
from graphckpt.train.files import hidden, sync
from graphckpt.train.files import remove as remove_path

WEIGHTS = "model.safetensors"
"""File of the weights, which Transformers finds by this name too."""
SHARDS = "shares"
"""Folder of sharded tensors, written by each rank; see ``dcp.py``."""
STATE = "{}.pt"
"""File of a state, by its name."""
MANIFEST = "snapshot.json"
"""Written last; holds size and checksum of every other file."""
_OWN_CHECKSUMS = ".distcp"  # a share, which has checksums within
_FORMAT = 2  # of the folder; a change of what is written needs a new number
_RUST_IO = re.compile(r"I/O error: (.*?) \(os error \d+\)")  # how safetensors words what the system says
_LEFT = re.compile(  # hidden names that a run writes under, and moves aside to
    r"\.(?P<name>model_(?:\d{7,}|best|final)|last_checkpoint|log\.txt|metrics\.json|config\.yaml|plan\.yaml|step\.png)"
    r"\.(?P<kind>tmp|old|trash)(?:\.\w+)?"
)
_CHUNK_BYTES = 1 << 22  # a file is checked in pieces of this size


@final
class SnapshotError(GraphckptError, RuntimeError):
    """A snapshot is missing, broken, or of another model."""


@final
class SnapshotWriteError(GraphckptError, OSError):
    """A snapshot could not be written; nothing of it is left, and what was there before still is."""


def begin(folder: Path) -> None:
    """Makes the folder for the shards of a snapshot, to be written before ``write`` is called.

    Raises:
        SnapshotWriteError: it cannot be made.
    """
    fresh = hidden(folder, "tmp")
    try:
        remove_path(fresh)
        (fresh / SHARDS).mkdir(parents=True)
    except OSError as error:
        raise SnapshotWriteError(f"{folder}: {_reason(error)}") from error


def shards_folder(folder: Path) -> Path:
    """Returns the folder that ``begin`` creates, on any rank."""
    return hidden(folder, "tmp") / SHARDS


def write(
    folder: Path,
    *,
    weights: Mapping[str, Tensor] | None,
    states: Mapping[str, Any],
    info: Mapping[str, Any],
    companions: Callable[[Path], None] = lambda folder: None,
    has_shards: bool = False,
) -> None:
    """Writes a snapshot under a temporary name, syncs it to disk, and renames it to ``folder``.

    A process that is killed at any moment leaves the old folder or the new one under this name, or, for the moment
    between two renames, the old one under a name that ``recover`` knows.

    Args:
        folder: the snapshot; one that is there is replaced.
        weights: of the model, none of which shards memory with another; ``None`` if the shards alone hold them.
        states: tensors and plain values by the name of their file; what ``weights_only`` loads.
        info: metadata of the snapshot, as JSON.
        companions: writes more files into the folder that it is called with.
        has_shards: ``begin`` was called, and the shards are there.

    Raises:
        SnapshotWriteError: the disk is full, the folder cannot be written, or a state cannot be saved.
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
        paths = sorted(path for path in fresh.rglob("*") if path.is_file())
        files = {path.relative_to(fresh).as_posix(): _file_entry(path) for path in paths}
        manifest = json.dumps({"format": _FORMAT, **info, "files": files}, indent=2)
        (fresh / MANIFEST).write_text(manifest + "\n", encoding="utf-8")
        if weights is not None:
            (fresh / WEIGHTS).chmod((fresh / MANIFEST).stat().st_mode)  # safetensors makes it the owner's alone
        for path in (*fresh.rglob("*"), fresh):
            sync(path)
        _put_in_place(fresh, folder)
    except Exception as error:  # also of the companions: training continues without this snapshot
        remove_path(fresh)
        raise SnapshotWriteError(f"{folder}: {_reason(error)}") from error


def recover(folder: Path) -> None:
    """Repairs what a killed process left in an output folder; other hidden files are kept.

    Raises:
        OSError: the folder cannot be written.
    """
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
    """Removes a snapshot, after renaming it, so that a half-removed one is never read."""
    trash = hidden(folder, "trash")
    folder.rename(trash)
    remove_path(trash)


def read_info(folder: Path) -> dict[str, Any]:
    """Returns the metadata of a snapshot, without reading its other files.

    Raises:
        SnapshotError: it is missing, not a snapshot, or of another format.
    """
    if not folder.is_dir():
        raise SnapshotError(f"{folder}: no such snapshot")
    try:
        info: Any = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SnapshotError(f"{folder}: expected a snapshot, found no {MANIFEST}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise SnapshotError(f"{folder / MANIFEST}: is broken ({error})") from error
    known: dict[str, Any] = info if isinstance(info, dict) else {}
    if type(known.get("format")) is not int or known["format"] != _FORMAT:
        raise SnapshotError(f"{folder / MANIFEST}: is of another format than {_FORMAT}, the one that is known")
    if not isinstance(known.get("files"), dict):
        raise SnapshotError(f"{folder / MANIFEST}: files: expected a mapping, got {str(known.get('files'))[:60]!r}")
    return known


def check(folder: Path) -> dict[str, Any]:
    """Reads every byte of a snapshot once, and returns what ``read_info`` does.

    Raises:
        SnapshotError: a file is missing or corrupted.
    """
    info = read_info(folder)
    for name, written in info["files"].items():
        if fault := _entry_fault(name, written):
            raise SnapshotError(f"{folder / MANIFEST}: files[{name!r}]: {fault}")
        path = folder / (Path(SHARDS) if name.startswith(f"{SHARDS}/") else "") / Path(name).name
        try:
            num_bytes = path.stat().st_size
            if num_bytes != written["bytes"]:
                raise SnapshotError(f"{path}: is broken, {num_bytes:,} bytes of {written['bytes']:,}")
            if "crc32" in written and _crc32(path) != written["crc32"]:
                raise SnapshotError(f"{path}: is broken, its checksum is not the one that was written")
        except OSError as error:
            raise SnapshotError(f"{path}: {error.strerror}") from error
    return info


def _entry_fault(name: str, written: Any) -> str | None:
    if Path(name).name != name.removeprefix(f"{SHARDS}/") or Path(name).name in {"", ".", ".."}:
        return f"expected the name of a file in the folder or in {SHARDS}, got another path"
    if not isinstance(written, dict):
        return f"expected a mapping, got {str(written)[:60]!r}"
    limits = {"bytes": 2**63} if name.endswith(_OWN_CHECKSUMS) else {"bytes": 2**63, "crc32": 2**32}
    for key, limit in limits.items():
        value = written.get(key)
        if type(value) is not int or not 0 <= value < limit:
            return f"{key}: expected an int from 0 to below {limit}, got {str(value)[:60]!r}"
    return None


def read_state(folder: Path, name: str) -> Any:
    """Reads a state, on the CPU. Only tensors and plain values are ever unpickled.

    Raises:
        SnapshotError: the file is missing or broken, or holds objects of another kind.
    """
    path = folder / STATE.format(name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about an unknown pickle, which is an error below
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of whatever a broken pickle leads to
        raise SnapshotError(f"{path}: cannot be read ({first_line(error)})") from error


def _put_in_place(fresh: Path, folder: Path) -> None:
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
    if old.exists():
        with suppress(OSError):  # the new one is whole by now; what is left of the old one is removed the next time
            trash = hidden(folder, "trash")
            remove_path(trash)
            old.rename(trash)
            remove_path(trash)


def _crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while piece := file.read(_CHUNK_BYTES):
            checksum = zlib.crc32(piece, checksum)
    return checksum


def _file_entry(path: Path) -> dict[str, int]:
    """Returns the manifest entry of a file; shards contain checksums of their own."""
    num_bytes = path.stat().st_size
    return {"bytes": num_bytes} if path.suffix == _OWN_CHECKSUMS else {"bytes": num_bytes, "crc32": _crc32(path)}


def _reason(error: BaseException) -> str:
    """Returns the system's message, which PyTorch's writer wraps in an error of its own."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    found = _RUST_IO.search(str(error))
    return found[1] if found else first_line(error)
