"""The least that recompute on saved-tensor hooks can cost in Python: an engine that does nothing but recompute.

The original forward gives autograd an empty holder for each tensor that it saves. The first holder that backward reads
runs the forward again, which fills all of them. Shapes and dtypes are compared, and the RNG state of the CPU is
restored.

It is not for training: it knows nothing of buffers, attributes, autocast, arguments that forward modifies, nested
blocks, devices, exceptions, or a second backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphckpt._compat import pop_saved_tensor_hooks, push_saved_tensor_hooks


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls ``function``, whose backward calls it again."""
    generator = torch.default_generator
    random = generator.get_state()
    holders: list[list[Any]] = []

    def pack(tensor: torch.Tensor) -> list[Any]:
        holder = [tensor.shape, tensor.dtype, None]
        holders.append(holder)
        return holder

    def unpack(holder: list[Any]) -> torch.Tensor:
        if holder[2] is None:
            recompute()
        tensor: torch.Tensor = holder[2]
        holder[2] = None
        return tensor

    def recompute() -> None:
        unfilled = iter(holders)

        def fill(tensor: torch.Tensor) -> None:
            holder = next(unfilled)
            if holder[0] != tensor.shape or holder[1] != tensor.dtype:
                raise RuntimeError("the recomputation saves other tensors")
            holder[2] = tensor.detach()

        random_now = generator.get_state()
        generator.set_state(random)
        push_saved_tensor_hooks(fill, unpack)
        try:
            with torch.enable_grad():
                function(*args, **kwargs)
        finally:
            pop_saved_tensor_hooks()
            generator.set_state(random_now)

    push_saved_tensor_hooks(pack, unpack)
    try:
        return function(*args, **kwargs)
    finally:
        pop_saved_tensor_hooks()
