"""Joined blocks: the input that one of them does not keep, as the recomputation of the block before returns it."""

from __future__ import annotations

import weakref
from contextvars import ContextVar
from typing import Any, final

import torch

from graphckpt.errors import RecomputeError
from graphckpt.rules.engine.argument import TensorKind
from graphckpt.rules.engine.execution import RecomputableCall
from graphckpt.rules.engine.mismatch import returns_differ
from graphckpt.tree import tensors_in


@final
class BlockOutput:
    """The tensors that a recomputed block has returned. It keeps neither them nor the call alive."""

    __slots__ = ("_tensors", "frame")

    def __init__(self, frame: RecomputableCall, output: Any) -> None:
        self.frame = weakref.ref(frame)
        self._tensors = [(weakref.ref(t), None if t.is_inference() else t._version) for t in tensors_in(output)]

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Returns the position of ``tensor`` among them, or ``None`` if it is not there or was modified since."""
        if self.frame() is None or tensor.is_inference():
            return None
        for number, (ref, version) in enumerate(self._tensors):
            if ref() is tensor:
                return number if tensor._version == version else None
        return None


last_output: ContextVar[BlockOutput | None] = ContextVar("last_output", default=None)


@final
class JoinedInput:
    """An argument that is not kept: the recomputation of the block before returns it."""

    __slots__ = ("_dtype_and_shape", "_kind", "_number")

    def __init__(self, number: int, tensor: torch.Tensor) -> None:
        self._dtype_and_shape = tensor.dtype, tensor.shape
        self._number = number
        self._kind = TensorKind.of(tensor)

    def of(self, before: RecomputableCall) -> torch.Tensor:
        """Returns the argument, one of the tensors that the recomputation of the block before has returned.

        Raises:
            RecomputeError: it has returned something else.
        """
        found = [(tensor.dtype, tensor.shape) for tensor in before.outputs or ()]
        if found[self._number : self._number + 1] != [self._dtype_and_shape]:
            raise RecomputeError(returns_differ(before.block.title, self._number, self._dtype_and_shape, found))
        return self._kind.apply_to(before.outputs[self._number])  # type: ignore[index]
