"""Reads weights from a folder: a snapshot, or a model that Transformers saved, in one file or in shards."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from graphckpt.errors import bullets
from graphckpt.train.snapshot import SHARES, WEIGHTS, SnapshotError, first_line

INDEX = f"{WEIGHTS}.index.json"
"""Which shard holds which tensor, as Transformers names and writes it."""
_MODEL = "model."  # begins the names of weights among the shares
_OTHER = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5")  # weights of other formats, which are mostly pickles


def read_weights(
    folder: Path, *, like: Mapping[str, Tensor | None] | None = None, group: Any = None
) -> dict[str, Tensor]:
    """Returns the weights in a folder, on the CPU; of one file and shards, those of the one file.

    Args:
        folder: of a snapshot, or what Transformers saved.
        like: what the weights are for; of what is cut over processes, a snapshot's own shares are read.
        group: of the processes that all call this.

    Raises:
        SnapshotError: there are none, a shard is missing, or a file is broken.
    """
    if (folder / SHARES).is_dir():
        return _read_shares(folder / SHARES, like or {}, group)
    if (folder / WEIGHTS).is_file():
        return _read_file(folder / WEIGHTS)
    if (folder / INDEX).is_file():
        return _read_shards(folder)
    raise SnapshotError(_absent(folder))


def _read_shares(folder: Path, like: Mapping[str, Tensor | None], group: Any) -> dict[str, Tensor]:
    from graphckpt.train import shares  # noqa: PLC0415 - takes a second, for those who need it

    wanted = {name: like.get(name.removeprefix(_MODEL)) for name in shares.names(folder) if name.startswith(_MODEL)}
    return {name.removeprefix(_MODEL): tensor for name, tensor in shares.read(folder, wanted, group).items()}


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
            yield f"{shard!r} is no name of a file in this folder"
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
