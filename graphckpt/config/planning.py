"""Plans the step that a config describes, and fits its batch size, for a device that need not be present."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from graphckpt.config import overrides as _overrides
from graphckpt.config.load import load
from graphckpt.config.packaged import existing
from graphckpt.config.run import optimizer_of
from graphckpt.config.schema import RunConfig, checked
from graphckpt.errors import ConfigError, bullets
from graphckpt.planning.candidates import compile_options
from graphckpt.planning.fake_device import FakeDevice
from graphckpt.planning.fit import SizedStep, fit_steps
from graphckpt.planning.plan_group import PlanGroup
from graphckpt.planning.planner import Planners, measure_all
from graphckpt.planning.profile import DeviceProfile, load_profile
from graphckpt.planning.steps import FakeStep
from graphckpt.train.console import Report
from graphckpt.train.tasks.base import TextTask, sum_of_losses
from graphckpt.train.units import head_policies, unit_names

if TYPE_CHECKING:
    from graphckpt.planning.fit_result import Fit
    from graphckpt.planning.options import Budget


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
    with fake_steps_from(config_file, overrides, device=device, options=options) as steps:
        sizes = steps.run.train.sizes
        step = steps.step(sizes.micro_batch, sizes.accumulation).step
        wanted = replace(steps.options, progress=progress)
        return measure_all(step, steps.model, steps.blocks, wanted, PlanGroup(), steps.notes), steps.machine


def fit_from(
    config_file: str | Path,
    overrides: Iterable[str] = (),
    *,
    device: str,
    memory_budget: Budget = "max",
    batch_sizes: Iterable[int] | None = None,
    global_batch: int | None = None,
    options: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Fit:
    """Finds the batch sizes that fit, for the step that a config describes, on a device that need not be present.

    Args:
        config_file: a path, or the name of a packaged config.
        overrides: words such as ``"data.seq_length=512"``.
        device: the name of a device profile, or a file that holds one.
        memory_budget: as :func:`graphckpt.fit` takes it.
        batch_sizes: as :func:`graphckpt.fit` takes them.
        global_batch: samples of one update of one process; ``None`` is the config's ``train.global_batch_size``.
        options: fields of :class:`~graphckpt.planning.PlanOptions` that replace those of the config.
        progress: called with a line about each measurement before it begins.

    Raises:
        ConfigError: with every fault of the config, or an argument cannot be used.
        PlanError: not even the smallest batch fits.
    """
    with fake_steps_from(config_file, overrides, device=device, options=options) as steps:
        train = steps.run.train
        if global_batch is None and train.global_batch_size is not None:
            global_batch = train.global_batch_size // train.dist.data_parallel_size
        return fit_steps(steps, batch_sizes, memory_budget, steps.options, global_batch=global_batch, progress=progress)


@contextmanager
def fake_steps_from(
    config_file: str | Path, overrides: Iterable[str] = (), *, device: str, options: Mapping[str, Any] | None = None
) -> Iterator[FakeConfigSteps]:
    """Yields the steps that a config describes, of any batch size; see :func:`planner_from` for the arguments."""
    path = existing(Path(config_file))
    config = load(path)
    overrides = list(overrides)
    faults = _overrides.apply(config, overrides)
    target = load_profile(device)
    with checked(config, faults, path, overrides) as (run, _):
        yield FakeConfigSteps(run, target, options or {})


@final
class FakeConfigSteps:
    """The steps of a config on a device that need not be present, for any batch size.

    Args:
        run: the config.
        machine: the profile of the device.
        options: fields of :class:`~graphckpt.planning.PlanOptions` that replace those of the config.
    """

    is_real = False
    can_accumulate = True

    def __init__(self, run: RunConfig, machine: DeviceProfile, options: Mapping[str, Any]) -> None:
        self.run = run
        self.machine = machine
        self._task: Any = run.task()
        self._data = run.data().open(self._task, seed=run.train.seed, report=Report.silent())
        self._fake = FakeDevice(machine)
        with self._fake:
            self.model: Any = self._task.prepare(run.model())
        if self._data.text and isinstance(self._task, TextTask):
            faults = list(TextTask.check(self._task, self.model, self._data.text))  # a subclass's may compute losses
            if faults:
                raise ConfigError(bullets("model and data do not fit", faults) if len(faults) > 1 else faults[0])
        with self._fake:
            self.model.train()
            self._optimizer = optimizer_of(run, self.model, machine.kind)
        section = run.train.activation_checkpoint
        wanted = section.plan_options(**{**options, "partition": None, "compile": None})
        self.options = replace(wanted, head=head_policies(self.model, wanted.head))
        self.blocks = [(name, self.model.get_submodule(name)) for name in unit_names(self.model, section)]
        self.notes: list[str] = []
        if compile_options(section.compile) is not None:
            self.notes.append("compile: its effect is not known without the device; planned without")

    def step(self, size: int, accumulation: int = 1) -> SizedStep:
        """Returns the step of a micro-batch size."""
        numbers = np.arange(size, dtype=np.int64) % max(1, len(self._data.train))
        sample = self._data.train.batch(numbers)
        with self._fake:
            batch = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in sample.items()}

        def step() -> None:
            for _ in range(accumulation):
                with _autocast(self.run, self.machine):
                    total = sum_of_losses(self._task.losses(self.model, batch))
                total.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()

        fake = FakeStep(self._fake, self.model, step, self._optimizer)
        return SizedStep(fake, self.model, self.blocks)


def _autocast(run: RunConfig, target: DeviceProfile) -> Any:
    amp = run.train.amp
    return torch.autocast(target.kind, dtype=getattr(torch, amp.dtype)) if amp.enabled else nullcontext()
