"""Replaces functions of PyTorch and attributes by stand-ins for a while, and refuses calls that have none."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial, wraps
from pathlib import Path
from traceback import walk_stack
from typing import Any, NoReturn, Self, final

from graphckpt._compat import active_modes, set_active_modes
from graphckpt.errors import ConfigError
from graphckpt.undo import Ending, Scope, Undo, enter, put_back, scope


@final
class StandIns:
    """Stand-ins in the place of functions and other attributes, until the end of the ``with`` block or ``close()``."""

    def __init__(self) -> None:
        self._undo: Undo = []

    def __enter__(self) -> Self:
        return self

    def close(self, *_: object) -> None:
        """Puts back all that was there; a second call does nothing."""
        put_back(self._undo)

    __exit__ = Ending(close, close)

    def callback(self, function: Callable[..., object], *args: Any) -> None:
        """Notes a function that puts something back."""
        self._undo.append((function, args))

    def enter_context(self, manager: AbstractContextManager[Any]) -> None:
        if isinstance(manager, Scope):
            enter(self._undo, manager)
            return
        self.callback(set_active_modes, active_modes())  # an interrupt may come while a mode is entered or left
        manager.__enter__()
        self.callback(manager.__exit__, None, None, None)

    def swap(self, owner: Any, **values: Any) -> None:
        """Sets attributes of a module, a class or another object."""
        for name, value in values.items():
            self.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

    def replace(self, original: Callable[..., Any], replacement: Callable[..., Any]) -> None:
        """Replaces a function in every module that has it, also by ``from torch.distributed import new_group``.

        A module that is imported meanwhile keeps the replacement, which calls the original from then on.
        """
        current, name = replacement, original.__name__

        # Through a variable, so that the modules which keep `call` for good are back at the original after the end.
        def end() -> None:
            nonlocal current
            current = original

        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return current(*args, **kwargs)

        self.callback(end)
        # A copy, as reading an attribute of a lazy module may import others.
        for module in [*sys.modules.values()]:
            if getattr(module, "__dict__", {}).get(name) is original:
                self.swap(module, **{name: call})


PACKED = "find_packed_sequence_indices"  # None: every row is one sequence
PADDED = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")  # True: the mask is all ones


@scope
def swapped_masks(undo: Undo, function: Callable[..., Any], *names: str) -> Iterator[None]:
    """Replaces functions of Transformers' mask code by ``function``, which gets the original as its first argument.

    They read values, which neither fake tensors have nor those of a capture.
    """
    module = sys.modules.get("transformers.masking_utils")
    for name in names:
        if hasattr(module, name):
            original = getattr(module, name)
            undo.append((setattr, (module, name, original)))
            setattr(module, name, partial(function, original))
    yield


def refusal(name: str, fix: str = "leave it out, or plan with real ranks by torchrun") -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ConfigError(f"{name} ({user_line()}): not supported on a simulated rank yet · fix: {fix}")

    return refuse


def user_line() -> str:
    """Returns the file and the line of the innermost frame outside of PyTorch and of this library."""
    for frame, line in walk_stack(sys._getframe()):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in ("torch", "graphckpt", "contextlib", "functools"):
            return f"{Path(frame.f_code.co_filename).name}, line {line}"
    return "an unknown line"
