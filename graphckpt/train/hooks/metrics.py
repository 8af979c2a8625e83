"""Writes the metrics of the other hooks as lines of JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import final

from graphckpt.train.files import AppendFile
from graphckpt.train.loop import HookBase, Loop


@final
class MetricsHook(HookBase):
    """Appends one object for each iteration with metrics; runs after the hooks that add them.

    While the disk is full, rows are buffered and training continues.
    """

    def __init__(self, path: Path) -> None:
        self._file = AppendFile(path)
        self._has_complained = False

    def after_step(self, loop: Loop) -> None:
        """Writes ``{"iteration": ..., ...}``; a value that is not finite becomes null, which JSON can express."""
        self._write(loop, loop.rows)

    def after_train(self, loop: Loop) -> None:
        """Writes what was read from the device after the last iteration."""
        self._write(loop, loop.late_metrics)

    def _write(self, loop: Loop, rows: list[tuple[int, dict[str, float]]]) -> None:
        for iteration, metrics in rows:
            finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
            error = self._file.append(json.dumps({"iteration": iteration, **finite}) + "\n")
            if error and not self._has_complained:
                loop.report.line(f"{self._file.path}: {error.strerror}; its rows wait until they can be written", "red")
            self._has_complained = error is not None
