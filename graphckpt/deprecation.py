"""Old names of arguments, fields and keys: each still works, with one DeprecationWarning that names the replacement."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from graphckpt.errors import ConfigError, shown

_PACKAGE = __name__.partition(".")[0]
_Class = TypeVar("_Class", bound=type)


def warn_deprecated(text: str) -> None:
    """Warns at the line that calls the library, however many calls of the library are between."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, DeprecationWarning, stacklevel=level)


def rename(values: dict[str, Any], new_names: Mapping[str, str], where: str) -> None:
    """Moves values from old names to new ones, in place, with one DeprecationWarning for each old name.

    Args:
        values: Arguments or keys by name. A new name with the value ``None`` counts as not given.
        new_names: The new name of each old one.
        where: What messages begin with.

    Raises:
        ConfigError: An old name and its new one are both given.
    """
    for old in [name for name in new_names if name in values]:
        new, value = new_names[old], values.pop(old)
        if value is not None and values.get(new) is not None:
            raise ConfigError(
                f"{where}: expected {new!r} alone, got {old!r} too, its deprecated name · fix: leave {old!r} out"
            )
        warn_deprecated(f"{where}: {old!r} is deprecated · fix: {new}={shown(value)}")
        if values.get(new) is None:
            values[new] = value


def accepts_old_names(**new_names: str) -> Callable[[_Class], _Class]:
    """Makes a keyword-only dataclass accept old names of its fields, in its constructor and as attributes."""

    def decorate(cls: _Class) -> _Class:
        init: Callable[..., None] = vars(cls)["__init__"]

        @functools.wraps(init)
        def construct(self: object, **values: Any) -> None:
            rename(values, new_names, cls.__name__)
            init(self, **values)

        type.__setattr__(cls, "__init__", construct)
        for old, new in new_names.items():
            type.__setattr__(cls, old, property(functools.partial(_read, old=old, new=new)))
        return cls

    return decorate


def _read(instance: object, *, old: str, new: str) -> Any:
    warn_deprecated(f"{type(instance).__name__}: {old!r} is deprecated · fix: {new}")
    return getattr(instance, new)
