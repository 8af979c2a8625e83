"""Say, block by block, what a training step keeps, recomputes or moves."""

from graphckpt.blocks import BlockConfig, Handle, apply
from graphckpt.blocks.forward import disable_checkpointing
from graphckpt.blocks.functional import checkpoint, checkpoint_sequential, checkpoint_wrapper, is_recomputing
from graphckpt.blocks.graph_module import GraphModule
from graphckpt.blocks.proxy import Block
from graphckpt.errors import ConfigError, GraphckptError, GraphError, RecomputeError, StoreError
from graphckpt.graph import Graph, GraphConfig
from graphckpt.planning import Plan, PlanError
from graphckpt.planning.api import plan
from graphckpt.rules import Full, Joined, Keep, Rule, Segments, Selective, Tiles
from graphckpt.stores import Disk, Host, Partition

__version__ = "0.1.0"

__all__ = [
    "Block",
    "BlockConfig",
    "ConfigError",
    "Disk",
    "Full",
    "Graph",
    "GraphConfig",
    "GraphError",
    "GraphModule",
    "GraphckptError",
    "Handle",
    "Host",
    "Joined",
    "Keep",
    "Partition",
    "Plan",
    "PlanError",
    "RecomputeError",
    "Rule",
    "Segments",
    "Selective",
    "StoreError",
    "Tiles",
    "apply",
    "checkpoint",
    "checkpoint_sequential",
    "checkpoint_wrapper",
    "disable_checkpointing",
    "is_recomputing",
    "plan",
]
