"""Sharded tensors in one folder, by ``torch.distributed.checkpoint``: each rank writes and reads its shards.

A folder can be read by any number of processes.
"""

from __future__ import annotations

import importlib
import pickle
import struct
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, final

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
_METADATA = "torch.distributed.checkpoint.metadata"
_RECORDS = {
    _METADATA: {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
        *("BytesStorageMetadata", "ChunkStorageMetadata", "TensorStorageMetadata"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
}
"""The dataclasses that the metadata consists of."""
_CLASSES = {
    **_RECORDS,
    _METADATA: {*_RECORDS[_METADATA], "_MEM_FORMAT_ENCODING"},
    "torch": {"Size", *(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "WindowsPath", "Path", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
    "collections": {"OrderedDict"},
}
"""All classes that the metadata may contain."""
_FAULTS = (CheckpointException, OSError, RuntimeError)
_BROKEN = (
    *(*_FAULTS, ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, TypeError, ValueError),
    *(pickle.UnpicklingError, struct.error),
)


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
        for entry in metadata.storage_data.values():
            if Path(entry.relative_path).name != entry.relative_path:  # it could be any file of the machine
                raise pickle.UnpicklingError(f"{self._file.name} names {entry.relative_path!r}, outside of its folder")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        return metadata


def _limited(opcode: bytes, owner: Callable[[Any], Any], is_allowed: Callable[[type], bool]) -> Callable[[Any], None]:
    load: Callable[[Any], None] = pickle._Unpickler.dispatch[opcode[0]]

    def load_limited(unpickler: Any) -> None:
        kind = type(owner(unpickler))
        if not is_allowed(kind):
            raise pickle.UnpicklingError(f"it changes an object of {kind.__name__}, which a list of tensors never does")
        load(unpickler)

    return load_limited


def _refuse(_: Any) -> None:
    raise pickle.UnpicklingError("it holds an opcode that a list of tensors never holds")


def _is_record(kind: type) -> bool:
    return kind.__name__ in _RECORDS.get(kind.__module__, ())


def _is_container(kind: type) -> bool:
    return kind in {dict, list, OrderedDict}


@final
class _Unpickler(pickle._Unpickler):
    """Makes objects of the listed classes, and changes no object that it has not made.

    A list of classes does not suffice: ``BUILD`` sets attributes of whatever lies on the stack, which may be a class of
    the process, a function or a member of an enum. Python's implementation, unlike the one in C, can look at it before.
    (PyTorch's ``weights_only=True`` reads protocol 2 alone, and DCP writes 4.)
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **pickle._Unpickler.dispatch,
        pickle.BUILD[0]: _limited(pickle.BUILD, lambda self: self.stack[-2], _is_record),
        pickle.APPEND[0]: _limited(pickle.APPEND, lambda self: self.stack[-2], _is_container),
        pickle.SETITEM[0]: _limited(pickle.SETITEM, lambda self: self.stack[-3], _is_container),
        # Those of many values find their object below the mark.
        pickle.APPENDS[0]: _limited(pickle.APPENDS, lambda self: self.metastack[-1][-1], _is_container),
        pickle.SETITEMS[0]: _limited(pickle.SETITEMS, lambda self: self.metastack[-1][-1], _is_container),
        # EXT takes classes from the registry of `copyreg`, past `find_class`; DCP writes none of the others.
        **dict.fromkeys((pickle.EXT1[0], pickle.EXT2[0], pickle.EXT4[0]), _refuse),
        **dict.fromkeys((pickle.PERSID[0], pickle.BINPERSID[0], pickle.INST[0], pickle.OBJ[0]), _refuse),
        **dict.fromkeys((pickle.NEWOBJ_EX[0], pickle.ADDITEMS[0]), _refuse),
    }

    def find_class(self, module: str, name: str) -> Any:
        if name not in _CLASSES.get(module, set()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which a list of tensors never contains")
        return getattr(importlib.import_module(module), name)
