"""Keeps what a step has done, although planning and verifying put back whatever a step changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

_ITEMS: WeakKeyDictionary[Tally, list[Any]] = WeakKeyDictionary()


class Tally:
    """A list of items that are not among its attributes, where they would be found and put back."""

    def __init__(self) -> None:
        _ITEMS[self] = []

    def add(self, item: Any = 1) -> None:
        _ITEMS[self].append(item)

    def clear(self) -> None:
        _ITEMS[self].clear()

    def __iter__(self) -> Iterator[Any]:
        return iter(list(_ITEMS[self]))

    def __len__(self) -> int:
        return len(_ITEMS[self])
