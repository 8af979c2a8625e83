"""Remembers what the first call was given, and says by name what a later call gives otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch

from graphckpt.tree import flatten_call

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@final
class InputCheck:
    """The shapes, dtypes, devices and values of one call's arguments."""

    def __init__(self, build: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._build = build
        leaves, self._shape = flatten_call(args, kwargs)
        self.described = [_describe(leaf) for leaf in leaves]
        self.names = [self._shape.name(position, build) for position in range(len(leaves))]

    def difference(self, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
        """Returns what is not as in the first call, naming the argument by its path, or ``None``."""
        leaves, shape = flatten_call(args, kwargs)
        if (shape.num_args, shape.keywords, len(leaves)) != (
            self._shape.num_args,
            self._shape.keywords,
            len(self.described),
        ):
            now = [shape.name(position, self._build) for position in range(len(leaves))]
            return f"the arguments were ({', '.join(self.names)}) and are ({', '.join(now)})"
        for position, (leaf, first) in enumerate(zip(leaves, self.described, strict=True)):
            if (now_described := _describe(leaf)) != first:
                return f"input `{self.names[position]}` was {first} and is {now_described}"
        return None


def _describe(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        dtype = str(leaf.dtype).removeprefix("torch.")
        return f"{dtype}{list(leaf.shape)} on {leaf.device}"
    return repr(leaf)
