"""The rules of a few lines: ``keep``, ``full`` and ``joined``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import nn

from graphckpt.engine.block import BlockContext
from graphckpt.engine.excluded import run_excluded
from graphckpt.engine.execution import innermost, running
from graphckpt.engine.frame import Frame
from graphckpt.rules.base import Rule
from graphckpt.rules.in_graph import checkpoint_in_graph, contexts_of_full


@final
@dataclass(frozen=True)
class Keep(Rule):
    """Keeps every intermediate result. ``activation_checkpointing = False`` means this rule.

    Within a recomputed block, it excludes the child from recomputation.
    """

    name: ClassVar[str] = "keep"

    def run(self, block: BlockContext, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs the block once; a recomputation of the block around it gets the same outputs."""
        return run_excluded(block, function, args, kwargs)

    def graph_break(self, *, has_gradients: bool) -> str | None:
        """Returns ``None``: the block belongs to the graph, as without a rule."""
        del has_gradients
        return None


@final
@dataclass(frozen=True)
class Full(Rule):
    """Keeps the inputs of the block. ``activation_checkpointing = True`` means this rule."""

    name: ClassVar[str] = "full"

    def run(self, block: BlockContext, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs the block; backward will recompute it once. Within a recomputed block, it belongs to that one."""
        # With a separate frame it would be recomputed twice: with the block around it, and by itself.
        # `running` is nearly always `None`. Where it is not, `innermost` drops what an interrupt has left behind.
        if running.get() is not None and innermost() is not None:
            return function(*args, **kwargs)
        return Frame(block, function).run(args, kwargs)

    def run_in_graph(self, module: nn.Module, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs the block under PyTorch's checkpoint."""
        del module
        return checkpoint_in_graph(function, args, kwargs, contexts_of_full(function))


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
        if innermost() is not None:
            return function(*args, **kwargs)
        return Frame(block, function, joins=True).run(args, kwargs)
