"""One tensor argument of a recomputed block, held so that the recomputation is called with the same tensor.

If it stays on the device and forward does not modify it in place, the recomputation gets the same object. Otherwise it
gets a new tensor with the same class, Python attributes and ``requires_grad``, which has a ``grad_fn`` if the original
had one.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import nn

from graphckpt.errors import RecomputeError
from graphckpt.rules.engine.execution import RecomputableCall
from graphckpt.rules.engine.saved import SavedTensor
from graphckpt.stores.device import DeviceStore
from graphckpt.undo import Undo, differs, fill


@final
class TensorProperties:
    """What a tensor has beside its values.

    Args:
        tensor: The argument as the original forward was called with it.
    """

    __slots__ = ("_attributes", "_class", "_has_history", "_is_view", "requires_grad")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.requires_grad = tensor.requires_grad
        self._has_history = not tensor.is_leaf
        self._is_view = tensor._is_view()
        self._class = type(tensor)
        if self._class is not torch.Tensor and hasattr(tensor, "trigger_wait"):
            self._class = torch.Tensor  # an AsyncCollectiveTensor is a plain tensor once waited on
        self._attributes: dict[str, Any] | None = own_attributes(tensor) if tensor.__dict__ else None

    def apply_to(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns ``tensor``, which has no history, with these properties."""
        if self.requires_grad:
            tensor.requires_grad_()
        if type(tensor) is torch.Tensor and tensor.layout is torch.strided:
            with torch.enable_grad():
                if self._has_history:
                    tensor = _Result.apply(tensor, tensor.data)
                if self._is_view and (self._has_history or not self.requires_grad):
                    tensor = tensor.view_as(tensor)
        return self.apply_class_to(tensor)

    def apply_class_to(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns ``tensor`` with the class and the Python attributes of the argument.

        Raises:
            RecomputeError: Python cannot make it one of that class.
        """
        if type(tensor) is not self._class and not hasattr(tensor, "trigger_wait"):
            try:
                tensor.__class__ = self._class
            except TypeError:
                raise RecomputeError(
                    f"expected an argument of class {self._class.__name__} for the recomputation, got a "
                    f"{type(tensor).__name__} from its store · fix: set offload = False on this block"
                ) from None
        for name, value in (self._attributes or {}).items():
            tensor.__dict__.setdefault(name, value)
        return tensor

    def restore_attributes(self, tensor: torch.Tensor, undo: Undo) -> None:
        """Gives the object itself the Python attributes that it had, if they were changed since."""
        present, past = tensor.__dict__, self._attributes or {}
        if (present or past) and not hasattr(tensor, "__tensor_flatten__") and differs(present, past):
            undo.append((present, None, dict(present)))
            fill(present, past)


class _Result(torch.autograd.Function):
    """Makes a tensor the result of an op, which has history and is neither a leaf nor a view."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, alias: torch.Tensor) -> torch.Tensor:
        """Returns ``alias``, which shares the memory of ``leaf``."""
        ctx.mark_dirty(alias)
        return alias

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Passes the gradient on."""
        return grad, None


@final
class Argument:
    """A tensor argument that is kept.

    Args:
        tensor: The argument.
        frame: The call that keeps it.
        copied: A copy to keep in its place, where forward modifies the argument in place or may do so.
    """

    __slots__ = ("__weakref__", "_kept", "_tensor", "_version", "properties")

    def __init__(self, tensor: torch.Tensor, frame: RecomputableCall, copied: torch.Tensor | None) -> None:
        self.properties = TensorProperties(tensor)
        value = tensor if copied is None else copied
        self._tensor: torch.Tensor | None = None
        self._version: int | None = None
        self._kept: SavedTensor | None = None
        block, outer_hooks = frame.block, frame.outer_hooks
        # A parameter is not passed to the hooks around the block: its module keeps it alive.
        if isinstance(block.store, DeviceStore) if outer_hooks is None else isinstance(tensor, nn.Parameter):
            if outer_hooks is None and block.recorder is not None:
                block.recorder.kept(block.name, value, self)
        else:
            self._kept = SavedTensor(value, frame, outer_hooks)
            if not self._kept.stays:
                return
            if block.recorder is not None:
                block.recorder.kept(block.name, value, self)
            self._kept = None
        self._hold(value)

    def drop_copy(self, tensor: torch.Tensor) -> None:
        """Holds ``tensor``, the argument itself, where a copy of it is held."""
        if self._kept is None:
            self._hold(tensor)

    def _hold(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._version = None if tensor.is_inference() else tensor._version

    def take(self, undo: Undo, *, is_mutated: bool) -> torch.Tensor | None:
        """Returns the tensor to call the block with; ``None`` if it was modified in place since.

        Args:
            undo: Notes what is replaced for the time of the recomputation.
            is_mutated: Whether forward modifies it in place, so that it must be a copy.
        """
        tensor = self._tensor if self._kept is None else self._kept.take()
        if tensor is None or (self._version is not None and tensor._version != self._version):
            return None
        if is_mutated:
            return as_mutated(tensor, self.properties)
        if self._kept is None and tensor.requires_grad is self.properties.requires_grad:
            self.properties.restore_attributes(tensor, undo)
            return tensor
        return self.properties.apply_to(tensor.detach())


def as_mutated(tensor: torch.Tensor, properties: TensorProperties) -> torch.Tensor:
    """Returns a copy of ``tensor`` that forward may modify in place: no leaf, if it requires grad."""
    with torch.enable_grad():
        return properties.apply_class_to(tensor.detach().requires_grad_(properties.requires_grad).clone())


def own_attributes(tensor: Any) -> dict[str, Any]:
    """Returns the Python attributes of a tensor, but for the tensors that a wrapper such as a DTensor holds."""
    inner = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
    return {name: value for name, value in tensor.__dict__.items() if name not in inner}
