"""Puts data, model, graphs and hooks together into one run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.optim import Optimizer

from graphckpt.errors import ConfigError
from graphckpt.train.data import Prepared, TextData
from graphckpt.train.graphs import EvalGraph, TrainGraph
from graphckpt.train.hooks import EvalHook, ExplainHook, ExportHook, LogHook, MetricsHook
from graphckpt.train.loop import HookBase, Loop
from graphckpt.train.order import ShuffledOrder
from graphckpt.train.report import Report
from graphckpt.train.settings import TrainConfig


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
    """Trains a language model on text.

    Args:
        settings: the section ``train`` of a config.
        make_model: returns the model; called once the seed is set.
        make_optimizer: returns the optimizer of the model, which is on its device by then.
        data: the text.
        report: where to say what happens; by default the console and ``log.txt`` in the output folder.
        hooks: more hooks, which run after the trainer's own.
    """

    def __init__(
        self,
        settings: TrainConfig,
        *,
        make_model: Callable[[], nn.Module],
        make_optimizer: Callable[[nn.Module], Optimizer],
        data: TextData,
        report: Report | None = None,
        hooks: tuple[HookBase, ...] = (),
    ) -> None:
        self.settings = settings
        self._make_model = make_model
        self._make_optimizer = make_optimizer
        self._data = data
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
        """Sequences in one iteration."""
        return self.settings.train_micro_batch_size * self.settings.num_accumulation_steps

    def train(self) -> Outcome:
        """Prepares the data, trains, and writes the results.

        Raises:
            GraphckptError: the config cannot act, there is too little text, or the loss is not finite.
        """
        settings = self.settings
        torch.manual_seed(settings.seed)
        model = self._make_model().to(self.device).train()
        optimizer = self._make_optimizer(model)
        scheduler = settings.scheduler(
            optimizer=optimizer,
            max_iter=settings.train_iter,
            warmup_iter=math.ceil(settings.train_iter * settings.warmup_ratio),
        )
        graph = TrainGraph(
            model,
            optimizer,
            scheduler,
            activation_checkpoint=settings.activation_checkpoint,
            amp=settings.amp,
            num_accumulation_steps=settings.num_accumulation_steps,
        )
        # After the graph: a fault in the config shows before a long wait for the data.
        prepared = self._data.prepare(self.report)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.report.line(
            f"model: {type(model).__name__}, {num_parameters:,} parameters on {self.device};"
            f" {settings.train_iter} iterations of {self.batch_size} x {prepared.seq_length} tokens"
        )
        order = ShuffledOrder(num_sequences=len(prepared.train), seed=settings.seed)

        def step(iteration: int) -> dict[str, Tensor]:
            indices = order.take(start=iteration * self.batch_size, count=self.batch_size)
            loss: Tensor = graph(**self._batch(prepared.train.batch(indices)))
            return {"total_loss": loss.mean()}

        hooks = [*self._hooks(model, optimizer, graph, prepared), *self._more_hooks]
        loop = Loop(step, train_iter=settings.train_iter, report=self.report, hooks=hooks)
        loop.run()
        outcome = Outcome(iterations=loop.done, is_stopped=loop.is_stopped, files=self._files())
        self._show(outcome)
        return outcome

    def _hooks(
        self, model: nn.Module, optimizer: Optimizer, graph: TrainGraph, prepared: Prepared
    ) -> Iterator[HookBase]:
        settings = self.settings
        yield LogHook(
            optimizer,
            device=self.device,
            log_period=settings.log_period,
            batch_size=self.batch_size,
            seq_length=prepared.seq_length,
        )
        if settings.evaluation.enabled:
            eval_graph = EvalGraph(model, amp=settings.amp)
            yield EvalHook(
                lambda batch: eval_graph(**batch),
                lambda: self._heldout_batches(prepared),
                model=model,
                eval_period=settings.evaluation.eval_period,
            )
        yield MetricsHook(self.folder / "metrics.json")
        yield ExplainHook(graph, self.folder / "step.png")
        yield ExportHook(model, prepared.tokenizer_file, self.folder / "model_final", seq_length=prepared.seq_length)

    def _heldout_batches(self, prepared: Prepared) -> Iterator[dict[str, Tensor]]:
        size, limit = self.settings.test_micro_batch_size, self.settings.evaluation.eval_iter
        count = len(prepared.heldout) if limit is None else min(len(prepared.heldout), size * limit)
        for first in range(0, count, size):
            yield self._batch(prepared.heldout.batch(range(first, min(first + size, count))))

    def _batch(self, tokens: Tensor) -> dict[str, Tensor]:
        """Returns the model's arguments: it learns to say each token from those before it."""
        tokens = tokens.to(self.device)
        return {"input_ids": tokens, "labels": tokens}

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
