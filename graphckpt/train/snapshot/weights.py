"""Reads weights from a folder, a snapshot's or one that Transformers saved, and sets them on a model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from graphckpt.errors import bullets, first_line
from graphckpt.train.parallel.sharding import is_sharded, local_shard, on_other_stage, shard_like
from graphckpt.train.snapshot.folder import SHARDS, WEIGHTS, SnapshotError

INDEX = f"{WEIGHTS}.index.json"
"""Which shard holds which tensor, as Transformers names and writes it."""
_MODEL = "model."  # begins the names of weights among the shards
_OTHER = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5")  # weights of other formats, which are mostly pickles


def read_weights(
    folder: Path, *, like: Mapping[str, Tensor | None] | None = None, group: Any = None
) -> dict[str, Tensor]:
    """Reads the weights in a folder, on the CPU; a single file takes precedence over shards.

    Args:
        folder: a snapshot, or a folder that Transformers saved.
        like: templates of the weights; of a sharded weight, only the local shard is read.
        group: of the ranks that all call this.

    Raises:
        SnapshotError: there are none, a shard is missing, or a file is broken.
    """
    if (folder / SHARDS).is_dir():
        return _read_sharded(folder / SHARDS, like or {}, group)
    if (folder / WEIGHTS).is_file():
        return _read_file(folder / WEIGHTS)
    if (folder / INDEX).is_file():
        return _read_shards(folder)
    raise SnapshotError(_absent(folder))


def _read_sharded(folder: Path, like: Mapping[str, Tensor | None], group: Any) -> dict[str, Tensor]:
    from graphckpt.train.snapshot import dcp  # noqa: PLC0415 - takes a second, for those who need it

    wanted = {name: like.get(name.removeprefix(_MODEL)) for name in dcp.names(folder) if name.startswith(_MODEL)}
    return {name.removeprefix(_MODEL): tensor for name, tensor in dcp.read(folder, wanted, group).items()}


def _absent(folder: Path) -> str:
    if folder.is_file():
        return f"{folder}: is a file · fix: name the folder that it is in"
    if not folder.is_dir():
        return f"{folder}: no such folder"
    others = sorted(path.name for pattern in _OTHER for path in folder.glob(pattern))
    found = f", but {', '.join(others[:3])}" if others else ""
    fix = "name a snapshot, or a folder that save_pretrained of Transformers wrote"
    return f"{folder}: has no {WEIGHTS} and no {INDEX}{found} · fix: {fix}"


def _read_shards(folder: Path) -> dict[str, Tensor]:
    places = _read_index(folder / INDEX)
    shards = sorted(set(places.values()))
    if faults := list(_missing(folder, shards)):
        fix = "copy or download what is missing"
        raise SnapshotError(f"{bullets(f'{folder / INDEX} names shards that cannot be read', faults)}\nfix: {fix}")
    weights: dict[str, Tensor] = {}
    for shard in shards:
        found = _read_file(folder / shard)
        if lost := [name for name, place in places.items() if place == shard and name not in found]:
            more = f", and {len(lost) - 3} more" if len(lost) > 3 else ""
            fix = "copy or download the shards and the index again, all of one version"
            what = f"lacks {', '.join(lost[:3])}{more}, which {INDEX} places there"
            raise SnapshotError(f"{folder / shard}: {what} · fix: {fix}")
        weights |= found
    return weights


def _missing(folder: Path, shards: list[str]) -> Iterator[str]:
    for shard in shards:
        if Path(shard).name != shard:
            yield f"expected the name of a file in this folder, got {shard!r}"
        elif not (folder / shard).is_file():
            yield f"{shard} is missing"


def _read_index(path: Path) -> dict[str, str]:
    try:
        index: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SnapshotError(f"{path}: cannot be read ({first_line(error)}) · fix: copy or download it again") from error
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not places or not all(isinstance(place, str) for place in places.values()):
        raise SnapshotError(f"{path}: has no weight_map from tensors to shards · fix: copy or download it again")
    return places


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        weights: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise SnapshotError(f"{path}: cannot be read ({first_line(error)}) · fix: copy or download it again") from error
    return weights


def load_weights(model: nn.Module, weights: dict[str, Tensor], where: str) -> None:
    """Sets the weights of a model; a tied weight needs only one of its names.

    Raises:
        SnapshotError: they belong to another model; nothing was changed.
    """
    own = tensors_of(model)
    named = dict(weights)
    places = {_place(own[name]): value for name, value in weights.items() if name in own}
    for name, tensor in own.items():
        if name not in named and _place(tensor) in places:
            named[name] = places[_place(tensor)]
    faults = [f"{name} is missing" for name in own if name not in named]
    faults += [f"{name} is unknown" for name in named if name not in own]
    faults += [
        f"{name} is {tuple(named[name].shape)}, not {tuple(tensor.shape)}"
        for name, tensor in own.items()
        if name in named and named[name].shape != tensor.shape
    ]
    faults += [
        f"{name} is {named[name].dtype}, not {tensor.dtype}"
        for name, tensor in own.items()
        if name in named and named[name].is_floating_point() != tensor.is_floating_point()
    ]
    if faults:
        more = f", and {len(faults) - 3} more" if len(faults) > 3 else ""
        fix = "describe the model and the vocabulary as they were when it was written"
        raise SnapshotError(f"{where}: is of another model: {', '.join(faults[:3])}{more} · fix: {fix}")
    shards = {name: shard_like(own[name], value) for name, value in named.items() if not on_other_stage(own[name])}
    model.load_state_dict(shards, strict=False)  # extra state that is not a tensor is kept


def distinct_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors without shared memory: of several names for one tensor, only the first.

    >>> import torch
    >>> weight = torch.ones(4)
    >>> list(distinct_tensors({"a": weight, "b": weight, "c": weight[:2]}))
    ['a', 'c']
    """
    kept: dict[str, Tensor] = {}
    places: set[Any] = set()
    storages: set[int] = set()
    for name, tensor in tensors.items():
        if _place(tensor) in places:
            continue
        places.add(_place(tensor))
        if is_sharded(tensor):
            kept[name] = tensor
            continue
        storage = tensor.untyped_storage()
        is_alone = storage.data_ptr() not in storages and storage.nbytes() == tensor.nbytes
        storages.add(storage.data_ptr())
        kept[name] = (tensor if is_alone else tensor.clone()).contiguous()
    return kept


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors of a model's state, by name."""
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Returns a key that is equal for two names of one tensor."""
    if not tensor.numel():
        return (id(tensor),)
    if is_sharded(tensor):
        return _place(local_shard(tensor))
    if on_other_stage(tensor):
        return (tensor.untyped_storage()._cdata,)
    return (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
