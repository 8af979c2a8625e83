"""Writes the metrics and the memory picture of the other hooks for TensorBoard, an optional package."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any, final

from graphckpt.errors import ConfigError
from graphckpt.train.loop import HookBase, Loop


@final
class TensorBoardHook(HookBase):
    """Adds a scalar for each metric of an iteration, and at the end the saved bytes and the picture of a step.

    It runs after the hooks that add them. Tags are in the groups ``train``, ``eval`` and ``memory``.

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
        """Writes what was read from the device after the last iteration, the picture, and closes the file."""
        if self._writer is None:
            return
        self._add(loop.late_metrics)
        if (explained := loop.explanation) is not None:
            saved = {"kept_bytes_plain": explained.bytes_before, "kept_bytes": explained.bytes_after}
            self._add([(loop.iteration, {name: float(value) for name, value in saved.items()})])
        if loop.picture is not None:
            from matplotlib.image import imread  # noqa: PLC0415 - takes half a second

            self._writer.add_image("memory/step", imread(loop.picture), loop.iteration, dataformats="HWC")
        self._writer.close()

    def _add(self, rows: list[tuple[int, dict[str, float]]]) -> None:
        for iteration, metrics in rows:
            for name, value in metrics.items():
                if math.isfinite(value):
                    self._writer.add_scalar(tag_of(name), value, iteration)


def tag_of(name: str) -> str:
    """Returns a metric's name in its group.

    >>> tag_of("lm_loss"), tag_of("eval_ppl"), tag_of("peak_rss_bytes")
    ('train/lm_loss', 'eval/ppl', 'memory/peak_rss_bytes')
    """
    if name.startswith("eval_"):
        return f"eval/{name.removeprefix('eval_')}"
    return f"memory/{name}" if "_bytes" in name else f"train/{name}"
