"""Remembers what the first call was given, and says by name what a later call gives otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from graphckpt.tree import flatten_call


@final
class InputCheck:
    """The shapes, dtypes, devices and values of one call's arguments."""

    def __init__(self, build: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        leaves, shape = flatten_call(args, kwargs)
        self.names = shape.names(build)
        """The paths of the arguments, as the user would write them."""
        self.described = [_describe(leaf) for leaf in leaves]

    def difference(self, build: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
        """Returns what is not as in the first call, naming the argument by its path, or ``None``."""
        now = InputCheck(build, args, kwargs)
        if now.names != self.names:
            return f"the arguments were ({', '.join(self.names)}) and are ({', '.join(now.names)})"
        for name, was, described in zip(self.names, self.described, now.described, strict=True):
            if was != described:
                return f"input `{name}` was {was} and is {described}"
        return None


def _describe(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        dtype = str(leaf.dtype).removeprefix("torch.")
        return f"{dtype}{list(leaf.shape)} on {leaf.device}"
    return repr(leaf)
