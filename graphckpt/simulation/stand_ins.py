"""Replaces functions of PyTorch and attributes by stand-ins for a while, and refuses calls that have none."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial, wraps
from pathlib import Path
from traceback import walk_stack
from types import FrameType, FunctionType
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
        """Replaces a function wherever it is bound: in modules, classes, arguments and variables of functions.

        ``replacement`` calls it as :func:`copy_of` returned it before.
        """
        # Its code, not a name in a module: a script may have imported the function anywhere, and before. Python accepts
        # only code with as many free variables as the function's closure has, so the new code has them too, unused.
        function: Any = original
        code = _call_replacement.__code__.replace(co_freevars=function.__code__.co_freevars)
        self.swap(function, __code__=code, __kwdefaults__={"_replacement": replacement})


def _call_replacement(*args: Any, _replacement: Callable[..., Any], **kwargs: Any) -> Any:
    return _replacement(*args, **kwargs)


def copy_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that stays as it is while :meth:`StandIns.replace` has replaced ``function``."""
    assert isinstance(function, FunctionType)
    copied = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return wraps(function)(copied)


CUDA_HOUSEKEEPING = ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "init")
"""Functions of ``torch.cuda`` that loops call beside the step, and that PyTorch refuses without a GPU."""

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
    return place_of(walk_stack(sys._getframe(1)))


def place_of(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Returns the file and the line of the first frame outside of PyTorch and of this library."""
    for frame, line in frames:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in ("torch", "graphckpt", "contextlib", "functools"):
            return f"{Path(frame.f_code.co_filename).name}, line {line}"
    return "an unknown line"
