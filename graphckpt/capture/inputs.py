"""The arguments of a captured step: the buffers that replays read, and the key of a capture."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, final

import torch

from graphckpt.tree import ATOMS, flatten_call

_FIX = "fix: pass tensors without gradient, numbers and strings"


def input_key(args: Sequence[Any], kwargs: dict[str, Any], device: torch.device | None) -> tuple[Hashable, str | None]:
    """Returns the key of a capture: shapes, strides, dtypes and devices of tensors, and all other values.

    The second value is the reason if these arguments cannot be captured on ``device``.
    """
    leaves, shape = flatten_call(args, kwargs)
    key: list[Hashable] = [shape.num_args, shape.keywords, repr(shape.spec)]
    seen: dict[int, int] = {}
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            if leaf.requires_grad:
                return None, f"input {position} requires a gradient, which a replay would give to a copy of it · {_FIX}"
            if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided:
                return None, f"input {position} is a {type(leaf).__name__} of layout {leaf.layout} · {_FIX}"
            if device is not None and not is_on(leaf.device, device):  # its value would be baked in
                return None, f"input {position} is on {leaf.device} · fix: pass tensors on {device}"
            first = seen.setdefault(id(leaf), position)
            key.append((first, leaf.shape, leaf.stride(), leaf.dtype, leaf.device))
        elif type(leaf) in ATOMS:
            key.append((type(leaf), leaf))
        else:
            return None, f"input {position} is a {type(leaf).__name__}, whose value may change unnoticed · {_FIX}"
    return tuple(key), None


def is_on(place: torch.device, device: torch.device) -> bool:
    """Whether a tensor on ``place`` is on ``device``, which is any of its type if it has no index."""
    return place.type == device.type and device.index in (None, place.index)


@final
class StaticInputs:
    """Buffers that hold the arguments of a captured step.

    Args:
        args: Positional arguments of the call that is captured.
        kwargs: Its keyword arguments.
    """

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        leaves, shape = flatten_call(args, kwargs)
        buffers: dict[int, torch.Tensor] = {}
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and id(leaf) not in buffers:
                buffers[id(leaf)] = _buffer(leaf)
        static = [buffers[id(leaf)] if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._buffers = [leaf if isinstance(leaf, torch.Tensor) else None for leaf in static]
        self.args, self.kwargs = shape.assemble(static)
        """The arguments of the captured step."""

    def load(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Copies the arguments of this call into the buffers."""
        leaves, _ = flatten_call(args, kwargs)
        for buffer, leaf in zip(self._buffers, leaves, strict=True):
            if buffer is not None:
                buffer.copy_(leaf, non_blocking=True)


def _buffer(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a buffer with the layout of ``tensor``; contiguous if it is expanded, as its elements share memory."""
    if 0 in tensor.stride() and tensor.numel() > 1:
        return tensor.detach().contiguous().clone()
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
