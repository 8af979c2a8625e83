"""A model's own gradient checkpointing, as in Transformers, which is suspended under a policy."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, final

from torch import nn

from graphckpt.engine.block import BlockContext
from graphckpt.engine.objects import replaced

_FLAG = "gradient_checkpointing"


class NativeCheckpointing:
    """The modules in a block with gradient checkpointing of their own, which they are recognized by a flag for."""

    __slots__ = ("_modules",)

    def __init__(self, block: nn.Module) -> None:
        self._modules = [weakref.ref(module) for module in block.modules() if hasattr(module, _FLAG)]

    def __bool__(self) -> bool:
        return bool(self._modules)

    def is_enabled(self) -> bool:
        modules = (ref() for ref in self._modules)
        return any(m is not None and m.training and m.__dict__.get(_FLAG) for m in modules)

    def suspend(self, context: BlockContext, function: Callable[..., Any]) -> Callable[..., Any] | None:
        """Returns ``function`` with the modules' own checkpointing off; ``None`` if that is already active.

        It is where a class checkpoints in ``__call__``, not in ``forward``.
        """
        modules = [ref() for ref in self._modules]
        flagged = [m for m in modules if m is not None and m.training and m.__dict__.get(_FLAG)]
        if not flagged:
            return function
        owner = getattr(function, "__self__", None)
        if owner in flagged and type(owner).__call__ is not nn.Module.__call__:
            context.note("its own gradient checkpointing replaces this policy: disable it on the model")
            return None
        context.note("the model's own gradient checkpointing is on as well: this policy replaces it")
        return _Suspended(function, flagged)


@final
class _Suspended:
    """A forward during which some modules' own checkpointing is off."""

    __slots__ = ("__self__", "__wrapped__", "_modules")

    def __init__(self, function: Callable[..., Any], modules: list[nn.Module]) -> None:
        self.__wrapped__ = function  # for inspect.signature, which names arguments
        self.__self__ = getattr(function, "__self__", None)
        self._modules = modules

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a part of the forward likewise, for rules that call children one by one."""
        return _Suspended(function, self._modules)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with replaced([module for module in self._modules if module.__dict__.get(_FLAG)], _FLAG, value=False):
            return self.__wrapped__(*args, **kwargs)
