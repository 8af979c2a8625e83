"""Puts data, model, graphs and hooks together into one run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import torch
from rich.table import Table
from torch import Tensor, nn
from torch.optim import Optimizer

from graphckpt.errors import ConfigError, bullets
from graphckpt.train.blocks import checkpointed_blocks
from graphckpt.train.data import Data
from graphckpt.train.graphs import EvalGraph, TrainGraph
from graphckpt.train.hooks import EvalHook, ExplainHook, ExportHook, LogHook, MetricsHook
from graphckpt.train.loop import HookBase, Loop
from graphckpt.train.order import ShuffledOrder
from graphckpt.train.report import Report
from graphckpt.train.settings import TrainConfig
from graphckpt.train.sizes import iterations
from graphckpt.train.tasks.base import Opened, Samples, Task, TextTask


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run came to."""

    iterations: int
    is_stopped: bool
    """Whether the user stopped it."""
    files: dict[str, Path]
    """What the run wrote, by what it is."""


class Trainer:
    """Trains a model on a task.

    Args:
        settings: the section ``train`` of a config.
        make_model: returns the model; called once the seed is set.
        make_optimizer: returns the optimizer of the model, which is on its device by then.
        data: what to learn from.
        task: what to learn: batches, losses, metrics.
        report: where to say what happens; by default the console and ``log.txt`` in the output folder.
        hooks: more hooks, which run after the trainer's own.
    """

    def __init__(
        self,
        settings: TrainConfig,
        *,
        make_model: Callable[[], nn.Module],
        make_optimizer: Callable[[nn.Module], Optimizer],
        data: Data,
        task: Task,
        report: Report | None = None,
        hooks: tuple[HookBase, ...] = (),
    ) -> None:
        self.settings = settings
        self._make_model = make_model
        self._make_optimizer = make_optimizer
        self._data = data
        self._task = task
        self._more_hooks = hooks
        self.folder = Path(settings.output_dir).expanduser()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            fix = "name a folder that can be written"
            raise ConfigError(f"train.output_dir: {self.folder}: {error.strerror} · fix: {fix}") from error
        log_file = self.folder / "log.txt"
        log_file.write_text("", encoding="utf-8")
        self.report = report or Report(log_file=log_file)
        self.device = _device(settings.device)

    @property
    def batch_size(self) -> int:
        """Samples in one iteration."""
        return self.settings.sizes.global_batch

    def train(self) -> Outcome:
        """Prepares the data, trains, and writes the results.

        Raises:
            GraphckptError: the config cannot act, there is too little text, or the loss is not finite.
        """
        settings = self.settings
        torch.manual_seed(settings.seed)
        model = self._make_model().to(self.device).train()
        optimizer = self._make_optimizer(model)
        checkpointed_blocks(model, settings.activation_checkpoint)  # a fault shows before a long wait for the data
        opened = self._open(model)
        train_iter = iterations(
            train_iter=settings.train_iter,
            train_epoch=settings.train_epoch,
            train_samples=settings.train_samples,
            num_samples=len(opened.train),
            global_batch=self.batch_size,
        )
        warmup_iter = math.ceil(train_iter * settings.warmup_ratio)
        graph = TrainGraph(
            model,
            self._task,
            optimizer,
            settings.scheduler(optimizer=optimizer, max_iter=train_iter, warmup_iter=warmup_iter),
            activation_checkpoint=settings.activation_checkpoint,
            amp=settings.amp,
            num_accumulation_steps=settings.sizes.accumulation,
        )
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.report.line(
            f"model: {type(model).__name__}, {num_parameters:,} parameters on {self.device};"
            f" {train_iter} iterations of {self.batch_size} samples"
            + (f" x {opened.tokens_each} tokens" if opened.text else "")
        )
        order = ShuffledOrder(num_sequences=len(opened.train), seed=settings.seed)

        def step(iteration: int) -> dict[str, Tensor]:
            start = settings.consumed_train_samples + iteration * self.batch_size
            batch = opened.train.batch(order.take(start=start, count=self.batch_size))
            losses: dict[str, Tensor] = graph(**self._on_device(batch))
            return {name: loss.mean() for name, loss in losses.items()}

        hooks = [*self._hooks(model, optimizer, graph, opened), *self._more_hooks]
        loop = Loop(step, train_iter=train_iter, report=self.report, hooks=hooks)
        loop.run()
        outcome = Outcome(iterations=loop.done, is_stopped=loop.is_stopped, files=self._files())
        self._show(outcome)
        return outcome

    def _open(self, model: nn.Module) -> Opened:
        """Opens the data.

        Raises:
            ConfigError: the model does not fit it.
        """
        opened = self._data.open(self._task, seed=self.settings.seed, report=self.report)
        if opened.text and isinstance(self._task, TextTask):
            faults = list(self._task.check(model, opened.text))
            if faults:
                raise ConfigError(bullets("model and data do not fit", faults) if len(faults) > 1 else faults[0])
        return opened

    def _hooks(self, model: nn.Module, optimizer: Optimizer, graph: TrainGraph, opened: Opened) -> Iterator[HookBase]:
        settings = self.settings
        yield LogHook(
            optimizer,
            device=self.device,
            log_period=settings.log_period,
            batch_size=self.batch_size,
            seq_length=opened.tokens_each,
        )
        heldout = opened.heldout
        if settings.evaluation.enabled and heldout is not None:
            eval_graph = EvalGraph(model, self._task, amp=settings.amp)
            yield EvalHook(
                lambda batch: eval_graph(**batch),
                lambda: self._heldout_batches(heldout),
                self._task.metrics,
                model=model,
                eval_period=settings.evaluation.eval_period,
            )
        yield MetricsHook(self.folder / "metrics.json")
        yield ExplainHook(graph, self.folder / "step.png")
        yield ExportHook(model, opened.tokenizer_file, self.folder / "model_final", seq_length=opened.tokens_each)

    def _heldout_batches(self, heldout: Samples) -> Iterator[dict[str, Tensor]]:
        size, limit = self.settings.test_micro_batch_size, self.settings.evaluation.eval_iter
        count = len(heldout) if limit is None else min(len(heldout), size * limit)
        for first in range(0, count, size):
            yield self._on_device(heldout.batch(np.arange(first, min(first + size, count))))

    def _on_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self.device) for name, tensor in batch.items()}

    def _files(self) -> dict[str, Path]:
        names = {
            "weights, config, tokenizer": "model_final",
            "memory of a step": "step.png",
            "metrics": "metrics.json",
            "log": "log.txt",
            "config": "config.yaml",
        }
        return {what: self.folder / name for what, name in names.items() if (self.folder / name).exists()}

    def _show(self, outcome: Outcome) -> None:
        how = "stopped" if outcome.is_stopped else "done"
        table = Table(
            title=f"{how} after {outcome.iterations} iterations",
            title_justify="left",
            show_header=False,
            box=None,
        )
        for what, path in outcome.files.items():
            table.add_row(what, str(path))
        self.report.show(table)


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError) as error:  # a build without CUDA asserts
        first_line = str(error).split("\n", 1)[0]
        fix = "leave train.device out, and the device is picked"
        raise ConfigError(f"train.device: {name!r} cannot be used ({first_line}) · fix: {fix}") from error
