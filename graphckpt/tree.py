"""Takes the arguments or outputs of a call apart into leaves, and puts them together again around other leaves."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, NamedTuple

import torch

from graphckpt._compat import pytree, storage_of
from graphckpt.errors import ConfigError

# Note [Leaves of a call]
#
#     call                      leaves            shape
#     f(x, 3, mask=m)           x, 3, m           without a spec: leaves are the arguments, which most calls have
#     f(x, [m, {"n": 3}])       x, m, 3           a spec of two arguments, the second a list
#     f(Batch(x, n=3), cls)     x, 3, cls         Batch, a dataclass with a tensor in it, is a `_Record` in the spec; a
#                                                 class, a config or any other object is a leaf, passed as it is
#
# `names` returns "hidden.ids", "hidden.n", "states[0]" for f(hidden, states) called with Batch(ids, n) and a list.

ATOMS = frozenset({NoneType, bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
"""Types that cannot change and hold no tensor."""


class CallShape(NamedTuple):
    """How the leaves of one call fit together; ``spec`` is ``None`` where no argument is a container."""

    num_args: int
    keywords: tuple[str, ...]
    spec: Any = None

    def assemble(self, leaves: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        if self.spec is not None:
            leaves = pytree.tree_unflatten(leaves, self.spec)
        if not self.keywords:
            return leaves, {}
        return leaves[: self.num_args], dict(zip(self.keywords, leaves[self.num_args :], strict=True))

    def name(self, position: int, function: Callable[..., Any]) -> str:
        """Names leaf number ``position`` as the user would: ``hidden_states`` or ``states[0]``."""
        return self.names(function)[position]

    def names(self, function: Callable[..., Any]) -> list[str]:
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
    are taken apart. Any other object stays one leaf and passes by reference.
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
    return leaves[0] if spec is None else pytree.tree_unflatten(leaves, spec)


@dataclass(slots=True)
class _Record:
    """Stands for a dataclass with tensors while it is flattened; it is unflattened as that dataclass."""

    blank: Any
    """The dataclass with ``None`` in its fields: a spec must hold no tensor."""
    fields: dict[str, Any]


def _flatten(record: _Record) -> tuple[list[Any], Any]:
    return list(record.fields.values()), (record.blank, tuple(record.fields))


pytree.register_pytree_node(
    _Record,
    _flatten,
    lambda values, context: _twin(context[0], dict(zip(context[1], values, strict=True))),
    flatten_with_keys_fn=lambda record: (
        [(pytree.GetAttrKey(name), value) for name, value in record.fields.items()],
        _flatten(record)[1],
    ),
)


def _is_size(value: Any) -> bool:
    return type(value) is torch.Size  # which pytree would put together again as a tuple


def _split(value: Any) -> tuple[list[Any], Any]:
    try:
        leaves, spec = pytree.tree_flatten(value, is_leaf=_is_size)
        if any(map(dataclasses.is_dataclass, leaves)):
            return pytree.tree_flatten(_with_records(value, {}), is_leaf=_is_size)
    except RecursionError:
        raise _contains_itself("a container") from None
    return leaves, spec


def _contains_itself(what: str) -> ConfigError:
    return ConfigError(
        f"expected arguments and outputs whose containers do not contain themselves, got {what} that does · "
        "fix: pass its tensors as separate arguments"
    )


def _with_records(value: Any, is_ring: dict[int, bool]) -> Any:
    """Returns ``value`` with a record in place of each dataclass that holds tensors.

    ``is_ring`` has, by id, the dataclasses around ``value``, and whether one of their fields leads back to them.
    """

    def record_or_leaf(leaf: Any) -> Any:
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, (type, torch.nn.Module)):
            return leaf
        if id(leaf) in is_ring:
            is_ring[id(leaf)] = True
            return leaf
        is_ring[id(leaf)] = False
        names = [field.name for field in dataclasses.fields(leaf) if hasattr(leaf, field.name)]
        fields = {name: _with_records(getattr(leaf, name), is_ring) for name in names}
        leads_back = is_ring.pop(id(leaf))
        if not any(isinstance(value, torch.Tensor) for value in pytree.tree_leaves(fields)):
            return leaf  # a config, say, which is passed by reference
        if leads_back:
            raise _contains_itself(f"a {type(leaf).__name__}")
        return _Record(_twin(leaf, dict.fromkeys(names)), fields)

    return pytree.tree_map(record_or_leaf, value, is_leaf=_is_size)


def _twin(record: Any, fields: dict[str, Any]) -> Any:
    twin = copy.copy(record)
    for name, value in fields.items():
        object.__setattr__(twin, name, value)  # also where the dataclass is frozen
    return twin


def _paths(spec: Any) -> list[tuple[int, str]]:
    """Returns, for each leaf of a list, the index of the item that it is in, and its path from there."""
    leaves = [torch.empty(0) for _ in range(spec.num_leaves)]  # tensors, so that each record is one again
    keyed, _ = pytree.tree_flatten_with_path(_with_records(pytree.tree_unflatten(leaves, spec), {}))
    return [(first.idx, pytree.keystr(tuple(rest))) for (first, *rest), _ in keyed]  # type: ignore[attr-defined]


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


def inner_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    elif hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            value = getattr(tensor, name)
            if isinstance(value, torch.Tensor):
                yield value


def storages_of(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """Yields the storages of a tensor: of a wrapper, such as a DTensor, those of the tensors in it."""
    storage = storage_of(tensor)
    if storage is not None and not hasattr(tensor, "__tensor_flatten__"):
        yield storage
        return
    for inner in inner_tensors(tensor):
        yield from storages_of(inner)
