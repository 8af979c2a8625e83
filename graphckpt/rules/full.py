"""Keeps only a block's inputs, and recomputes all of it in backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import nn

from graphckpt.engine.block import BlockContext
from graphckpt.engine.frame import Frame, running
from graphckpt.rules.base import Rule
from graphckpt.rules.in_graph import checkpoint_in_graph, contexts_around


@final
@dataclass(frozen=True)
class Full(Rule):
    """Keeps the inputs of the block. ``activation_checkpointing = True`` means this rule."""

    name: ClassVar[str] = "full"

    def run(self, block: BlockContext, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs the block; backward will recompute it once. Within a recomputed block, it is a part of that one."""
        if running.get() is not None:
            return function(*args, **kwargs)
        return Frame(block, function).run(args, kwargs)

    def graph_break(self, *, has_gradients: bool) -> str | None:
        """Returns ``None``: PyTorch's own checkpoint recomputes the block."""
        del has_gradients
        return None

    def run_in_graph(self, module: nn.Module, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs the block under PyTorch's own checkpoint."""
        del module
        return checkpoint_in_graph(function, args, kwargs, contexts_around(function))
