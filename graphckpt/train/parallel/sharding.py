"""Tensors that are cut over processes: put together for a snapshot, cut again from one. Knows no model and no file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_DATA, _TENSOR = "dp", "tp"
_TAKEN = "is among the shares"


def is_cut(tensor: Any) -> bool:
    """Whether a tensor is a DTensor, of which this process has a share."""
    return hasattr(tensor, "device_mesh")


def is_packed(tensor: Any) -> bool:
    """Whether this process's share is several boxes of the whole, as ``packed_shard`` makes it."""
    return is_cut(tensor) and hasattr(tensor.placements[-1], "split_factor")


def is_elsewhere(tensor: Tensor) -> bool:
    """Whether another stage of a pipeline holds a tensor; ``stages.py`` leaves its name and shape here."""
    return tensor.is_meta


def local(tensor: Any) -> Tensor:
    """Returns this process's share of a tensor that is cut."""
    share: Tensor = tensor.to_local()
    return share


def whole(state: Any, *, keep: bool = True) -> Any:
    """Returns tensors, or nested plain containers of them, with every share put together, on the CPU, one by one.

    All processes have to call this, with the same names in the same order.

    Args:
        state: what to put together; what is not cut is returned as it is.
        keep: ``False`` takes part, and returns an empty tensor in place of each.
    """
    if is_cut(state):
        full = _joined(state.detach())
        return full.cpu() if keep else full.new_empty(0)
    if isinstance(state, Mapping):
        return {key: whole(value, keep=keep) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)([whole(value, keep=keep) for value in state])
    return state


def _joined(tensor: Any) -> Tensor:
    """Returns all of a tensor that is cut; first over the processes that share batches, then over the others.

    FSDP2 cuts what tensor parallelism has left to it, along dim 0. DTensor cannot undo both in one go if the second is
    a cut of several blocks, as ``packed_shard`` makes it.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    if mesh.ndim == 1:
        full: Tensor = tensor.full_tensor()
        return full
    from torch.distributed.tensor import DTensor, Shard  # noqa: PLC0415 - a second, for those who need it

    shape = list(tensor.shape)
    if not placements[1].is_replicate():
        shape[placements[1].dim] //= mesh.size(1)
    stride = torch.empty(shape, device="meta").stride()
    mine = DTensor.from_local(
        tensor.to_local(), mesh[_DATA], [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride
    ).full_tensor()
    joined: Tensor = DTensor.from_local(mine, mesh[_TENSOR], placements[1:], run_check=False).full_tensor()
    return joined


def shared_as(like: Tensor, value: Tensor) -> Tensor:
    """Returns this process's share of a whole tensor, cut as ``like`` is; or ``value`` itself, if that is whole."""
    if not is_cut(like) or is_cut(value):
        return value
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor  # noqa: PLC0415 - a second, for those who need it

    cut: Any = like
    mesh, placements = cut.device_mesh, cut.placements
    value = value.to(cut.device)
    if mesh.ndim == 1:
        return distribute_tensor(value, mesh, placements, src_data_rank=None)
    mine = distribute_tensor(value, mesh[_TENSOR], placements[1:], src_data_rank=None).to_local()
    share = distribute_tensor(mine, mesh[_DATA], [Shard(0)], src_data_rank=None).to_local()
    return DTensor.from_local(share, mesh, placements, run_check=False, shape=cut.shape, stride=cut.stride())


def taken_out(state: Any, name: str, into: dict[str, Tensor], takes: Callable[[Any], bool] = is_cut) -> Any:
    """Returns nested plain containers without the tensors that are cut, which are put by name into ``into``.

    Args:
        state: what to take apart; it stays as it is.
        name: of it, and the beginning of the names in it.
        into: where to put tensors.
        takes: says which.
    """
    if takes(state):
        into[name] = state
        return {_TAKEN: name, "shape": list(state.shape)}
    if isinstance(state, Mapping):
        return {key: taken_out(value, f"{name}.{key}", into, takes) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)([taken_out(value, f"{name}.{number}", into, takes) for number, value in enumerate(state)])
    return state


def names_of(state: Any) -> dict[str, list[int]]:
    """Returns the names of what ``taken_out`` took out, with the shapes."""
    if isinstance(state, Mapping):
        if _TAKEN in state:
            return {state[_TAKEN]: state["shape"]}
        return {name: shape for value in state.values() for name, shape in names_of(value).items()}
    if isinstance(state, list | tuple):
        return {name: shape for value in state for name, shape in names_of(value).items()}
    return {}


def placeholder_shape(value: Any) -> list[int] | None:
    """Returns the shape of what ``taken_out`` took out; ``None`` where it left no note."""
    if not isinstance(value, Mapping) or set(value) != {_TAKEN, "shape"} or not isinstance(value[_TAKEN], str):
        return None
    shape = value["shape"]
    is_shape = isinstance(shape, list) and all(isinstance(size, int) and size >= 0 for size in shape)
    return shape if is_shape else None


def put_back(state: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Undoes ``taken_out``, with tensors by the names that it gave them."""
    if isinstance(state, Mapping):
        if _TAKEN in state:
            return tensors[state[_TAKEN]]
        return {key: put_back(value, tensors) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)([put_back(value, tensors) for value in state])
    return state


def cut_like(optimizer: Optimizer, graph: dict[str, Any]) -> None:
    """Cuts the state of an optimizer, as a snapshot has it, as the optimizer's parameters are cut; in place."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(map(is_cut, parameters)):
        return
    for key in [key for key in graph if "Optimizer" in key]:
        states = graph[key]["state"]
        graph[key] = {**graph[key], "state": {n: _cut(parameters[int(n)], state) for n, state in states.items()}}


def _cut(parameter: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: shared_as(parameter, value) if isinstance(value, Tensor) and value.shape == parameter.shape else value
        for name, value in state.items()
    }


def of_all_stages(graphs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the state of a graph from those that the stages have, each with the optimizer's state of its weights."""
    merged = dict(graphs[0])
    for key in [key for key in merged if "Optimizer" in key]:
        states = {number: state for graph in reversed(graphs) for number, state in graph[key]["state"].items()}
        merged[key] = {**merged[key], "state": dict(sorted(states.items()))}
    return merged


def on_cpu(state: Any) -> Any:
    """Returns nested plain containers with their tensors on the CPU."""
    if isinstance(state, Tensor):
        return state.detach().cpu()
    if isinstance(state, Mapping):
        return {key: on_cpu(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)([on_cpu(value) for value in state])
    return state
