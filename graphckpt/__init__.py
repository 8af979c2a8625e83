"""Say, block by block, what a training step keeps, recomputes or moves."""

from graphckpt.blocks import BlockConfig, Handle, apply, disable_checkpointing
from graphckpt.errors import ConfigError, GraphckptError, GraphError, RecomputeError

__all__ = [
    "BlockConfig",
    "ConfigError",
    "GraphError",
    "GraphckptError",
    "Handle",
    "RecomputeError",
    "apply",
    "disable_checkpointing",
]
