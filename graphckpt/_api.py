"""The names of the top level, which :mod:`graphckpt` imports on first use."""

from graphckpt.blocks import BlockConfig, GraphModule, Handle, apply, remove
from graphckpt.blocks.functional import checkpoint, checkpoint_sequential, checkpoint_wrapper
from graphckpt.checks.comparison import Verification
from graphckpt.checks.verify import verify
from graphckpt.errors import ConfigError, GraphckptError, GraphError, RecomputeError, StoreError
from graphckpt.graph import Graph
from graphckpt.planning import Plan, PlanError
from graphckpt.planning.plan_step import plan
from graphckpt.rules import Full, Joined, Keep, Segments, Selective, Tiles
from graphckpt.search.estimate import estimate
from graphckpt.search.estimate_result import Estimate
from graphckpt.search.fit import find_batch_size, fit
from graphckpt.search.fit_result import Fit
from graphckpt.stores import Disk, Host

__all__ = [
    "BlockConfig",
    "ConfigError",
    "Disk",
    "Estimate",
    "Fit",
    "Full",
    "Graph",
    "GraphError",
    "GraphModule",
    "GraphckptError",
    "Handle",
    "Host",
    "Joined",
    "Keep",
    "Plan",
    "PlanError",
    "RecomputeError",
    "Segments",
    "Selective",
    "StoreError",
    "Tiles",
    "Verification",
    "apply",
    "checkpoint",
    "checkpoint_sequential",
    "checkpoint_wrapper",
    "estimate",
    "find_batch_size",
    "fit",
    "plan",
    "remove",
    "verify",
]
