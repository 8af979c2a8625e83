"""Sharded tensors in one folder, by ``torch.distributed.checkpoint``: each rank writes and reads its own shards.

A folder can be read by any number of processes.
"""

from __future__ import annotations

import importlib
import pickle
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast, final

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from graphckpt.errors import first_line
from graphckpt.train.parallel.sharding import full_tensor_tree, is_packed, is_sharded, on_other_stage
from graphckpt.train.snapshot.folder import SnapshotError, SnapshotWriteError

_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("BytesStorageMetadata", "ChunkStorageMetadata", "TensorStorageMetadata"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", *(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "WindowsPath", "Path", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
    "collections": {"OrderedDict"},
}
"""All classes that the metadata may contain."""
_BROKEN = (
    *(AttributeError, EOFError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError),
    pickle.UnpicklingError,
)


def full_where_packed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors as they are written: packed shards are gathered first, as DCP cannot describe them.

    Collective.
    """
    return {
        name: full_tensor_tree(tensor) if is_packed(tensor) else tensor.detach() for name, tensor in tensors.items()
    }


def write(folder: Path, tensors: Mapping[str, Tensor], group: Any) -> None:
    """Writes what ``full_where_packed`` returned; collective, and a failure on one rank is raised on all.

    Args:
        folder: created if missing.
        tensors: by name; a tensor that is not sharded is written once.
        group: a gloo group of all ranks.

    Raises:
        SnapshotWriteError: a disk is full, or the folder cannot be written.
    """
    try:
        save(dict(tensors), storage_writer=_writer(folder), process_group=group)
    except (CheckpointException, OSError, RuntimeError) as error:
        raise SnapshotWriteError(f"{folder}: {_reason(error)}") from error


def write_later(folder: Path, tensors: Mapping[str, Tensor], group: Any) -> Future[Any]:
    """As ``write``, but in the background, from a copy made now."""
    future = async_save(dict(tensors), storage_writer=_writer(folder), process_group=group)
    return cast("Future[Any]", future)


def wait(future: Future[Any], folder: Path) -> None:
    """Waits for what ``write_later`` began.

    Raises:
        SnapshotWriteError: as ``write`` does.
    """
    try:
        future.result()
    except (CheckpointException, OSError, RuntimeError) as error:
        raise SnapshotWriteError(f"{folder}: {_reason(error)}") from error


def read(folder: Path, like: Mapping[str, Tensor | None], group: Any) -> dict[str, Tensor]:
    """Reads tensors, each sharded like its template; without a template, the full tensor.

    For tensors of another pipeline stage, only shape and dtype are read.

    Args:
        folder: what ``write`` made.
        like: templates by name; only shape, device and sharding are used.
        group: a group of all ranks, which all call this; ``None`` to read alone.

    Raises:
        SnapshotError: a name is missing, or a file is broken.
    """
    reader = _Reader(folder)
    sizes = _sizes(folder, reader)
    if missing := [name for name in like if name not in sizes]:
        raise SnapshotError(f"{folder}: has no {', '.join(missing[:3])} · fix: it was written for another model")
    try:
        found = {name: _target(sizes[name], tensor) for name, tensor in like.items()}
        targets = {name: tensor for name, tensor in found.items() if not on_other_stage(tensor)}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is what `no_dist` says
            load(cast("dict[str, Any]", targets), storage_reader=reader, process_group=group, no_dist=group is None)
    except (CheckpointException, *_BROKEN) as error:
        raise SnapshotError(f"{folder}: cannot be read ({_reason(error)})") from error
    return found


def names(folder: Path) -> list[str]:
    """Returns the names of the tensors in a folder.

    Raises:
        SnapshotError: it is missing or broken.
    """
    return list(_sizes(folder, _Reader(folder)))


def _sizes(folder: Path, reader: _Reader) -> dict[str, TensorStorageMetadata]:
    try:
        found = reader.read_metadata().state_dict_metadata
    except _BROKEN as error:
        raise SnapshotError(f"{folder}: cannot be read ({_reason(error)})") from error
    return {name: kind for name, kind in found.items() if isinstance(kind, TensorStorageMetadata)}


def _target(size: TensorStorageMetadata, like: Tensor | None) -> Tensor:
    dtype = size.properties.dtype
    if like is not None and on_other_stage(like):
        return torch.empty(size.size, dtype=dtype, device=like.device)
    if like is not None and is_sharded(like) and not is_packed(like) and like.shape == size.size:
        return torch.zeros_like(like, dtype=dtype)
    return torch.zeros(size.size, dtype=dtype)


def _writer(folder: Path) -> FileSystemWriter:
    return FileSystemWriter(folder, sync_files=True)


@final
class _Reader(FileSystemReader):
    """Reads the metadata, a pickle, with an allow-list of classes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._file = folder / ".metadata"

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the metadata.

        Raises:
            UnpicklingError: it contains another class.
        """
        del args, kwargs
        with self._file.open("rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"{self._file.name} holds a {type(metadata).__name__}")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        return metadata


@final
class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _CLASSES.get(module, set()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which a list of tensors never contains")
        return getattr(importlib.import_module(module), name)


def _reason(error: BaseException) -> str:
    """Returns the message of the first rank that failed, without its traceback."""
    failures: Mapping[int, Any] = getattr(error, "failures", {})
    for inner, _ in failures.values():
        if isinstance(inner, OSError) and inner.strerror:
            return str(inner.strerror)
        return first_line(inner)
    return str(error.strerror) if isinstance(error, OSError) and error.strerror else first_line(error)
