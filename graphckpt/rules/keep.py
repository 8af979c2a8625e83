"""Keeps everything, as the plain step does. Inside of a block that runs again it makes a hole: this child does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

from graphckpt.rules.base import Rule
from graphckpt.rules.engine.excluded import run_excluded

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphckpt.rules.engine.context import BlockContext


@final
@dataclass(frozen=True)
class Keep(Rule):
    """Keeps every intermediate result. ``activation_checkpointing = False`` means this rule."""

    name: ClassVar[str] = "keep"

    def run(self, block: BlockContext, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs the block once; its outputs are handed back if the block around it runs again."""
        return run_excluded(block, function, args, kwargs)
