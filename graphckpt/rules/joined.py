"""Keeps not even the input of a block, where recomputing the block right before it returns that."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import nn

from graphckpt.engine.block import BlockContext
from graphckpt.engine.frame import Frame, running
from graphckpt.rules.base import Rule


@final
@dataclass(frozen=True)
class Joined(Rule):
    """Recomputes the block as one with the recomputed block that is called right before it.

    ::

        full joined joined   full joined      backward: 0, 1 and 2 are recomputed, in this order
           0      1      2      3      4

    What it needs of the block before is that it is recomputed (``full``, ``selective`` or ``joined``), and that it
    returns the very tensor that this block is called with. Whatever calls them, no container is needed. An argument
    that is anything else is kept, as ``full`` does.
    """

    name: ClassVar[str] = "joined"

    def check(self, module: nn.Module) -> str | None:
        """Rejects units of FSDP2, whose weights are gathered one unit at a time."""
        fsdp = sys.modules.get("torch.distributed.fsdp")
        if fsdp is not None and isinstance(module, fsdp.FSDPModule):
            return (
                "joined recomputes several blocks at once, but fully_shard gathers the weights of one at a time · "
                "fix: use activation_checkpointing = True, or call fully_shard on the parent of the joined blocks"
            )
        return None

    def run(self, block: BlockContext, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs the block; backward will recompute those before it, and then it."""
        if running.get() is not None:
            return function(*args, **kwargs)
        return Frame(block, function, joins=True).run(args, kwargs)
