"""Puts stand-ins in the place of PyTorch's functions for a while, and refuses what has none."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn

from graphckpt.errors import ConfigError


@contextmanager
def swapped(owner: ModuleType | type | None, values: dict[str, Any]) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def refusal(name: str, fix: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ConfigError(f"{name} ({user_line()}): not supported on a simulated rank yet · fix: {fix}")

    return refuse


@contextmanager
def replaced(original: Callable[..., Any], replacement: Callable[..., Any]) -> Iterator[None]:
    """Replaces a function in every module that has it, also by ``from torch.distributed import new_group``.

    A module that is imported meanwhile keeps the replacement, which calls the original from then on.
    """
    is_active = True

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (replacement if is_active else original)(*args, **kwargs)

    name = original.__name__
    owners = [module for module in [*sys.modules.values()] if getattr(module, "__dict__", {}).get(name) is original]
    for owner in owners:
        setattr(owner, name, call)
    try:
        yield
    finally:
        is_active = False
        for owner in owners:
            setattr(owner, name, original)


def user_line() -> str:
    """Returns the file and the line of the innermost frame outside of PyTorch and of this library."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in ("torch", "graphckpt", "contextlib", "functools"):
            return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"
