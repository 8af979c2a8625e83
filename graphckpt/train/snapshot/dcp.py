"""Sharded tensors in one folder, by ``torch.distributed.checkpoint``: each rank writes and reads its shards.

A folder can be read by any number of processes.
"""

from __future__ import annotations

import importlib
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from graphckpt.errors import GraphckptError, first_line
from graphckpt.train.parallel.sharding import full_tensor_tree, is_packed, is_sharded, on_other_stage
from graphckpt.train.snapshot.folder import SnapshotWriteError
from graphckpt.train.snapshot.schema import SnapshotError

# DCP's `.metadata` is a pickle, which FileSystemReader loads without a limit: a snapshot from elsewhere could run any
# code. All else in a snapshot is read by `weights_only=True`, safetensors or JSON.
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
_FAULTS = (CheckpointException, OSError, RuntimeError)
_BROKEN = (*_FAULTS, AttributeError, EOFError, LookupError, MemoryError, TypeError, ValueError, pickle.UnpicklingError)


def full_where_packed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gathers packed shards, as DCP cannot describe them; collective."""
    return {name: full_tensor_tree(x) if is_packed(x) else x.detach() for name, x in tensors.items()}


def write(folder: Path, tensors: Mapping[str, Tensor], group: Any) -> None:
    """Writes the result of ``full_where_packed``; collective, and a failure on one rank is raised on all."""
    with _naming(folder, SnapshotWriteError, _FAULTS):
        save(dict(tensors), storage_writer=FileSystemWriter(folder, sync_files=True), process_group=group)


def read(folder: Path, like: Mapping[str, Tensor | None], group: Any) -> dict[str, Tensor]:
    """Reads tensors, each sharded like its template; without a template, the full tensor.

    For tensors of another pipeline stage, only shape and dtype are read.
    """
    sizes = _sizes(folder)
    if missing := [name for name in like if name not in sizes]:
        raise SnapshotError(f"{folder}: has no {', '.join(missing[:3])} · fix: it was written for another model")
    with _naming(folder, SnapshotError, _BROKEN), warnings.catch_warnings():
        tensors = {name: _target(sizes[name], tensor) for name, tensor in like.items()}
        here: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if not on_other_stage(tensor)}
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is what `no_dist` says
        load(here, storage_reader=_Reader(folder), process_group=group, no_dist=group is None)
    return tensors


def names(folder: Path) -> list[str]:
    return list(_sizes(folder))


def _sizes(folder: Path) -> dict[str, TensorStorageMetadata]:
    with _naming(folder, SnapshotError, _BROKEN):
        entries = _Reader(folder).read_metadata().state_dict_metadata
        return {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


def _target(size: TensorStorageMetadata, like: Tensor | None) -> Tensor:
    dtype = size.properties.dtype
    if like is not None and on_other_stage(like):
        return torch.empty(size.size, dtype=dtype, device=like.device)
    if like is not None and is_sharded(like) and not is_packed(like) and like.shape == size.size:
        return torch.zeros_like(like, dtype=dtype)
    return torch.zeros(size.size, dtype=dtype)


@contextmanager
def _naming(folder: Path, kind: type[GraphckptError], faults: tuple[type[BaseException], ...]) -> Iterator[None]:
    """Names the folder in the message of the first rank that failed, without that rank's traceback."""
    try:
        yield
    except faults as error:
        # DCP collects the errors of all ranks and raises a CheckpointException with them on each.
        failures = [inner for inner, _ in getattr(error, "failures", {}).values()]
        cause = failures[0] if failures else error
        reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else first_line(cause)
        raise kind(f"{folder}: {reason if kind is SnapshotWriteError else f'cannot be read ({reason})'}") from error


@final
class _Reader(FileSystemReader):
    """Reads the metadata, a pickle, with an allow-list of classes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._file = folder / ".metadata"

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
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
