"""Plans the step that a config describes, for a device that need not be present."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from graphckpt.config import overrides as _overrides
from graphckpt.config import own_modules
from graphckpt.config.load import importable_from, load
from graphckpt.config.packaged import existing
from graphckpt.config.run import optimizer_of
from graphckpt.config.schema import RunConfig, checked
from graphckpt.planning.compiled import compile_options
from graphckpt.planning.device.fake_device import FakeDevice
from graphckpt.planning.device.profile import DeviceProfile, load_profile
from graphckpt.planning.measure.fake_step import FakeStep
from graphckpt.planning.measure_all import measure_all
from graphckpt.planning.plan_group import PlanGroup
from graphckpt.planning.planner import Planners
from graphckpt.train.console import Report
from graphckpt.train.tasks.base import sum_of_losses
from graphckpt.train.units import head_policies, unit_names


def planner_from(
    config_file: str | Path,
    overrides: Iterable[str] = (),
    *,
    device: str,
    options: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Planners, DeviceProfile]:
    """Returns the planner of the step that a config describes, and the device that it is for.

    Nothing runs on a real device: model, gradients and optimizer take no memory, whatever their size.

    Args:
        config_file: a path, or the name of a packaged config.
        overrides: words such as ``"train.train_micro_batch_size=64"``.
        device: the name of a device profile, or a file that holds one.
        options: fields of :class:`~graphckpt.planning.PlanOptions` that replace those of the config's section
            ``train.activation_checkpoint``.
        progress: called with the runs of the step that are done, and their number.

    Raises:
        ConfigError: with every fault of the config, or there is no such device.
    """
    path = existing(Path(config_file))
    config = load(path)
    overrides = list(overrides)
    faults = _overrides.apply(config, overrides)
    places, more = own_modules.folders(config, path)
    target = load_profile(device)
    with importable_from(*places):
        run = checked(config, [*faults, *more], " ".join([str(path), *overrides]))
        section = run.train.activation_checkpoint
        wanted = section.plan_options(**{**(options or {}), "partition": None, "compile": None, "progress": progress})
        step, model = _step(run, FakeDevice(target))
        head = head_policies(model, wanted.head)
        notes = []
        if compile_options(section.compile) is not None:
            notes.append("compile: its effect is not known without the device; planned without")
        blocks = [(name, model.get_submodule(name)) for name in unit_names(model, section)]
        wanted = replace(wanted, head=head)
        return measure_all(step, model, blocks, wanted, PlanGroup(), notes), target


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
