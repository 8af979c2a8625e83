"""Sharded tensors: gathered for a snapshot, sharded again from one. Knows no model and no file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_DATA, _TENSOR = "dp", "tp"
_NAME_OF_SHARD = "is among the shares"


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a DTensor, of which this process holds a shard."""
    return hasattr(tensor, "device_mesh")


def is_packed(tensor: Any) -> bool:
    """Whether the local shard consists of several blocks of the full tensor, as ``packed_shard`` makes it."""
    return is_sharded(tensor) and hasattr(tensor.placements[-1], "split_factor")


def on_other_stage(tensor: Tensor) -> bool:
    """Whether another pipeline stage holds a tensor; ``pipeline.py`` leaves its name and shape here."""
    return tensor.is_meta


def local_shard(tensor: Any) -> Tensor:
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[no-any-return]


def map_leaves(
    state: Any,
    change: Callable[[Any, str], Any],
    name: str = "",
    *,
    is_leaf: Callable[[Any], bool] = lambda value: False,
) -> Any:
    """Returns nested dicts, lists and tuples with every leaf changed; ``name`` begins the names of the leaves.

    >>> map_leaves({"a": [1, 2]}, lambda leaf, name: f"{name}={leaf}", "x")
    {'a': ['x.a.0=1', 'x.a.1=2']}
    """
    if isinstance(state, Mapping) and not is_leaf(state):
        return {key: map_leaves(value, change, f"{name}.{key}", is_leaf=is_leaf) for key, value in state.items()}
    if isinstance(state, list | tuple):
        changed = [map_leaves(value, change, f"{name}.{n}", is_leaf=is_leaf) for n, value in enumerate(state)]
        return type(state)(changed)
    return change(state, name)


def full_tensor_tree(state: Any, *, keep: bool = True) -> Any:
    """Gathers every sharded tensor in nested containers, on the CPU, one by one; collective, in the same order.

    With ``keep=False`` this process joins the collectives, and gets an empty tensor in place of each.
    """

    def gather(leaf: Any, _: str) -> Any:
        if not is_sharded(leaf):
            return leaf
        full = _joined(leaf.detach())
        return full.cpu() if keep else full.new_empty(0)

    return map_leaves(state, gather)


def _joined(tensor: Any) -> Tensor:
    # Over the data-parallel dimension first: FSDP2 shards what tensor parallelism has left, along dim 0. DTensor cannot
    # undo both at once if the second is a packed shard. GPT-2's c_attn.weight, [768, 2304], with dp=2 and tp=2:
    #
    #     local shard [384, 1152] -> over dp [768, 1152] -> over tp [768, 2304]
    mesh, placements = tensor.device_mesh, tensor.placements
    if mesh.ndim == 1:
        return _joined_packed(tensor) if is_packed(tensor) else tensor.full_tensor()
    from torch.distributed.tensor import DTensor, Shard  # noqa: PLC0415 - a second, for those who need it

    shape = list(tensor.shape)
    if not placements[1].is_replicate():
        shape[placements[1].dim] //= mesh.size(1)
    stride = torch.empty(shape, device="meta").stride()
    mine = DTensor.from_local(
        tensor.to_local(), mesh[_DATA], [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride
    ).full_tensor()
    return _joined(DTensor.from_local(mine, mesh[_TENSOR], placements[1:], run_check=False))


def _joined_packed(tensor: Any) -> Tensor:
    # DTensor's own `full_tensor()` raises for packed shards up to torch 2.11. As plain shards, the ranks' blocks follow
    # each other, and are put in order here: q0 k0 v0 q1 k1 v1 -> q0 q1 k0 k1 v0 v1.
    from torch.distributed.tensor import DTensor, Shard  # noqa: PLC0415 - a second, for those who need it

    mesh, (placement,) = tensor.device_mesh, tensor.placements
    dim = placement.dim
    by_rank = DTensor.from_local(tensor.to_local(), mesh, [Shard(dim)], run_check=False).full_tensor()
    blocks = by_rank.unflatten(dim, (mesh.size(), placement.split_factor, -1))
    full: Tensor = blocks.transpose(dim, dim + 1).flatten(dim, dim + 2)
    return full


def shard_like(like: Tensor, value: Tensor) -> Tensor:
    if not is_sharded(like) or is_sharded(value):
        return value
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor  # noqa: PLC0415 - a second, for those who need it

    template: Any = like
    mesh, placements = template.device_mesh, template.placements
    value = value.to(template.device)
    if mesh.ndim == 1:
        return distribute_tensor(value, mesh, placements, src_data_rank=None)
    # The reverse of `_joined`. `src_data_rank=None` communicates nothing: each rank cuts its shard out of the full
    # tensor that it has.
    mine = distribute_tensor(value, mesh[_TENSOR], placements[1:], src_data_rank=None).to_local()
    share = distribute_tensor(mine, mesh[_DATA], [Shard(0)], src_data_rank=None).to_local()
    return DTensor.from_local(share, mesh, placements, run_check=False, shape=template.shape, stride=template.stride())


def extract_sharded(state: Any, name: str, into: dict[str, Tensor], takes: Callable[[Any], bool] = is_sharded) -> Any:
    """Replaces the sharded tensors in nested containers by placeholders, and puts them by name into ``into``."""

    def extract(leaf: Any, name: str) -> Any:
        if not takes(leaf):
            return leaf
        into[name] = leaf
        return {_NAME_OF_SHARD: name, "shape": list(leaf.shape)}

    return map_leaves(state, extract, name)


def _is_placeholder(value: Any) -> bool:
    return isinstance(value, Mapping) and _NAME_OF_SHARD in value


def extracted_shapes(state: Any) -> dict[str, list[int]]:
    shapes: dict[str, list[int]] = {}

    def note(leaf: Any, _: str) -> None:
        if _is_placeholder(leaf):
            shapes[leaf[_NAME_OF_SHARD]] = leaf["shape"]

    map_leaves(state, note, is_leaf=_is_placeholder)
    return shapes


def restore_sharded(state: Any, tensors: Mapping[str, Tensor]) -> Any:
    return map_leaves(
        state, lambda leaf, _: tensors[leaf[_NAME_OF_SHARD]] if _is_placeholder(leaf) else leaf, is_leaf=_is_placeholder
    )


def on_cpu(state: Any, *, copy: bool = False) -> Any:
    return map_leaves(state, lambda leaf, _: leaf.detach().to("cpu", copy=copy) if isinstance(leaf, Tensor) else leaf)
