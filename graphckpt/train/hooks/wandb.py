"""Sends the metrics of the other hooks to Weights & Biases, an optional package."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any, final

from graphckpt.errors import ConfigError
from graphckpt.train.hooks.tensorboard import tag_of
from graphckpt.train.loop import HookBase, Loop
from graphckpt.train.settings import WandbConfig


@final
class WandbHook(HookBase):
    """Logs each metric of an iteration, under ``train/``, ``eval/`` or ``memory/``; runs after the hooks that add them.

    ``--resume`` resumes the run there too.

    Args:
        config: the section ``train.wandb``.
        folder: folder of the package's own files.
        run: the id of the run and of all runs resumed from it.

    Raises:
        ConfigError: the package is not installed.
    """

    def __init__(self, config: WandbConfig, folder: Path, run: str) -> None:
        self._config = config
        self._folder = folder
        self._id = run
        self._run: Any = None
        self._step = 0
        try:
            self._module: Any = importlib.import_module("wandb")
        except ImportError as error:
            fix = "pip install 'graphckpt[wandb]', or train.wandb.enabled=False"
            raise ConfigError(f"train.wandb: the package wandb is not installed · fix: {fix}") from error

    def before_train(self, loop: Loop) -> None:
        """Starts or resumes the run."""
        is_resumed = loop.start_iter > 0
        self._run = self._module.init(
            project=self._config.project,
            name=self._config.name or self._folder.name,
            dir=str(self._folder),
            mode=self._config.mode,
            id=self._id,
            resume="allow" if is_resumed else "never" if self._config.mode == "online" else None,
        )

    def after_step(self, loop: Loop) -> None:
        """Sends the metrics of this iteration."""
        self._send(loop.rows)

    def after_train(self, loop: Loop) -> None:
        """Sends what was read from the device after the last iteration, and ends the run."""
        self._send(loop.late_metrics)
        self._run.finish()

    def _send(self, rows: list[tuple[int, dict[str, float]]]) -> None:
        for iteration, metrics in rows:
            finite = {tag_of(name): value for name, value in metrics.items() if math.isfinite(value)}
            self._step = max(iteration, self._step)  # W&B drops rows of earlier steps than the last one
            if finite:
                self._run.log(finite, step=self._step)
