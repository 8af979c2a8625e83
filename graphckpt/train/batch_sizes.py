"""Numbers of samples in a forward, an update and a run, derived from those given. Integers only, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from graphckpt.errors import ConfigError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """Samples of an update: ``global_batch = micro_batch * data_parallel * accumulation``."""

    micro_batch: int
    """Samples in one forward."""
    accumulation: int
    """Forwards for one update of the weights."""
    data_parallel: int
    """Processes that each do so."""

    @property
    def global_batch(self) -> int:
        """Samples of one update."""
        return self.micro_batch * self.data_parallel * self.accumulation


def batch_sizes(
    *, micro_batch: int | None, global_batch: int | None, accumulation: int | None, data_parallel: int = 1
) -> BatchSizes:
    """Derives what is ``None``; ``accumulation`` is 1 if nothing says otherwise.

    Raises:
        ConfigError: the numbers contradict each other, do not divide, or too few are given.

    >>> batch_sizes(micro_batch=8, global_batch=64, accumulation=None, data_parallel=2)
    BatchSizes(micro_batch=8, accumulation=4, data_parallel=2)
    >>> batch_sizes(micro_batch=None, global_batch=64, accumulation=4).micro_batch
    16
    """
    if micro_batch is None and global_batch is None:
        fix = "set one of train.train_micro_batch_size and train.global_batch_size"
        raise ConfigError(f"train_micro_batch_size: is null, and so is global_batch_size · fix: {fix}")
    if global_batch is None or micro_batch is None:
        accumulation = accumulation or 1
        if global_batch is not None:
            parts = data_parallel * accumulation
            _check_divides(global_batch, parts, f"data_parallel_size {data_parallel} x accumulation {accumulation}")
            micro_batch = global_batch // parts
        assert micro_batch is not None
        return BatchSizes(micro_batch=micro_batch, accumulation=accumulation, data_parallel=data_parallel)
    at_once = micro_batch * data_parallel
    if accumulation is None:
        _check_divides(global_batch, at_once, f"micro batch {micro_batch} x data_parallel_size {data_parallel}")
        accumulation = global_batch // at_once
    if at_once * accumulation != global_batch:
        made = f"micro batch {micro_batch} x data_parallel_size {data_parallel} x accumulation {accumulation}"
        fix = f"set global_batch_size to {at_once * accumulation}, or leave one of the three out (null)"
        raise ConfigError(f"global_batch_size: {global_batch}, but {made} is {at_once * accumulation} · fix: {fix}")
    return BatchSizes(micro_batch=micro_batch, accumulation=accumulation, data_parallel=data_parallel)


def _check_divides(global_batch: int, parts: int, described: str) -> None:
    if global_batch % parts:
        near = max(parts, round(global_batch / parts) * parts)
        raise ConfigError(
            f"global_batch_size: expected a multiple of {described}, got {global_batch} · fix: use {near}"
        )


def iterations(
    *, train_iter: int, train_epoch: float, train_samples: int | None, num_samples: int, global_batch: int
) -> int:
    """Returns how many updates a run makes: ``train_iter``, more for ``train_epoch``, or those of ``train_samples``.

    >>> iterations(train_iter=5, train_epoch=2, train_samples=None, num_samples=25, global_batch=4)
    13
    """
    if train_samples is not None:
        return math.ceil(train_samples / global_batch)
    return max(train_iter, math.ceil(num_samples * train_epoch / global_batch))


def epoch_period(epochs: int, *, num_samples: int, global_batch: int) -> int:
    """Returns how many updates are ``epochs`` times through the data; as libai does, without the rest of an epoch.

    >>> epoch_period(2, num_samples=25, global_batch=4)
    12
    """
    return max(1, num_samples // global_batch * epochs)
