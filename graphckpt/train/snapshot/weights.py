"""Reads weights from a folder, a snapshot's or one that Transformers saved, and sets them on a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from graphckpt.errors import bullets, first_line
from graphckpt.train.parallel.sharding import is_sharded, local_shard, on_other_stage, shard_like
from graphckpt.train.snapshot.schema import SHARDS, WEIGHTS, SnapshotError

INDEX = f"{WEIGHTS}.index.json"
"""File that names the shard of each tensor, as Transformers writes it."""
_MODEL = "model."  # begins the names of weights among the shards
_OTHER = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5")  # weights of other formats, which are mostly pickles
_FIX = "copy or download it again"


def read_weights(
    folder: Path, *, like: Mapping[str, Tensor | None] | None = None, group: Any = None
) -> dict[str, Tensor]:
    """Reads the weights in a folder, on the CPU; a single file takes precedence over shards."""
    if (folder / SHARDS).is_dir():
        from graphckpt.train.snapshot import dcp  # noqa: PLC0415 - takes a second, for those who need it

        names = [name for name in dcp.names(folder / SHARDS) if name.startswith(_MODEL)]
        wanted = {name: (like or {}).get(name.removeprefix(_MODEL)) for name in names}
        tensors = dcp.read(folder / SHARDS, wanted, group)
        return {name.removeprefix(_MODEL): tensor for name, tensor in tensors.items()}
    if (folder / WEIGHTS).is_file():
        return _read_file(folder / WEIGHTS)
    if (folder / INDEX).is_file():
        return _read_indexed(folder)
    if not folder.is_dir():
        what = "is a file · fix: name the folder that it is in" if folder.is_file() else "no such folder"
        raise SnapshotError(f"{folder}: {what}")
    others = sorted(path.name for pattern in _OTHER for path in folder.glob(pattern))
    more = f", but {', '.join(others[:3])}" if others else ""
    fix = "name a snapshot, or a folder that save_pretrained of Transformers wrote"
    raise SnapshotError(f"{folder}: has no {WEIGHTS} and no {INDEX}{more} · fix: {fix}")


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        weights: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise SnapshotError(f"{path}: cannot be read ({first_line(error)}) · fix: {_FIX}") from error
    return weights


def _read_indexed(folder: Path) -> dict[str, Tensor]:
    try:
        index: Any = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SnapshotError(f"{folder / INDEX}: cannot be read ({first_line(error)}) · fix: {_FIX}") from error
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not places or not all(isinstance(place, str) for place in places.values()):
        raise SnapshotError(f"{folder / INDEX}: has no weight_map from tensors to shards · fix: {_FIX}")
    files = sorted(set(places.values()))
    faults = [f"expected the name of a file in this folder, got {name!r}" for name in files if Path(name).name != name]
    if faults := faults or [f"{name} is missing" for name in files if not (folder / name).is_file()]:
        what = bullets(f"{folder / INDEX} names shards that cannot be read", faults)
        raise SnapshotError(f"{what}\nfix: copy or download the missing shards")
    weights: dict[str, Tensor] = {}
    for name in files:
        tensors = _read_file(folder / name)
        if lost := [tensor for tensor, place in places.items() if place == name and tensor not in tensors]:
            what = f"lacks {_first(lost)}, which {INDEX} places there"
            fix = "copy or download the shards and the index again, all of one version"
            raise SnapshotError(f"{folder / name}: {what} · fix: {fix}")
        weights |= tensors
    return weights


def _first(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f", and {len(names) - 3} more" if len(names) > 3 else "")


def load_weights(model: nn.Module, weights: dict[str, Tensor], where: str) -> None:
    """Sets the weights of a model; a tied weight needs only one of its names."""
    tensors = tensors_of(model)
    # GPT-2's `transformer.wte.weight` and `lm_head.weight` are one tensor, of which safetensors stores one name; which
    # one depends on the writer. So a value is given to all names of its place in memory.
    places = {_place(tensors[name]): value for name, value in weights.items() if name in tensors}
    named = {name: places[_place(tensor)] for name, tensor in tensors.items() if _place(tensor) in places} | weights
    faults = [f"{name} is missing" for name in tensors if name not in named]
    faults += [f"{name} is unknown" for name in named if name not in tensors]
    for name, value, tensor in [(name, named[name], tensor) for name, tensor in tensors.items() if name in named]:
        if value.shape != tensor.shape:
            faults.append(f"{name} is {tuple(value.shape)}, not {tuple(tensor.shape)}")
        if value.is_floating_point() != tensor.is_floating_point():
            faults.append(f"{name} is {value.dtype}, not {tensor.dtype}")
    if faults:
        fix = "describe the model and the vocabulary as they were when it was written"
        raise SnapshotError(f"{where}: is of another model: {_first(faults)} · fix: {fix}")
    shards = {
        name: shard_like(tensors[name], value) for name, value in named.items() if not on_other_stage(tensors[name])
    }
    model.load_state_dict(shards, strict=False)  # extra state that is not a tensor is kept


def distinct_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors without shared memory: of several names for one tensor, only the first.

    >>> import torch
    >>> weight = torch.ones(4)
    >>> list(distinct_tensors({"a": weight, "b": weight, "c": weight[:2]}))
    ['a', 'c']
    """
    distinct: dict[str, Tensor] = {}
    places: set[Any] = set()
    storages: set[int] = set()
    for name, tensor in tensors.items():
        if _place(tensor) in places:
            continue
        places.add(_place(tensor))
        if is_sharded(tensor):
            distinct[name] = tensor
            continue
        storage = tensor.untyped_storage()
        # safetensors refuses tensors that share memory.
        is_alone = storage.data_ptr() not in storages and storage.nbytes() == tensor.nbytes
        storages.add(storage.data_ptr())
        distinct[name] = (tensor if is_alone else tensor.clone()).contiguous()
    return distinct


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def _place(tensor: Tensor) -> tuple[Any, ...]:
    if not tensor.numel():
        # Empty tensors all have address 0, and are not tied for that.
        return (id(tensor),)
    if is_sharded(tensor):
        return _place(local_shard(tensor))
    if on_other_stage(tensor):
        # A meta tensor has no address; tied ones share their storage object.
        return (tensor.untyped_storage()._cdata,)
    return (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
