"""Counts the gradients that a step would hold in its forward if it accumulated them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Self, final

from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

_ROUNDING = 512  # bytes; CUDA's caching allocator


@final
class GradientBytes:
    """Compares, within a ``with`` block, the gradients that exist at the optimizer with those at the first block.

    A step that has ``zero_grad(set_to_none=True)``, which is the default, has none there; one that zeroes them in place
    or accumulates them itself has all of them.

    Args:
        model: the model that is trained.
        block: its first block.
    """

    def __init__(self, model: nn.Module, block: nn.Module) -> None:
        self._model = model
        self._block = block
        self._stack = ExitStack()
        self._in_forward = 0
        self._at_optimizer = 0

    def __enter__(self) -> Self:
        self._stack.callback(self._block.register_forward_pre_hook(self._see_forward).remove)
        self._stack.callback(register_optimizer_step_pre_hook(self._see_optimizer).remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._see_optimizer()  # a step without an optimizer
        self._stack.close()

    @property
    def num_bytes(self) -> int:
        """The gradients that accumulation adds to the forward, in bytes that the allocator reserves."""
        return max(0, self._at_optimizer - self._in_forward)

    def _see_forward(self, *_: Any) -> None:
        self._in_forward = max(self._in_forward, self._bytes())

    def _see_optimizer(self, *_: Any) -> None:
        self._at_optimizer = max(self._at_optimizer, self._bytes())

    def _bytes(self) -> int:
        gradients = (parameter.grad for parameter in self._model.parameters())
        return sum(-(-grad.nbytes // _ROUNDING) * _ROUNDING for grad in gradients if grad is not None)
