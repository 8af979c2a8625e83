"""Keeps everything, as the plain step does. Within a recomputed block, it excludes the child from recomputation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, final

from graphckpt.rules.base import Rule
from graphckpt.rules.engine.context import BlockContext
from graphckpt.rules.engine.excluded import run_excluded, run_excluded_without_gradients


@final
@dataclass(frozen=True)
class Keep(Rule):
    """Keeps every intermediate result. ``activation_checkpointing = False`` means this rule."""

    name: ClassVar[str] = "keep"

    def run(self, block: BlockContext, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs the block once; a recomputation of the block around it gets the same outputs."""
        return run_excluded(block, function, args, kwargs)

    def run_without_gradients(
        self, block: BlockContext, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Runs the block; a recomputation of the block around it does so again."""
        return run_excluded_without_gradients(block, function, args, kwargs)

    def graph_break(self, *, has_gradients: bool) -> str | None:
        """Returns ``None``: the block is a part of the graph, as without a rule."""
        del has_gradients
        return None
