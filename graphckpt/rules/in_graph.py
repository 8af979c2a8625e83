"""Recomputation within a graph of ``torch.compile``, which supports PyTorch's checkpoint.

The compiler marks each op of a checkpoint as one to recompute, or asks the policy of ``context_fn`` about it. Ops of an
excluded child carry an annotation, by which that policy leaves it to the compiler what to save, as outside.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, final

from torch import nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts, noop_context_fn

from graphckpt._compat_compiler import annotate, get_current_meta

_ANNOTATION = "graphckpt_excluded"


@final
class ForwardInGraph:
    """The forward of a block in a form that the compiler can trace: it does not support ``MethodType``.

    ``inner`` is the function that another library has set as ``module.forward``; ``None`` for that of the class.
    """

    def __init__(self, module: nn.Module, inner: Callable[..., Any] | None, *, has_excluded: bool) -> None:
        self._module = module
        self._inner = inner
        self.has_excluded = has_excluded

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._inner is not None:
            return self._inner(*args, **kwargs)
        return type(self._module).forward(self._module, *args, **kwargs)


def checkpoint_in_graph(
    function: Callable[..., Any], args: Any, kwargs: dict[str, Any], context_fn: Callable[[], Any] = noop_context_fn
) -> Any:
    """Runs ``function(*args, **kwargs)``, to be called while ``torch.compile`` traces it."""

    def call(*args: Any) -> Any:  # keyword arguments may have the names of checkpoint's arguments
        return function(*args, **kwargs)

    # Read at each call: the compiler takes what has this name for checkpoint, even if a program has replaced it.
    checkpoint = torch_checkpoint.checkpoint
    if context_fn is noop_context_fn:  # the default: passed explicitly, the compiler takes it for a policy to trace
        return checkpoint(call, *args, use_reentrant=False)
    return checkpoint(call, *args, use_reentrant=False, context_fn=context_fn)


def exclude_in_graph(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs ``function(*args, **kwargs)`` so that the checkpoints around it do not recompute it."""
    with annotate({_ANNOTATION: True}):
        return function(*args, **kwargs)


def contexts_of(policy: Callable[..., CheckpointPolicy]) -> Callable[[], Any]:
    """Returns the ``context_fn`` of a policy, which decides about all ops but those of excluded children."""
    return partial(create_selective_checkpoint_contexts, partial(_decide, policy))


def contexts_of_full(function: Callable[..., Any]) -> Callable[[], Any]:
    """Returns the ``context_fn`` that recomputes all of ``function``, except for its excluded children."""
    return _EXCLUDING if getattr(function, "has_excluded", False) else noop_context_fn


def _decide(policy: Callable[..., CheckpointPolicy], context: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    if get_current_meta().get("custom", {}).get(_ANNOTATION):
        return CheckpointPolicy.PREFER_SAVE  # of an excluded child: the compiler decides, as outside of a checkpoint
    return policy(context, func, *args, **kwargs)


def _recompute(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


_EXCLUDING = contexts_of(_recompute)
