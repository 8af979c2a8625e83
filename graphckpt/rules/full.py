"""Keeps only a block's inputs, and recomputes all of it in backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, final

from graphckpt.rules.base import Rule
from graphckpt.rules.engine.context import BlockContext
from graphckpt.rules.engine.execution import running
from graphckpt.rules.engine.frame import Frame


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
