"""Layers that ``torch.compile`` compiles, each for itself: planned as they run then, and said so in the plan."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from graphckpt.blocks.config import BlockConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn


def compile_options(value: Any) -> dict[str, Any] | None:
    """Returns what ``torch.compile`` of a layer is called with; ``None`` if it is not compiled.

    Raises:
        ConfigError: ``value`` is neither yes nor no nor options.
    """
    config = BlockConfig("plan")
    config.update({"compile": value})
    return config.compile_options


@contextmanager
def compiled(modules: Iterable[nn.Module], options: dict[str, Any] | None) -> Iterator[None]:
    """Has the forward of each module run compiled, beneath the policies that are put on meanwhile."""
    before: list[tuple[dict[str, Any], Any]] = []
    try:
        for module in modules if options is not None else ():
            fields, forward = module.__dict__, torch.compile(module.forward, **(options or {}))
            before.append((fields, fields.get("forward")))
            fields["forward"] = forward
        yield
    finally:
        for fields, forward in before:
            del fields["forward"]
            if forward is not None:
                fields["forward"] = forward
