"""Keeps not even the input of a block where the block right before it can return that again."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

from graphckpt.rules.base import Rule
from graphckpt.rules.engine.execution import running
from graphckpt.rules.engine.frame import Frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from graphckpt.rules.engine.context import BlockContext


@final
@dataclass(frozen=True)
class Joined(Rule):
    """Runs the block again as one with the recomputed block that is called right before it.

    ::

        full joined joined   full joined      backward: 0 and 1 run again, then 2, and all of their results are there
           0      1      2      3      4

    What it needs of the block before is that it is recomputed (``full``, ``selective`` or ``joined``), and that it
    returns the very tensor that this block is called with. Whatever calls them, no container is needed. An argument
    that is anything else is kept, as ``full`` does.
    """

    name: ClassVar[str] = "joined"

    def check(self, module: nn.Module) -> str | None:
        """FSDP2 has the weights of one block there at a time."""
        fsdp = sys.modules.get("torch.distributed.fsdp")
        if fsdp is not None and isinstance(module, fsdp.FSDPModule):
            return (
                "joined runs several blocks again at once, and fully_shard has the weights of one there at a time · "
                "fix: use activation_checkpointing = True, or call fully_shard on what holds the joined blocks"
            )
        return None

    def run(self, block: BlockContext, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs the block; backward will run those before it again, and then it."""
        if running.get() is not None:
            return function(*args, **kwargs)
        return Frame(block, function, joins=True).run(args, kwargs)
