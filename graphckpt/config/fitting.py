"""Fits the batch size of a config, for a device that need not be present."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphckpt.config.planning import fake_steps_from
from graphckpt.planning.fit.api import fit_steps

if TYPE_CHECKING:
    from graphckpt.planning.budget import Budget
    from graphckpt.planning.fit.result import Fit


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
