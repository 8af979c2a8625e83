"""Writes what the other hooks have measured: metrics.json, TensorBoard, Weights & Biases, a table and a picture."""

from __future__ import annotations

import importlib
import json
import math
from abc import ABC, abstractmethod
from functools import partial
from pathlib import Path
from typing import Any, final

from graphckpt.errors import ConfigError
from graphckpt.graph.graph import Graph
from graphckpt.ledger.table import print_table
from graphckpt.train.loop import HookBase, Loop
from graphckpt.train.output import AppendFile, replacing
from graphckpt.train.settings import WandbConfig


class _RowsHook(HookBase, ABC):
    """Writes the metrics of each iteration that has some; runs after the hooks that add them."""

    def after_step(self, loop: Loop) -> None:
        for iteration, metrics in loop.rows:
            self.write(iteration, metrics, loop)

    def after_train(self, loop: Loop) -> None:
        for iteration, metrics in loop.late_metrics:  # read from the device after the last iteration
            self.write(iteration, metrics, loop)

    @abstractmethod
    def write(self, iteration: int, metrics: dict[str, float], loop: Loop) -> None: ...


@final
class MetricsHook(_RowsHook):
    """Appends one object of JSON for each iteration with metrics; while the disk is full, rows are buffered."""

    def __init__(self, path: Path) -> None:
        self._file = AppendFile(path)

    def write(self, iteration: int, metrics: dict[str, float], loop: Loop) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}  # JSON has no nan
        self._file.append(json.dumps({"iteration": iteration, **finite}) + "\n", partial(loop.report.line, style="red"))


@final
class TensorBoardHook(_RowsHook):
    """Adds a scalar for each metric of an iteration, and at the end the saved bytes and the picture of a step."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None
        self._module = _optional("torch.utils.tensorboard", "tensorboard", "train.tensorboard")

    def after_step(self, loop: Loop) -> None:
        # Here and not in `__init__`: the writer makes a file at once, and a run that cannot start must leave none.
        if self._writer is None:  # later rows of an earlier process are purged
            self._writer = self._module.SummaryWriter(str(self._folder), purge_step=loop.start_iter)
        super().after_step(loop)

    def after_train(self, loop: Loop) -> None:
        if self._writer is None:
            return
        super().after_train(loop)
        if (explained := loop.explanation) is not None:
            saved = {"kept_bytes_plain": explained.bytes_before, "kept_bytes": explained.bytes_after}
            self.write(loop.iteration, {name: float(value) for name, value in saved.items()}, loop)
        if loop.picture is not None:
            from matplotlib.image import imread  # noqa: PLC0415 - takes half a second

            self._writer.add_image("memory/step", imread(loop.picture), loop.iteration, dataformats="HWC")
        self._writer.close()

    def write(self, iteration: int, metrics: dict[str, float], loop: Loop) -> None:
        del loop
        for tag, value in _finite_by_tag(metrics).items():
            self._writer.add_scalar(tag, value, iteration)


@final
class WandbHook(_RowsHook):
    """Logs each metric of an iteration; ``--resume`` resumes the run there too."""

    def __init__(self, config: WandbConfig, folder: Path, run: str) -> None:
        self._config = config
        self._folder = folder
        self._id = run
        self._run: Any = None
        self._step = 0
        self._module = _optional("wandb", "wandb", "train.wandb", "train.wandb.enabled")

    def before_train(self, loop: Loop) -> None:
        # `"never"` refuses an id that exists, so that two runs do not mix their rows; offline mode cannot tell.
        is_resumed = loop.start_iter > 0
        self._run = self._module.init(
            project=self._config.project,
            name=self._config.name or self._folder.name,
            dir=str(self._folder),
            mode=self._config.mode,
            id=self._id,
            resume="allow" if is_resumed else "never" if self._config.mode == "online" else None,
        )

    def after_train(self, loop: Loop) -> None:
        super().after_train(loop)
        self._run.finish()

    def write(self, iteration: int, metrics: dict[str, float], loop: Loop) -> None:
        del loop
        self._step = max(iteration, self._step)  # W&B drops rows of earlier steps than the last one
        if finite := _finite_by_tag(metrics):
            self._run.log(finite, step=self._step)


def _optional(module: str, package: str, where: str, switch: str = "") -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        fix = f"pip install {package}, or {switch or where}=False"
        raise ConfigError(f"{where}: the package {package} is not installed · fix: {fix}") from error


def _finite_by_tag(metrics: dict[str, float]) -> dict[str, float]:
    return {tag_of(name): value for name, value in metrics.items() if math.isfinite(value)}


def tag_of(name: str) -> str:
    """Returns a metric's name in its group.

    >>> tag_of("lm_loss"), tag_of("eval_ppl"), tag_of("peak_rss_bytes")
    ('train/lm_loss', 'eval/ppl', 'memory/peak_rss_bytes')
    """
    if name.startswith("eval_"):
        return f"eval/{name.removeprefix('eval_')}"
    return f"memory/{name}" if "_bytes" in name else f"train/{name}"


@final
class ExplainHook(HookBase):
    """Prints at the end what each block saved in a training step, and draws its memory over time."""

    def __init__(self, graph: Graph, picture: Path) -> None:
        self._graph = graph
        self._picture = picture

    def after_train(self, loop: Loop) -> None:
        if loop.done == loop.start_iter:
            return
        try:
            with replacing(self._picture) as fresh:
                explanation = self._graph.explain(str(fresh), show=False)
            loop.picture = self._picture
        except OSError as error:
            loop.report.line(f"{self._picture}: {error.strerror or error}; no picture was drawn", "red")
            explanation = self._graph.explain(show=False)
        loop.explanation = explanation
        print_table(explanation, loop.report.stream)
        loop.report.log(str(explanation))
