"""Values of modules that a forward changes, as they were when it began."""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import nn

from graphckpt.undo import ABSENT, CONTAINERS


@final
@dataclass(frozen=True, slots=True)
class ChangedValue:
    """A place that forward changes: ``owner[key]``. ``in_place`` if its tensor is modified, not replaced."""

    owner: dict[str, Any]
    key: str
    in_place: bool

    def take(self) -> Any:
        """Returns the present value, safe from later modifications."""
        value = self.owner.get(self.key, ABSENT)
        if isinstance(value, torch.Tensor):
            return value.detach().clone() if self.in_place else value.detach().requires_grad_(value.requires_grad)
        return copy.copy(value) if isinstance(value, CONTAINERS) else value

    def fresh(self, value: Any) -> Any:
        """Returns a taken value for a recomputation, which may modify it in place."""
        if not isinstance(value, torch.Tensor):
            return copy.copy(value) if isinstance(value, CONTAINERS) else value
        present = self.owner.get(self.key)
        if isinstance(present, nn.Parameter):
            return nn.Parameter(value.clone(), requires_grad=present.requires_grad)
        if not self.in_place:
            return value
        fresh = value.clone()
        if isinstance(present, torch.Tensor) and present.is_leaf:  # such as a parameter of `functional_call`
            fresh.requires_grad_(present.requires_grad)
        return fresh


class Snapshot(NamedTuple):
    """The state of a block's modules when the original forward began.

    Of tuples rather than lists: Python's garbage collector need not visit those that hold numbers only.
    """

    tensors: tuple[Any, ...]
    versions: tuple[int, ...]
    modes: tuple[bool, ...]
    changed: tuple[tuple[ChangedValue, Any], ...]
    copies: dict[int, torch.Tensor]
    """Of small buffers that are not known to move, by their index in ``tensors``."""
    attributes: tuple[tuple[weakref.ref[nn.Module], str, torch.Tensor, int], ...]
    """Tensors that are attributes of a module and no buffers, as hooks set them, and their versions."""
    forwards: tuple[tuple[weakref.ref[nn.Module], Any], ...]
    """The ``forward`` attributes of modules that replace that of the class, such as policies."""
    policy_changes: int
    """How many there had been."""


def is_sharding(now: Any, then: Any) -> bool:
    """Whether FSDP exchanges a sharded parameter for a whole one, or the reverse, which its own hooks see to."""
    if now is None or then is None:
        return False
    return hasattr(now, "device_mesh") != hasattr(then, "device_mesh") or not (
        hasattr(then, "device_mesh") or then.untyped_storage().nbytes()
    )


def renormalizes(module: nn.Module) -> bool:
    """Whether a forward modifies the weight of ``module`` in place, as embeddings with ``max_norm`` do."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal in shape, dtype and values; without values they count as equal."""
    return a.is_meta or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b))


def overwrite(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Writes the elements of ``value`` into ``tensor``, those that an expanded tensor repeats once.

    >>> tensor = torch.zeros(1).expand(3)
    >>> overwrite(tensor, torch.ones(3))
    >>> tensor
    tensor([1., 1., 1.])
    """
    target, source = tensor.detach(), value
    if target.layout is torch.strided and 0 in target.stride():
        once = tuple(slice(1) if step == 0 else slice(None) for step in target.stride())
        target, source = target[once], source[once]
    with torch.no_grad():
        target.copy_(source)
