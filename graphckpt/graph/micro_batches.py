"""Cuts a batch into micro-batches and packs their outputs. Knows tensors and containers, not graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from graphckpt.errors import GraphError
from graphckpt.tree import build_value, flatten_call, flatten_value


def micro_batches(
    build: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], count: int
) -> Iterator[tuple[Sequence[Any], dict[str, Any]]]:
    """Yields the arguments of each micro-batch: every tensor's part of dim 0, all else as it is.

    Raises:
        GraphError: A tensor's dim 0 is no multiple of ``count``.
    """
    leaves, shape = flatten_call(args, kwargs)
    parts: dict[int, Sequence[torch.Tensor]] = {}
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            if leaf.shape[0] % count or not leaf.shape[0]:
                raise GraphError(
                    f"input `{shape.name(position, build)}` of shape {list(leaf.shape)} cannot be cut into {count} "
                    f"micro-batches · fix: make its dim 0 a multiple of {count}, the gradient accumulation steps"
                )
            parts[position] = leaf.chunk(count)
    for number in range(count):
        yield shape.assemble([parts[i][number] if i in parts else leaf for i, leaf in enumerate(leaves)])


def pack_outputs(outputs: Iterable[Any]) -> Any:
    """Joins the outputs of the micro-batches: stacks what has no dimension, concatenates the rest on dim 0.

    Raises:
        GraphError: They are not of one structure.
    """
    flat = [flatten_value(output) for output in outputs]
    detached = [[x.detach() if isinstance(x, torch.Tensor) else x for x in leaves] for leaves, _ in flat]
    if len({len(leaves) for leaves in detached}) > 1:
        counts = ", ".join(str(len(leaves)) for leaves in detached)
        raise GraphError(f"build returned {counts} values for the micro-batches · fix: return the same ones for each")
    return build_value(flat[0][1], [_pack(leaves) for leaves in zip(*detached, strict=True)])


def fresh_outputs(output: Any, alive: Callable[[], set[int]]) -> Any:
    """Cuts the tensors of ``output`` off from the graph, and copies those that share memory with its inputs or state.

    Args:
        output: What ``build`` returned.
        alive: Returns the addresses of storages that belong to inputs, parameters and buffers.
    """
    if type(output) is dict and all(isinstance(value, torch.Tensor) and is_new(value) for value in output.values()):
        return {name: value.detach() for name, value in output.items()}  # in a third of the time
    leaves, spec = flatten_value(output)
    known: set[int] | None = None
    fresh = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and not is_new(leaf):
            known = alive() if known is None else known
            shared = leaf.layout is torch.strided and leaf.untyped_storage().data_ptr() in known
            fresh.append(leaf.detach().clone() if shared else leaf.detach())
        else:
            fresh.append(leaf.detach() if isinstance(leaf, torch.Tensor) else leaf)
    return build_value(spec, fresh)


def is_new(tensor: torch.Tensor) -> bool:
    """Whether an op has made the memory of ``tensor``; where this is not sure, it returns False."""
    return tensor.grad_fn is not None and not tensor._version and not tensor._is_view()


def _pack(leaves: tuple[Any, ...]) -> Any:
    first = leaves[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(leaves) if first.dim() else torch.stack(leaves)
    return first if all(leaf is first or leaf == first for leaf in leaves) else list(leaves)
