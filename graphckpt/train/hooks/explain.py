"""Shows at the end what each block kept, as a table and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import final

from graphckpt import Graph
from graphckpt.train.loop import HookBase, Loop


@final
class ExplainHook(HookBase):
    """Prints the table of the training step and draws its memory over time."""

    def __init__(self, graph: Graph, picture: Path) -> None:
        self._graph = graph
        self._picture = picture

    def after_train(self, loop: Loop) -> None:
        """Prints the table, draws the picture."""
        if loop.done > loop.start_iter:
            self._graph.explain(plot=self._picture)
