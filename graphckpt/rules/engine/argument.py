"""One tensor argument of a recomputed block, held so that the recomputation is called with an equal tensor.

If it stays on the device and forward does not modify it in place, the recomputation gets the same object. Otherwise it
gets a new leaf with the same class and ``requires_grad``.
"""

from __future__ import annotations

from typing import Any, NamedTuple, final

import torch
from torch import nn

from graphckpt.errors import RecomputeError
from graphckpt.rules.engine.execution import RecomputableCall
from graphckpt.rules.engine.saved import SavedTensor
from graphckpt.stores.device import DeviceStore


class TensorKind(NamedTuple):
    """What a tensor has beside its values, so that one from a store can take its place."""

    cls: type[torch.Tensor]
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorKind:
        """Returns that of ``tensor``. An ``AsyncCollectiveTensor`` is a plain tensor once waited on."""
        return cls(torch.Tensor if hasattr(tensor, "trigger_wait") else type(tensor), tensor.requires_grad)

    def apply_to(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns ``tensor``, which has no history, as one of this kind.

        Raises:
            RecomputeError: A plain tensor cannot be made one of this class.
        """
        if type(tensor) is not self.cls and not hasattr(tensor, "trigger_wait"):
            if hasattr(self.cls, "__tensor_flatten__"):
                raise RecomputeError(
                    f"expected an argument of class {self.cls.__name__} for the recomputation, got a "
                    f"{type(tensor).__name__} from its store · fix: set offload = False on this block"
                )
            tensor = tensor.as_subclass(self.cls)
        return tensor.requires_grad_() if self.requires_grad else tensor


@final
class Argument:
    """A tensor argument that is kept.

    Args:
        tensor: The argument.
        frame: The call that keeps it.
        copied: A copy to keep in its place, where forward modifies the argument in place or may do so.
    """

    __slots__ = ("__weakref__", "_kept", "_kind", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor, frame: RecomputableCall, copied: torch.Tensor | None) -> None:
        self._kind = TensorKind.of(tensor)
        value = tensor if copied is None else copied
        self._tensor: torch.Tensor | None = None
        self._version: int | None = None
        self._kept: SavedTensor | None = None
        block, outer_hooks = frame.block, frame.outer_hooks
        # A parameter is not moved: its module keeps it alive. Neither are Python attributes.
        stays = isinstance(tensor, nn.Parameter) or has_attributes(tensor)
        if not stays and not (outer_hooks is None and isinstance(block.store, DeviceStore)):
            kept = SavedTensor(value, frame, outer_hooks)
            if not kept.stays:
                self._kept = kept
                return
        if outer_hooks is None and block.recorder is not None:
            block.recorder.kept(block.name, value, self)
        self._hold(value)

    def drop_copy(self, tensor: torch.Tensor) -> None:
        """Holds ``tensor``, the argument itself, where a copy of it is held."""
        if self._kept is None:
            self._hold(tensor)

    def _hold(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._version = None if tensor.is_inference() else tensor._version

    def take(self, *, is_mutated: bool) -> torch.Tensor | None:
        """Returns the tensor to call the block with; ``None`` if it was modified in place since.

        Args:
            is_mutated: Whether forward modifies it in place, so that it must be a copy.
        """
        tensor = self._tensor if self._kept is None else self._kept.take()
        if tensor is None or (self._version is not None and tensor._version != self._version):
            return None
        if is_mutated:
            with torch.enable_grad():  # no leaf, if it requires grad
                return self._kind.apply_to(tensor.detach()).clone()
        if self._kept is None and tensor.requires_grad is self._kind.requires_grad:
            return tensor
        return self._kind.apply_to(tensor.detach())


def has_attributes(tensor: Any) -> bool:
    """Whether a tensor carries Python attributes, beside the tensors that a wrapper such as a DTensor holds."""
    return bool(tensor.__dict__) and not hasattr(tensor, "__tensor_flatten__")
