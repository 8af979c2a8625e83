"""Arguments that share memory and that forward modifies in place: their copies share memory in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch

from graphckpt.errors import RecomputeError
from graphckpt.rules.engine.argument import TensorProperties
from graphckpt.rules.engine.execution import RecomputableCall
from graphckpt.rules.engine.mismatch import unknown_alias


class _Member(NamedTuple):
    position: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    """In elements, from the first one of the group."""
    has_history: bool
    """Whether it is, or is a view of, the tensor of the group that requires grad."""
    properties: TensorProperties


@final
class AliasedArguments:
    """Arguments of one call that share memory.

    Args:
        frame: The call.
        tensors: Their positions among the arguments, and the tensors.

    Raises:
        RecomputeError: The aliasing cannot be reproduced: their dtypes differ, one is a conjugate or negative view, or
            two that require grad are not views of the same base.
    """

    __slots__ = ("_members", "_num_elements")

    def __init__(self, frame: RecomputableCall, tensors: Sequence[tuple[int, torch.Tensor]]) -> None:
        roots = {id(root) for _, tensor in tensors if (root := _root(tensor)).requires_grad}
        kinds = {(tensor.dtype, tensor.is_conj(), tensor.is_neg()) for _, tensor in tensors}
        if len(roots) > 1 or len(kinds) > 1 or any(tensor.is_conj() or tensor.is_neg() for _, tensor in tensors):
            names = [frame.name_of(position) for position, _ in tensors]
            raise RecomputeError(unknown_alias(frame.block.title, names))
        begin = min(int(tensor.storage_offset()) for _, tensor in tensors)
        self._members = [
            _Member(
                position,
                tensor.size(),
                tensor.stride(),
                int(tensor.storage_offset()) - begin,
                id(_root(tensor)) in roots,
                TensorProperties(tensor),
            )
            for position, tensor in tensors
        ]
        self._num_elements = max(member.offset + _span(member.size, member.stride) for member in self._members)

    def rebuild(self, taken: list[Any]) -> None:
        """Replaces the members in ``taken``, which are copies, by views of one tensor."""
        values = [taken[member.position].detach() for member in self._members]
        flat = torch.empty(self._num_elements, dtype=values[0].dtype, device=values[0].device)
        with torch.no_grad():
            for member, value in zip(self._members, values, strict=True):
                once = tuple(slice(1) if step == 0 else slice(None) for step in member.stride)  # 1 if expanded
                flat.as_strided(member.size, member.stride, member.offset)[once].copy_(value[once])
        with torch.enable_grad():
            if any(member.has_history for member in self._members):
                flat = flat.requires_grad_().clone()  # no leaf, which could not be modified in place
            apart = flat.detach()
            for member in self._members:
                base = flat if member.has_history else apart
                view = base.as_strided(member.size, member.stride, member.offset)
                taken[member.position] = member.properties.apply_class_to(view)


def alias_groups(tensors: Sequence[tuple[int, torch.Tensor]]) -> list[set[int]]:
    """Returns the positions of the tensors that share memory with another one, a set for each storage."""
    groups: dict[int, set[int]] = {}
    for position, tensor in tensors:
        if has_storage(tensor):
            groups.setdefault(id(tensor.untyped_storage()), set()).add(position)
    return [group for group in groups.values() if len(group) > 1]


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor has one storage of its own: wrappers, sparse and nested tensors have none."""
    return tensor.layout is torch.strided and not tensor.is_nested and not hasattr(tensor, "__tensor_flatten__")


def _root(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._base if tensor._is_view() and tensor._base is not None else tensor


def _span(size: torch.Size, stride: tuple[int, ...]) -> int:
    return 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True)) if all(size) else 0
