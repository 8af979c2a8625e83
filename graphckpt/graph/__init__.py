"""The user's Graph: modules, optimizers and `build()` make one training step."""

from graphckpt.graph.config import GraphConfig
from graphckpt.graph.graph import Graph

__all__ = ["Graph", "GraphConfig"]
