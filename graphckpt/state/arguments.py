"""Mutable objects among a call's arguments, such as key-value caches, as they were before the original forward."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from graphckpt.tree import ATOMS
from graphckpt.undo import ABSENT, CONTAINERS, Undo, differs, fill

Objects: TypeAlias = list[tuple[Any, Any]]
"""``(list or attribute dict, shallow copy of it)`` for all that an argument object reaches."""


def copy_objects(leaves: Sequence[Any]) -> Objects:
    """Copies, one level deep each, the lists and attributes that objects among ``leaves`` reach.

    This is how a key-value cache that is passed by reference can be seen as it was.
    """
    seen: set[int] = set()
    found: Objects = []
    todo = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor) and type(leaf) not in ATOMS]
    while todo and len(found) < _MOST_OBJECTS:
        value = todo.pop()
        owner = value if isinstance(value, CONTAINERS) else getattr(value, "__dict__", None)
        if owner is None or id(owner) in seen or isinstance(value, (nn.Module, type)) or callable(value):
            continue
        seen.add(id(owner))
        if isinstance(owner, CONTAINERS):
            found.append((owner, copy.copy(owner)))
            inner = owner.values() if isinstance(owner, dict) else owner
            todo.extend(v for v in inner if not isinstance(v, torch.Tensor) and type(v) not in ATOMS)
    return found


def drop_unchanged(before: Objects) -> Objects:
    """Drops from ``before`` the tensors that the original forward did not change."""
    return [(owner, _settled(owner, then)) for owner, then in before]


def rewind_objects(objects: Objects, undo: Undo) -> None:
    """Puts the objects back to what they were, noting in ``undo`` what they are now."""
    for owner, then in objects:
        if not isinstance(owner, dict):
            if then is not None and differs(owner, then):
                undo.append((owner, None, copy.copy(owner)))
                fill(owner, then)
        elif any(owner.get(key, ABSENT) is not value for key, value in then.items()):
            undo.append((owner, None, dict(owner)))
            owner.update(then)
            for key in [key for key, value in then.items() if value is ABSENT]:
                del owner[key]


_MOST_OBJECTS = 4096  # an object that reaches more than this is a whole program, not an argument


def _settled(owner: Any, then: Any) -> Any:
    if not isinstance(owner, dict):
        has_tensors = any(isinstance(value, torch.Tensor) for value in then)
        return then if differs(owner, then) or not has_tensors else None
    left_alone = {k for k, v in then.items() if isinstance(v, torch.Tensor) and owner.get(k, ABSENT) is v}
    added = {key: ABSENT for key in owner if key not in then}
    return {key: value for key, value in then.items() if key not in left_alone} | added
