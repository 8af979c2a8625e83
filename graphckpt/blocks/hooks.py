"""Module hooks that copies of the module leave behind, so that they record the original alone."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any, final

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from graphckpt._compat import forget_hook
from graphckpt.errors import NOT_SCRIPTABLE, ConfigError
from graphckpt.undo import Undo


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


def add_pre_hook(undo: Undo, module: nn.Module, function: Callable[..., object], **options: bool) -> Callable[[], None]:
    """Calls a function before the forward of a module until ``undo``; returns another that ends this earlier."""
    hook = ModuleHook(function)
    undo.append((forget_hook, (weakref.ref(module), hook)))
    return module.register_forward_pre_hook(hook, **options).remove


def add_hook(undo: Undo, module: nn.Module, function: Callable[..., object], **options: bool) -> Callable[[], None]:
    """Calls a function behind the forward of a module likewise."""
    hook = ModuleHook(function)
    undo.append((forget_hook, (weakref.ref(module), hook)))
    return module.register_forward_hook(hook, **options).remove


def add_optimizer_hook(undo: Undo, hook: Callable[..., None], register: Any = register_optimizer_step_pre_hook) -> None:
    """Registers a hook before the steps of all optimizers, or behind them with the other ``register``."""
    undo.append((forget_hook, (weakref.ref(sys.modules[register.__module__]), hook)))
    register(hook)
