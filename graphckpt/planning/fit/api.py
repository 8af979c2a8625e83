"""Finds the batch sizes that fit into a memory budget, and the plan of each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from graphckpt.errors import ConfigError
from graphckpt.planning import budget as budgets
from graphckpt.planning.device.profile import DeviceProfile, load_profile
from graphckpt.planning.fit.result import Fit
from graphckpt.planning.options import PlanOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from graphckpt.planning.fit.search import MakeStep


def fit(
    make_step: MakeStep,
    *,
    batch_sizes: Iterable[int] | None = None,
    memory_budget: budgets.Budget = "max",
    device: str | Path | DeviceProfile | None = None,
    global_batch: int | None = None,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Fit:
    """Finds the largest batch that fits into a memory budget, the fastest one, and the plan of each batch size.

    The step is measured at each size that is shown, and runs under its plan. The largest size is searched until it fits
    and one more sample does not. A size at which the memory of the device is too small for the step with everything
    kept runs under the plans of the largest size at which it is not.

    Args:
        make_step: called with a batch size; returns the model and a function that runs one training step of that many
            samples, as :func:`graphckpt.plan` takes them. The model may be the same each time, which takes less memory.
        batch_sizes: the micro-batch sizes to plan. A ``range`` are the bounds of a search for the largest that fits,
            and ``None`` searches from 1 on; then there are rows for the sizes of the search and some powers of two.
        memory_budget: the peak of the whole step in bytes, or as ``"12GiB"``; ``"max"`` is the memory of the device,
            and ``"50%"`` half of it.
        device: ``None`` runs the steps on the device of the model. The name of a device profile such as ``"h200"``, a
            profile file or a profile runs no step: ``make_step`` is called where tensors allocate no memory, and has to
            build the model there.
        global_batch: samples of one update; sizes that divide it are planned too, of a search the eight largest that
            fit, for :meth:`~graphckpt.planning.fit.result.Fit.at_global_batch`.
        progress: called with a line about each measurement before it begins.
        options: fields of :class:`~graphckpt.planning.PlanOptions`, such as ``offload="cpu"``.

    Raises:
        ConfigError: an argument cannot be used, or no layers were found in the model.
        PlanError: not even the smallest batch fits.

    >>> import torch
    >>> from torch import nn
    >>> layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)]
    >>> model = nn.Sequential(*layers)
    >>> def make_step(batch_size):
    ...     x = torch.ones(batch_size, 64)
    ...     return model, lambda: model(x).sum().backward()
    >>> found = fit(make_step, memory_budget="8MiB")
    >>> found.largest.batch_size > found.largest_without_recompute.batch_size
    True
    """
    from graphckpt.planning.fit.search import UserSteps, fit_steps  # noqa: PLC0415 - `import graphckpt` need not

    if isinstance(make_step, nn.Module) or not callable(make_step):
        fix = "def make_step(batch_size): ...; return model, step_fn"
        raise ConfigError(f"make_step: expected a function, got {type(make_step).__name__} · fix: {fix}")
    wanted = PlanOptions.of(options, "fit")
    has_group = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if has_group and wanted.group is not False:
        fix = "fit in one process and pass the batch size on, or group=False"
        raise ConfigError(f"fit: expected one process, got a group of {dist.get_world_size()} · fix: {fix}")
    wanted = replace(wanted, group=False)
    machine = device if device is None or isinstance(device, DeviceProfile) else load_profile(device)
    source = UserSteps(make_step, machine, wanted.blocks)
    return fit_steps(source, batch_sizes, memory_budget, wanted, global_batch=global_batch, progress=progress)
