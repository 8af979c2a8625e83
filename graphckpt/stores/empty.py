"""Makes empty tensors quickly, to be set to existing memory."""

from __future__ import annotations

from functools import cache

import torch

from graphckpt._compat import is_watched


def empty(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns an empty tensor with a version counter of its own, in half the time of ``torch.empty``."""
    if is_watched():  # the mode may make tensors of another kind
        return torch.empty(0, dtype=dtype, device=device)
    return _pattern(dtype, device).data  # `detach()` would share the counter among all of them


@cache
def _pattern(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(mode=False):
        return torch.empty(0, dtype=dtype, device=device)
