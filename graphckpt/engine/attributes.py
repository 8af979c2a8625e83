"""Reads the attributes of a block's modules, many of them in one call of C, and sorts them by what may change them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import chain
from numbers import Number
from operator import itemgetter
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, final

import torch
from torch import nn

from graphckpt.tree import ATOMS

if TYPE_CHECKING:
    from graphckpt.engine.objects import Objects

OWN = frozenset(nn.Module().__dict__)
"""The attributes of PyTorch on every module, such as ``training``, ``_buffers`` and ``_forward_hooks``."""
_CONSTANTS = (Number, str, bytes, Enum, range, type, torch.layout, torch.memory_format)  # NumPy registers its numbers

Fields: TypeAlias = list[dict[str, Any]]
"""``module.__dict__`` of each module of a block. No call keeps them: they hold the forwards, and so the calls."""
Modes: TypeAlias = tuple[bool | None, ...]
"""Whether each module of a block is in training mode; ``None`` for one that asks the module that it wraps."""
Attribute: TypeAlias = tuple[int, str]
"""The number of a module among those of the block, and the name of an attribute."""
Values: TypeAlias = list[tuple[Any, ...]]
"""Values of attributes, by reader."""


# Note [Attributes in later calls]
#
# Attributes of the user's modules, and of PyTorch's if the first call has changed some or a policy is on the module. Of
# other modules of PyTorch's, only the numbers are read, such as the probability of a dropout.
#
#   attribute                         what a later call does                     what the recomputation gets
#   number, string, flag, `forward`   reads it (`layout.plain`)                  its value at the call
#   tensor (`scope.names`)            clones it if the first call has modified   the tensor or a clone
#                                     it (`_moved`)
#   list, dict, set, deque            copies its items (`scope.objects`), and    the same object with these items, if
#                                     what small ones reach                      they are plain, reach tensors, or were
#                                                                                changed by the call
#   object that the first call has    copies all that it reaches                 the same object with these contents
#   changed
#   object that reaches tensors, or   copies the same, if that is at most 256    likewise, with stand-ins for tensors
#   None, which may become one        objects (`scope.open`)                     that were modified since
#   any other object                  compares its identity (`layout.others`)    the object of the call, if the call has
#                                                                                replaced it
#
# An object without tensors is looked into once, and then known by a weak reference (`_inert`): it is not held, because
# it may come to hold an output. See Note [Lifetime of a call] in frame.py.


class AttributeReader(NamedTuple):
    """Reads attributes of a module in one call of C: a block of a hundred modules needs three hundred a step."""

    module: int
    names: tuple[str, ...]
    read: Callable[[dict[str, Any]], tuple[Any, ...]]
    """Returns their values. Raises :class:`KeyError` if one is missing."""

    # `itemgetter("p")` returns a value and no tuple, so that a single name is read twice, by `itemgetter("p", "p")`.
    # This is why names and values are zipped with `strict=False`.

    @classmethod
    def of(cls, module: int, names: Sequence[str]) -> AttributeReader:
        return cls(module, tuple(names), itemgetter(*names, *(names if len(names) == 1 else ())))


class Reached(NamedTuple):
    """An attribute before a call, and the contents of the objects that it reaches."""

    module: int
    name: str
    value: Any
    objects: Objects
    is_held: bool
    """Whether the recomputation gets the value whatever the caller has set since: tensors, which are inputs, numbers.

    Other objects are not held: they may come to hold an output, whose graph holds the copy.
    """


@final
@dataclass(slots=True, eq=False)
class AttributeLayout:
    """Which attributes calls read, until some come or go or have values of other types."""

    sizes: list[int]
    """How many fields each module has, PyTorch's own among them."""
    plain: list[AttributeReader]
    """Of the attributes with plain values. The recomputation gets them whether or not the call has changed them."""
    others: list[AttributeReader]
    """Of other attributes, which are not held: they may come to hold an output, whose graph holds the call."""
    complete: frozenset[int]
    """The modules of which all attributes are read."""
    kinds: list[type]
    """The types of all values: one that was ``None`` and is a tensor by now has to be cloned, not read."""

    @classmethod
    def of(cls, fields: Fields, names: Iterable[list[str]], complete: Iterable[int]) -> AttributeLayout:
        """Sorts the attributes with these ``names``, of each module."""
        plain: list[AttributeReader] = []
        others: list[AttributeReader] = []
        for at, (owner, keys) in enumerate(zip(fields, names, strict=True)):
            # `forward` is a wrapper, and not plain. It is held, as it refers to its module weakly.
            values_only = [key for key in keys if key == "forward" or is_plain_value(owner[key])]
            if values_only:
                plain.append(AttributeReader.of(at, values_only))
            if rest := [key for key in keys if key not in values_only]:
                others.append(AttributeReader.of(at, rest))
        values = chain.from_iterable(read(fields[at]) for at, _, read in (*plain, *others))
        return cls([*map(len, fields)], plain, others, frozenset(complete), [*map(type, values)])


def is_plain_value(value: Any) -> bool:
    """Whether a value cannot change, and cannot come to hold an output of a block."""
    if type(value) in ATOMS or isinstance(value, _CONSTANTS):
        return True
    if isinstance(value, BuiltinFunctionType):
        return isinstance(value.__self__, (ModuleType, type))
    if isinstance(value, FunctionType):
        return value.__closure__ is None and not value.__dict__
    if isinstance(value, partial):
        return is_plain_value((value.func, *value.args, *value.keywords.values()))
    if isinstance(value, slice):
        return is_plain_value((value.start, value.stop, value.step))
    return type(value) in (tuple, frozenset) and all(map(is_plain_value, value))


def attribute_names(fields: dict[str, Any]) -> list[str]:
    return [key for key in fields if key not in OWN]


def number_names(fields: dict[str, Any]) -> list[str]:
    """Names the attributes of a module of PyTorch's that a program may change from call to call.

    Those of modules without weights, such as the probability of a dropout, and numbers such as the momentum of a norm:
    the others say what shapes the weights have.
    """
    has_weights = bool(fields.get("_parameters") or fields.get("_modules"))  # a traced module has neither
    kinds = (float,) if has_weights else (float, int, bool, str)
    return [key for key, value in fields.items() if key not in OWN and type(value) in kinds]


def holds_results(container: Any) -> bool:
    items = container.values() if isinstance(container, dict) else container
    return any(isinstance(item, torch.Tensor) and item.grad_fn is not None for item in items)
