"""Replaces values in dictionaries and lists, and puts them back, the last one first."""

from __future__ import annotations

import copy
from collections import deque
from operator import is_
from typing import Any, Final, TypeAlias

import torch

ABSENT: Final = object()
"""Stands for a key that did not exist."""

CONTAINERS: Final = (list, dict, set, deque)
"""What can be emptied and filled again."""

Undo: TypeAlias = list[tuple[Any, Any, Any]]
"""``(owner, key, value)`` in the order in which they were replaced; ``key`` is ``None`` for a whole owner."""


def replace_item(owner: dict[str, Any], key: str, value: Any, undo: Undo) -> None:
    """Sets ``owner[key]``, or removes it if ``value`` is ``ABSENT``, and notes in ``undo`` what was there."""
    undo.append((owner, key, owner.get(key, ABSENT)))
    if value is ABSENT:
        owner.pop(key, None)
    else:
        owner[key] = value


def put_back(undo: Undo) -> None:
    """Undoes every replacement, the last one first, and empties ``undo``. May be called again after an interrupt."""
    while undo:
        owner, key, value = undo[-1]
        if key is None:
            if differs(owner, value):
                fill(owner, value)
        elif value is ABSENT:
            owner.pop(key, None)
        else:
            owner[key] = value
        undo.pop()


def contents(owner: Any) -> Any:
    """Returns a copy of a container, or the state of a generator."""
    return owner.get_state() if isinstance(owner, torch.Generator) else copy.copy(owner)


def fill(owner: Any, value: Any) -> None:
    """Gives a container or a generator the :func:`contents` ``value``."""
    if isinstance(owner, torch.Generator):
        owner.set_state(value)
        return
    owner.clear()
    if isinstance(owner, (dict, set)):
        owner.update(value)
    else:
        owner.extend(value)


def differs(now: Any, then: Any) -> bool:
    """Whether two containers hold other objects, compared by identity (the items of sets by equality).

    ``then`` is the state of ``now`` if that is a generator.
    """
    if isinstance(now, torch.Generator):
        return not torch.equal(now.get_state(), then)
    if len(now) != len(then):
        return True
    if isinstance(now, set):
        return bool(now != then)
    if not isinstance(now, dict):
        return any(a is not b for a, b in zip(now, then, strict=True))
    if all(map(is_, now, then)) and all(map(is_, now.values(), then.values())):
        return False
    return any(key not in now or now[key] is not value for key, value in then.items())
