"""Chooses the micro-batch of a run for ``train.activation_checkpoint.fit``, before its trainer is made."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.optim import Optimizer

from graphckpt.config.load import load
from graphckpt.config.schema import RunConfig
from graphckpt.planning.fit.api import fit
from graphckpt.planning.fit.result import BatchFit
from graphckpt.train.console import Report
from graphckpt.train.data.prefetch import to_device
from graphckpt.train.foreign_errors import attribute_errors
from graphckpt.train.parallel.launch import resolve_device
from graphckpt.train.seeds import seed_all
from graphckpt.train.snapshot.saved_run import CONFIG
from graphckpt.train.tasks.base import sum_of_losses
from graphckpt.train.units import head_policies, unit_names
from graphckpt.units import format_bytes

_SECTION = "train.activation_checkpoint"
_CHOSEN = (
    "train.train_micro_batch_size",
    "train.num_accumulation_steps",
    *(f"{_SECTION}.{key}" for key in ("fit", "enabled", "rule", "blocks", "memory_budget", "head", "offload")),
)
"""What a fit sets in a config."""


def fit_run(
    run: RunConfig, config: DictConfig, make_optimizer: Callable[[nn.Module], Optimizer], *, resume: bool = False
) -> list[str]:
    """Writes the micro-batch, accumulation and policies that it chooses into ``config``; returns lines about them.

    A run that is resumed has what was chosen at its start.

    Raises:
        ConfigError: the model has no units, or an option of the planner cannot be used.
        PlanError: no micro-batch that divides the global batch fits.
    """
    saved = Path(run.train.output_dir).expanduser() / CONFIG
    if resume and saved.is_file():
        before = load(saved)
        chosen = {key: OmegaConf.select(before, key) for key in _CHOSEN}
        lines = [f"fit: micro-batch {chosen[_CHOSEN[0]]} x {chosen[_CHOSEN[1]]}, as at the start of the run"]
    else:
        budget_bytes, best = _best(run, make_optimizer)
        chosen = _settings(best)
        peak = f"peak up to {format_bytes(best.peak_bytes)} of {format_bytes(budget_bytes)}"
        rate = f"{best.samples_per_second:.3g} samples/s predicted"
        lines = [f"fit: micro-batch {best.batch_size} x {best.accumulation}, {peak}, {rate}"]
    for key, value in chosen.items():
        OmegaConf.update(config, key, value, merge=False, force_add=True)
    return lines


def _settings(best: BatchFit) -> dict[str, Any]:
    assert best.plan is not None
    values = {
        "fit": None,
        "enabled": True,
        "rule": None,
        "blocks": {name: dict(fields) for name, fields in best.plan.blocks.items()},
        "memory_budget": None,
        "head": None,
        "offload": None,
    }
    sizes = dict(zip(_CHOSEN, (best.batch_size, best.accumulation), strict=False))
    return {**sizes, **{f"{_SECTION}.{key}": value for key, value in values.items()}}


def _best(run: RunConfig, make_optimizer: Callable[[nn.Module], Optimizer]) -> tuple[int, BatchFit]:
    """Runs the step of the config at a few sizes, and returns the budget and the micro-batch that is best."""
    train, section = run.train, run.train.activation_checkpoint
    assert train.global_batch_size is not None
    assert section.fit is not None
    device = resolve_device(train.device, train.dist)
    task: Any = run.task()
    data = run.data().open(task, seed=train.seed, report=Report.silent()).train
    seed_all(train.seed)
    with attribute_errors("model, task", "making the model"):
        model: Any = task.prepare(run.model()).to(device).train()
    optimizer = make_optimizer(model)

    def make_step(size: int) -> tuple[nn.Module, Callable[[], None]]:
        batch = to_device(data.batch(np.arange(size, dtype=np.int64) % len(data)), device)

        def step() -> None:
            amp = train.amp
            with torch.autocast(device.type, getattr(torch, amp.dtype)) if amp.enabled else nullcontext():
                total = sum_of_losses(task.losses(model, batch))
            total.backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, step

    options = section.plan_options(blocks=unit_names(model, section))
    options = replace(options, head=head_policies(model, options.head))
    with attribute_errors("model, task, data, optim", "fitting the batch size"):
        found = fit(
            make_step,
            batch_sizes=[size for size in range(1, train.global_batch_size + 1) if train.global_batch_size % size == 0],
            memory_budget="max" if section.memory_budget is None else section.memory_budget,
            **{name: getattr(options, name) for name in options.names()},
        )
    return found.budget_bytes, found.at_global_batch(train.global_batch_size, section.fit)
