"""Writes what the other hooks measured as lines of JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import final

from graphckpt.train.loop import HookBase, Loop


@final
class MetricsHook(HookBase):
    """Appends one object for each iteration that was measured; comes after the hooks that measure."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def before_train(self, loop: Loop) -> None:
        """Empties the file of an earlier run."""
        if loop.start_iter == 0:
            self._path.write_text("", encoding="utf-8")

    def after_step(self, loop: Loop) -> None:
        """Writes ``{"iteration": ..., ...}``; what is not finite becomes null, which JSON can say."""
        if not loop.metrics:
            return
        finite = {name: value if math.isfinite(value) else None for name, value in loop.metrics.items()}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"iteration": loop.done, **finite}) + "\n")
