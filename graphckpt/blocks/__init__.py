"""Blocks: a policy on a module."""

from graphckpt.blocks.apply import Handle, apply
from graphckpt.blocks.config import BlockConfig
from graphckpt.blocks.forward import disable_checkpointing

__all__ = ["BlockConfig", "Handle", "apply", "disable_checkpointing"]
