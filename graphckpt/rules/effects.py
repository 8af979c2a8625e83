"""The tensors that an op reads, writes and makes, by its schema and by the memory of its arguments and results."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch

from graphckpt._compat import is_fake, pytree

PLAIN_CLASSES: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter)


class Effects(NamedTuple):
    """The tensors that an op reads, writes and makes."""

    reads: list[torch.Tensor]
    writes: list[torch.Tensor] | None
    """The arguments that its schema marks as written; ``None`` if it marks none, as for most ops."""
    statistics: list[torch.Tensor]
    """Running statistics that it updates although its schema does not mark them."""
    makes: list[torch.Tensor]
    """The tensors that it returns."""
    leaves: list[Any]
    """All leaves of its output; ``makes`` are the tensors among them."""
    spec: Any
    """The pytree structure of its output; ``None`` if it is one tensor."""
    is_view: bool
    """Whether it returns views of what it reads."""

    @classmethod
    def of(cls, func: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Effects | None:
        """Returns ``None`` if they are unknown: the op has no schema (a higher-order op), or a tensor is not plain."""
        schema = getattr(func, "_schema", None)
        reads = list(tensors_among(chain(args, kwargs.values())))
        leaves, spec = ([output], None) if isinstance(output, torch.Tensor) else pytree.tree_flatten(output)
        makes = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if schema is None or not all(map(is_plain_tensor, chain(reads, makes))):
            return None
        if schema.is_mutable:
            return cls(reads, list(mutated_by(func, args, kwargs)), [], makes, leaves, spec, is_view=False)
        # By memory, not by schema: `_unsafe_view` and `unsafe_split` return views that theirs do not declare.
        storages = {id(tensor.untyped_storage()) for tensor in reads}
        is_view = any(id(result.untyped_storage()) in storages for result in makes)
        return cls(reads, None, statistics_of(func, args, kwargs), makes, leaves, spec, is_view)


def tensors_among(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_among(value)


def is_plain_tensor(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) in PLAIN_CLASSES or is_fake(tensor)
    return is_plain and tensor.layout is torch.strided and not tensor.is_nested


def mutated_by(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yields the tensors that an op writes to by its schema, such as ``Tensor(a!) self``."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, torch.Tensor):
                yield tensor


# Ops that update running statistics in place, although their schemas do not mark them and no version is counted.
_BATCH_NORMS = (
    "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm",
    "batch_norm_update_stats", "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts",
)  # fmt: skip
_ARGUMENT_POSITIONS = {
    op: {argument.name: position for position, argument in enumerate(op._schema.arguments)}
    for op in (getattr(torch.ops.aten, name).default for name in _BATCH_NORMS)
}
"""By op of a batch norm: the position of each of its arguments by name."""


def statistics_of(func: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Returns the running statistics that a batch norm updates, empty for any other op and in evaluation."""
    positions = _ARGUMENT_POSITIONS.get(func)
    if positions is None:
        return []

    def value(name: str, default: Any) -> Any:
        position = positions.get(name, len(args))  # behind all positional arguments if the op has none of this name
        return args[position] if position < len(args) else kwargs.get(name, default)

    # Ops without this argument, such as `batch_norm_update_stats`, always train.
    if not value("training", default=True):
        return []
    return [t for name in ("running_mean", "running_var") if (t := value(name, default=None)) is not None]
