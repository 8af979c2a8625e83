"""Recomputation within a graph of ``torch.compile``, which knows PyTorch's own checkpoint and does the recomputing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn


def checkpoint_in_graph(
    function: Callable[..., Any], args: Any, kwargs: dict[str, Any], context_fn: Callable[[], Any] = noop_context_fn
) -> Any:
    """Runs ``function(*args, **kwargs)``, to be called while ``torch.compile`` traces it."""

    def call(*args: Any) -> Any:  # keyword arguments may have the names of checkpoint's own
        return function(*args, **kwargs)

    # The compiler takes what has this name for checkpoint, even where a program has put another function in its place.
    checkpoint = torch_checkpoint.checkpoint
    if context_fn is noop_context_fn:  # which the compiler takes for contexts that it cannot trace
        return checkpoint(call, *args, use_reentrant=False)
    return checkpoint(call, *args, use_reentrant=False, context_fn=context_fn)
