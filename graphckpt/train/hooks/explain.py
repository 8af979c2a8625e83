"""Shows at the end of a run what each block saved, as a table and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import final

from graphckpt.graph.graph import Graph
from graphckpt.ledger.table import print_table
from graphckpt.train.files import replacing
from graphckpt.train.loop import HookBase, Loop


@final
class ExplainHook(HookBase):
    """Prints the table of the training step and draws its memory over time."""

    def __init__(self, graph: Graph, picture: Path) -> None:
        self._graph = graph
        self._picture = picture

    def after_train(self, loop: Loop) -> None:
        """Prints the table, draws the picture."""
        if loop.done == loop.start_iter:
            return
        try:
            with replacing(self._picture) as fresh:
                explanation = self._graph.explain(str(fresh), show=False)
            loop.picture = self._picture
        except OSError as error:
            loop.report.line(f"{self._picture}: {error.strerror or error}; there is no picture", "red")
            explanation = self._graph.explain(show=False)
        loop.explanation = explanation
        print_table(explanation, loop.report.stream)
        loop.report.log(str(explanation))
