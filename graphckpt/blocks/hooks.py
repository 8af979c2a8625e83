"""Module hooks that copies of the module leave behind, so that they record the original alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch

from graphckpt.errors import NOT_SCRIPTABLE, ConfigError


@final
class ModuleHook:
    """A hook for ``register_forward_pre_hook`` and the like that calls a function and returns nothing.

    A plain function as a hook goes along into copies and pickles of its module, with all that it refers to: a recorder,
    a dispatch mode, an open generator. Programs copy their model within a step (a teacher, an average of weights).
    """

    __name__ = "graphckpt"

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> None:
        if not torch.compiler.is_compiling():
            self._function(*arguments)

    @property
    def __globals__(self) -> dict[str, Any]:
        """Raises an error for ``torch.jit.script``, which alone reads this attribute of hooks."""
        raise ConfigError(NOT_SCRIPTABLE)

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleHook, (do_nothing,)


def do_nothing(*_: object) -> None:
    """Does nothing, for the hooks of a copied module."""
