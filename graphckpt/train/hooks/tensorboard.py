"""Writes the metrics of the other hooks for TensorBoard, an optional package."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any, final

from graphckpt.errors import ConfigError
from graphckpt.train.loop import HookBase, Loop


@final
class TensorBoardHook(HookBase):
    """Adds a scalar for each metric of an iteration; runs after the hooks that add them.

    Raises:
        ConfigError: the package is not installed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None
        try:
            self._module: Any = importlib.import_module("torch.utils.tensorboard")
        except ImportError as error:
            fix = "pip install 'graphckpt[tensorboard]', or train.tensorboard=False"
            raise ConfigError(f"train.tensorboard: the package tensorboard is not installed · fix: {fix}") from error

    def after_step(self, loop: Loop) -> None:
        """Writes the metrics of this iteration; later ones of an earlier process are purged."""
        if self._writer is None:
            self._writer = self._module.SummaryWriter(str(self._folder), purge_step=loop.start_iter)
        self._add(loop.rows)

    def after_train(self, loop: Loop) -> None:
        """Writes what was read from the device after the last iteration, and closes the file."""
        if self._writer is not None:
            self._add(loop.late_metrics)
            self._writer.close()

    def _add(self, rows: list[tuple[int, dict[str, float]]]) -> None:
        for iteration, metrics in rows:
            for name, value in metrics.items():
                if math.isfinite(value):
                    self._writer.add_scalar(name, value, iteration)
