"""Takes the arguments or outputs of a call apart into leaves, and puts them together again around other leaves."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, NamedTuple

import torch

from graphckpt._compat import pytree

ATOMS = frozenset({NoneType, bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
"""Types that cannot change and hold no tensor."""


class CallShape(NamedTuple):
    """How the leaves of one call fit together; ``spec`` is ``None`` where no argument is a container."""

    num_args: int
    keywords: tuple[str, ...]
    spec: Any = None

    def assemble(self, leaves: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Returns ``(args, kwargs)`` with fresh containers around ``leaves``."""
        if self.spec is not None:
            leaves = _join(self.spec, leaves)
        if not self.keywords:
            return leaves, {}
        return leaves[: self.num_args], dict(zip(self.keywords, leaves[self.num_args :], strict=True))

    def name(self, position: int, function: Callable[..., Any]) -> str:
        """Names leaf number ``position`` as the user would: ``hidden_states`` or ``states[0]``."""
        return self.names(function)[position]

    def names(self, function: Callable[..., Any]) -> list[str]:
        """Names every leaf, in order."""
        if self.spec is None:
            paths = [(top, "") for top in range(self.num_args + len(self.keywords))]
        else:
            paths = _paths(self.spec)
        return [
            (self.keywords[top - self.num_args] if top >= self.num_args else _positional_name(function, top)) + rest
            for top, rest in paths
        ]


def flatten_call(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], CallShape]:
    """Returns every leaf of the arguments in order, and the shape that puts them together again.

    Lists, tuples, dicts, dataclasses with tensors and every container that is registered with ``torch.utils._pytree``
    are taken apart. What else is no tensor stays one leaf and passes by reference.
    """
    leaves = [*args, *kwargs.values()] if kwargs else list(args)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) and type(leaf) not in ATOMS:
            leaves, spec = _split(leaves)
            return leaves, CallShape(len(args), tuple(kwargs), spec)
    return leaves, _plain_shape(len(args), tuple(kwargs))


@functools.lru_cache  # many calls share one: Python's garbage collector visits every one that is alive
def _plain_shape(num_args: int, keywords: tuple[str, ...]) -> CallShape:
    return CallShape(num_args, keywords)


def flatten_value(value: Any) -> tuple[list[Any], Any]:
    """Returns the leaves of one value, such as an output, and the spec for :func:`build_value`."""
    if isinstance(value, torch.Tensor):
        return [value], None
    return _split(value)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the tensors among the leaves of one value, such as an output or ``(args, kwargs)``, in order."""
    return [leaf for leaf in flatten_value(value)[0] if isinstance(leaf, torch.Tensor)]


def build_value(spec: Any, leaves: Sequence[Any]) -> Any:
    """Puts the leaves of :func:`flatten_value` together again."""
    return leaves[0] if spec is None else _join(spec, leaves)


@dataclass(frozen=True, slots=True)
class _Spec:
    tree: Any
    records: tuple[tuple[int, Any, tuple[str, ...], _Spec], ...]
    # (leaf position, a dataclass object without its fields, their names, what is below)


def _split(value: Any) -> tuple[list[Any], _Spec]:
    found, tree = pytree.tree_flatten(value)
    leaves: list[Any] = []
    records = []
    for position, leaf in enumerate(found):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, (type, torch.nn.Module)):
            names = tuple(f.name for f in dataclasses.fields(leaf) if hasattr(leaf, f.name))
            below, spec = _split([getattr(leaf, name) for name in names])
            if not any(isinstance(value, torch.Tensor) for value in below):
                leaves.append(leaf)  # a config, say, which is passed by reference
                continue
            records.append((position, _twin(leaf, dict.fromkeys(names)), names, spec))  # the spec must hold no tensor
            leaves.extend(below)
        else:
            leaves.append(leaf)
    return leaves, _Spec(tree, tuple(records))


def _join(spec: _Spec, leaves: Sequence[Any]) -> Any:
    if not spec.records:
        return pytree.tree_unflatten(leaves, spec.tree)
    found: list[Any] = []
    rest = iter(leaves)
    records = {position: record for position, *record in spec.records}
    for position in range(spec.tree.num_leaves):
        if position in records:
            blank, names, below = records[position]
            values = _join(below, [next(rest) for _ in range(_num_leaves(below))])
            found.append(_twin(blank, dict(zip(names, values, strict=True))))
        else:
            found.append(next(rest))
    return pytree.tree_unflatten(found, spec.tree)


def _twin(record: Any, fields: dict[str, Any]) -> Any:
    twin = copy.copy(record)
    for name, value in fields.items():
        object.__setattr__(twin, name, value)  # also where the dataclass is frozen
    return twin


def _paths(spec: _Spec) -> list[tuple[int, str]]:
    """Returns, for each leaf of a list, the index of the item that it is in, and its path from there."""
    keys = [
        keys for keys, _ in pytree.tree_flatten_with_path(_join(_Spec(spec.tree, ()), range(spec.tree.num_leaves)))[0]
    ]
    records = {position: record for position, *record in spec.records}
    paths = []
    for position, (first, *rest) in enumerate(keys):
        top: int = first.idx  # type: ignore[attr-defined]  # what is split is a list
        start = pytree.keystr(tuple(rest))
        if position not in records:
            paths.append((top, start))
            continue
        _, names, below = records[position]
        paths += [(top, f"{start}.{names[number]}{inner}") for number, inner in _paths(below)]
    return paths


def _num_leaves(spec: _Spec) -> int:
    below = sum(_num_leaves(record[3]) for record in spec.records)
    return int(spec.tree.num_leaves) - len(spec.records) + below


def _positional_name(function: Callable[..., Any], position: int) -> str:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return f"argument {position}"
    for index, parameter in enumerate(parameters):
        if parameter.kind is parameter.VAR_POSITIONAL:
            return f"{parameter.name}[{position - index}]"
        if index == position:
            return parameter.name
    return f"argument {position}"
