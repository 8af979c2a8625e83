"""Blocks: a policy on a module."""

from graphckpt.blocks.apply import Handle, apply, remove
from graphckpt.blocks.config import BlockConfig
from graphckpt.blocks.forward import disable_checkpointing
from graphckpt.blocks.functional import is_recomputing
from graphckpt.blocks.proxy import Block, GraphModule

__all__ = [
    "Block",
    "BlockConfig",
    "GraphModule",
    "Handle",
    "apply",
    "disable_checkpointing",
    "is_recomputing",
    "remove",
]
