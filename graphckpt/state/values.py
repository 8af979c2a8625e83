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
