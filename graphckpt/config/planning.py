"""From a config file to a planner: of the device at hand, or of one that is not there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from graphckpt.blocks.apply import apply
from graphckpt.config import overrides as _overrides
from graphckpt.config import own_modules
from graphckpt.config.load import importable_from, load
from graphckpt.config.run import existing, optimizer_of
from graphckpt.config.schema import RunConfig, checked
from graphckpt.planning.api import Progress, head_rows
from graphckpt.planning.candidates import options
from graphckpt.planning.compiled import compile_options
from graphckpt.planning.device.fake_device import FakeDevice
from graphckpt.planning.device.profile import DeviceProfile, load_profile
from graphckpt.planning.measure.fake_step import FakeStep
from graphckpt.planning.measure.instrument import Blocks
from graphckpt.planning.measure.sweep import measure
from graphckpt.planning.planner import Planner, Planners
from graphckpt.planning.solve.search import CopyRates
from graphckpt.train.blocks import head_of, units
from graphckpt.train.graphs import sum_of_losses
from graphckpt.train.report import Report
from graphckpt.units import parse_bytes


def planner_from(
    config_file: str | Path,
    overrides: Iterable[str] = (),
    *,
    device: str,
    offload: bool | str = False,
    host_budget: str | None = None,
    head: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> tuple[Planners, DeviceProfile]:
    """Returns the planner of the step that a config describes, and the device that it is for.

    Nothing runs on a real device: model, gradients and optimizer take no memory, whatever their size.

    Args:
        config_file: a path, or the name of a packaged config.
        overrides: words such as ``"train.train_micro_batch_size=64"``.
        device: the name of a device profile, or the file of one.
        offload: where kept tensors may go.
        host_budget: the most bytes that may be there.
        head: the block that computes the loss, and how it may run; what the config says of it, if nothing.
        progress: told how many runs are done.

    Raises:
        ConfigError: with every fault of the config, or there is no such device.
    """
    path = existing(Path(config_file))
    config = load(path)
    faults = _overrides.apply(config, list(overrides))
    places, more = own_modules.folders(config, path)
    target = load_profile(device)
    with importable_from(*places):
        run = checked(config, [*faults, *more], str(path))
        fake = FakeDevice(target)
        step, model = _step(run, fake)
        names = units(model, run.train.activation_checkpoint)
        blocks = Blocks([(name, model.get_submodule(name)) for name in names])
        considered = options(offload)
        rates = None
        if any(option.is_far for option in considered):
            disk = str(offload).startswith("disk")
            out, back = (target.disk_write, target.disk_read) if disk else (target.copy_out, target.copy_in)
            rates = CopyRates(out, back) if out > 0 and back > 0 else None
            if rates is None:
                considered = options()
        notes = (
            []
            if rates is not None or not offload
            else [f"offload: {target.name} has no rates of copies in its profile"]
        )
        if compile_options(run.train.activation_checkpoint.compile) is not None:
            notes.append("compile: what it makes of a layer shows on the device alone; planned without")
        host_bytes = None if host_budget is None else parse_bytes(host_budget)
        planners = []
        heads = head_of(model, head or run.train.activation_checkpoint.head)
        for rows in head_rows(model, heads, list(zip(blocks.names, blocks.modules, strict=True))):
            with apply(model, {row.block: row.fields for row in rows}) if rows else nullcontext():
                measured = measure(step, blocks, considered, progress)
            planners.append(
                Planner(measured, device=target.name, rates=rates, host_budget=host_bytes, notes=notes, extra_rows=rows)
            )
    return Planners(planners), target


def _step(run: RunConfig, fake: FakeDevice) -> tuple[FakeStep, nn.Module]:
    sizes = run.train.sizes
    task: Any = run.task()
    opened = run.data().open(task, seed=run.train.seed, report=Report.silent())
    numbers = np.arange(sizes.micro_batch, dtype=np.int64) % max(1, len(opened.train))
    sample = opened.train.batch(numbers)
    with fake:
        model: Any = task.prepare(run.model())
        model.train()
        optimizer = optimizer_of(run, model, fake.machine.kind)
        batch = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in sample.items()}

    def step() -> None:
        for _ in range(sizes.accumulation):
            with _autocast(run, fake.machine):
                total = sum_of_losses(task.losses(model, batch))
            total.backward()
        optimizer.step()
        optimizer.zero_grad()

    return FakeStep(fake, model, step, optimizer), model


def _autocast(run: RunConfig, target: DeviceProfile) -> Any:
    amp = run.train.amp
    return torch.autocast(target.kind, dtype=getattr(torch, amp.dtype)) if amp.enabled else nullcontext()
