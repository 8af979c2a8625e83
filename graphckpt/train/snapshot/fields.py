"""Reads the fields of a snapshot: each has a type and a range, and whatever else stands there is one error."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

from torch import Tensor

from graphckpt.errors import first_line
from graphckpt.train.snapshot.folder import SnapshotError

MOST = 2**53  # of any count: what JSON's numbers hold
_SHOWN = 60  # characters of a value in a message
_BROKEN = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError)


@final
class FieldError(ValueError):
    """A field is missing, of another type, or out of its range."""

    def __init__(self, field: str, expected: str, got: object) -> None:
        super().__init__(f"{field}: expected {expected}, got {shown(got)}")


@final
class MissingField:
    """A field that is missing."""

    def __repr__(self) -> str:
        return "nothing"


_MISSING = MissingField()


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Names the file of a field that is wrong.

    Raises:
        SnapshotError: a field is wrong.
    """
    try:
        yield
    except FieldError as error:
        raise SnapshotError(f"{file}: {error}") from error
    except _BROKEN as error:
        raise SnapshotError(f"{file}: is broken ({type(error).__name__}: {first_line(error)})") from error


def shown(value: object) -> str:
    """Returns a value as a message shows it.

    >>> shown(-1), shown([]), shown(None)
    ('-1 (int)', '[] (list)', 'None')
    """
    if value is None or isinstance(value, MissingField):
        return repr(value)
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} and shape {list(value.shape)}"
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int of more than 4300 digits; a list in itself
        text = "a value too long to print"
    return f"{text if len(text) <= _SHOWN else text[:_SHOWN] + '...'} ({type(value).__name__})"


def item(of: Mapping[Any, Any], key: Any) -> Any:
    """Returns what is under ``key``; ``MissingField``, which no reader takes, if nothing is."""
    return of.get(key, _MISSING)


def mapping(value: Any, field: str) -> Mapping[Any, Any]:
    """Returns a mapping."""
    if not isinstance(value, Mapping):
        raise FieldError(field, "a mapping", value)
    return value


def sequence(value: Any, field: str, length: int | None = None) -> list[Any]:
    """Returns a list or a tuple, as a list."""
    if not isinstance(value, list | tuple) or length not in {None, len(value)}:
        raise FieldError(field, "a list" if length is None else f"a list of {length}", value)
    return list(value)


def integer(value: Any, field: str, least: int = 0, most: int = MOST) -> int:
    """Returns a whole number within a range."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise FieldError(field, f"an int from {least} to {most}" if least < most else f"the int {least}", value)
    return value


def number(value: Any, field: str, least: float = -math.inf) -> float:
    """Returns a finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) < math.inf or value < least:
        raise FieldError(field, "a finite number" + ("" if least == -math.inf else f" of {least} or more"), value)
    return value  # type: ignore[no-any-return]


def text(value: Any, field: str, most: int = 1000) -> str:
    """Returns text that is not empty."""
    if not isinstance(value, str) or not 0 < len(value) <= most or not value.isprintable():
        raise FieldError(field, f"text of 1 to {most} characters", value)
    return value


def tensor(value: Any, field: str, like: Tensor | None = None) -> Tensor:
    """Returns a tensor; with ``like``, one of its type and shape."""
    if like is None:
        if not isinstance(value, Tensor):
            raise FieldError(field, "a tensor", value)
    elif not isinstance(value, Tensor) or value.dtype != like.dtype or value.shape != like.shape:
        raise FieldError(field, shown(like), value)
    return value


def is_float(value: Any) -> bool:
    """Returns whether ``value`` is a tensor of floating-point numbers."""
    return isinstance(value, Tensor) and value.is_floating_point()
