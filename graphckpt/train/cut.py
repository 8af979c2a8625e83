"""Tensors that are cut over processes: put together for a snapshot, cut again from one. Knows no model and no file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def is_cut(tensor: Any) -> bool:
    """Whether a tensor is a DTensor, of which this process has a share."""
    return hasattr(tensor, "device_mesh")


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
        full = state.detach().full_tensor()
        return full.cpu() if keep else full.new_empty(0)
    if isinstance(state, Mapping):
        return {key: whole(value, keep=keep) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)([whole(value, keep=keep) for value in state])
    return state


def shared_as(like: Tensor, value: Tensor) -> Tensor:
    """Returns this process's share of a whole tensor, cut as ``like`` is; or ``value`` itself, if that is whole."""
    if not is_cut(like) or is_cut(value):
        return value
    from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415 - a second, for those who need it

    cut: Any = like
    return distribute_tensor(value.to(cut.device), cut.device_mesh, cut.placements, src_data_rank=None)


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
