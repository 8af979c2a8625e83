"""Training samples by index, the order in which they are drawn, and batches of them on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_collate

from graphckpt.train.data.documents import DataError
from graphckpt.train.data.tokens import PreparedText
from graphckpt.train.output import Report

Batch = dict[str, Tensor]


class Samples(Protocol):
    """Training samples by index. An index always returns the same sample."""

    def __len__(self) -> int: ...

    def batch(self, indices: NDArray[np.int64]) -> Batch:
        """Returns the samples with these indices, each tensor with them along dim 0, on the CPU."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """Data opened for a task."""

    train: Samples
    heldout: Samples | None
    """The samples to evaluate on; ``None`` if there are none."""
    text: PreparedText | None = None
    """The text and its tokenizer; ``None`` for other data."""

    @property
    def tokenizer_file(self) -> Path | None:
        """The ``tokenizer.json``, if any."""
        return self.text.tokenizer_file if self.text else None

    @property
    def tokens_each(self) -> int:
        """Tokens of one sample; 1 for other data."""
        return self.text.seq_length if self.text else 1


@final
@dataclass(frozen=True, slots=True)
class _Collated:
    items: Any
    key: str

    def __len__(self) -> int:
        return len(self.items)

    def batch(self, indices: NDArray[np.int64]) -> dict[str, Tensor]:
        batch = default_collate([self.items[int(index)] for index in indices])
        if not isinstance(batch, dict) or not all(isinstance(value, Tensor) for value in batch.values()):
            fix = "return a dict of tensors and numbers, named as the model's arguments"
            raise DataError(f"{self.key}: a sample is a {type(self.items[0]).__name__} · fix: {fix}")
        return batch


@final
@dataclass(frozen=True, kw_only=True)
class OwnData:
    """Two map-style data sets. A sample is a dict; its keys are argument names of the model.

    A sample must be the same each time it is read; otherwise a resumed run differs.
    """

    train: Any
    """The data set to train on."""
    heldout: Any = None
    """The data set to evaluate on; ``None`` if nothing is evaluated."""

    def open(self, task: object, *, seed: int, report: Report) -> Opened:
        """Returns the samples; ``task`` and ``seed`` are not used.

        Raises:
            DataError: a data set has no length, or no sample.
        """
        del task, seed
        train = _samples(self.train, "data.train")
        heldout = None if self.heldout is None else _samples(self.heldout, "data.heldout")
        report.line(f"data: {len(train):,} samples to train on, {len(heldout) if heldout else 0:,} held out")
        return Opened(train=train, heldout=heldout)


def _samples(items: Any, key: str) -> Samples:
    if not (hasattr(items, "__len__") and hasattr(items, "__getitem__")):
        fix = "give it __len__ and __getitem__"
        raise DataError(f"{key}: expected a map-style data set, got {type(items).__name__} · fix: {fix}")
    if not len(items):
        raise DataError(f"{key}: {type(items).__name__} holds no sample · fix: fill it")
    return _Collated(items, key)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ShuffledOrder:
    """A permutation for each epoch, determined by the seed and the epoch's number.

    The order is stateless: a resumed run continues after the samples it has consumed.

    >>> order = ShuffledOrder(num_sequences=4, seed=0)
    >>> sorted(order.take(start=0, count=4).tolist())
    [0, 1, 2, 3]
    >>> order.take(start=3, count=2)[1] == order.take(start=4, count=1)[0]
    np.True_
    """

    num_sequences: int
    seed: int

    def take(self, *, start: int, count: int) -> NDArray[np.int64]:
        """Returns the indices of ``count`` sequences, after the first ``start`` of the run."""
        parts = []
        while count > 0:
            epoch, offset = divmod(start, self.num_sequences)
            parts.append(_permutation(self.num_sequences, self.seed, epoch)[offset : offset + count])
            start += len(parts[-1])
            count -= len(parts[-1])
        return np.concatenate(parts)


@lru_cache(maxsize=2)  # of this epoch, and of the next one where a batch reaches into it
def _permutation(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng((seed, epoch)).permutation(size)


def heldout_batches(
    heldout: Samples, *, size: int, limit: int | None, rank: int = 0, num_ranks: int = 1
) -> Iterator[tuple[dict[str, Tensor], bool]]:
    """Yields every ``num_ranks``-th batch, and whether it counts.

    All ranks yield equally many batches, since a sharded model runs on all processes or on none: a rank without a last
    batch repeats its first one, or the very first, which does not count. At most ``limit`` are spread over all samples.
    """
    count = len(heldout) if limit is None else min(len(heldout), size * limit)
    # With a limit of 3 of 9 samples: 0, 3, 6. The first ones alone could all be from one document.
    chosen = np.arange(count) * len(heldout) // max(1, count)
    starts = range(0, count, size)
    for turn in range(-(-len(starts) // num_ranks)):
        # On 2 ranks with 3 batches: rank 0 yields 0 and 2, rank 1 yields 1 and then batch 0, which does not count.
        number = turn * num_ranks + rank
        counts = number < len(starts)
        first = starts[number if counts else 0]
        yield heldout.batch(chosen[first : first + size]), counts


@final
class Prefetcher:
    """Batches by iteration, on the device.

    On a CUDA device :meth:`prefetch` reads the next batch while the step that was launched before still runs, and
    copies it from pinned memory on a separate stream: neither the host nor the device waits. On any other device a
    batch is read when it is asked for.
    """

    def __init__(self, read: Callable[[int], Batch], device: torch.device, num_iterations: int) -> None:
        self._read = read
        self._device = device
        self._num_iterations = num_iterations
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ahead: tuple[int, Batch | Exception] | None = None

    def get(self, iteration: int) -> Batch:
        """Returns the batch of ``iteration``."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead[0] != iteration:
            return to_device(self._read(iteration), self._device)
        batch = ahead[1]
        if isinstance(batch, Exception):
            raise batch
        if self._stream is not None:
            # The stream waits, not the host: the step can be launched while the batch is still being copied.
            present = torch.cuda.current_stream(self._device)
            present.wait_stream(self._stream)
            for tensor in batch.values():  # their memory is the other stream's, which must not reuse it too early
                tensor.record_stream(present)
        return batch

    def prefetch(self, iteration: int) -> None:
        """Reads the batch of ``iteration`` and starts to copy it."""
        if self._stream is None or iteration >= self._num_iterations:
            return
        try:
            # The source is on the host, so the copy need not wait for the stream of the step.
            with torch.cuda.stream(self._stream):
                self._ahead = iteration, to_device(self._read(iteration), self._device)
        except Exception as error:  # raised later, after the previous iteration is logged and saved
            self._ahead = iteration, error


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copies a batch to ``device``; for CUDA asynchronously, from pinned memory."""
    if device.type != "cuda":
        return {name: tensor.to(device) for name, tensor in batch.items()}
    # The pinned copy is dropped while it is still being read: PyTorch's host allocator records an event in the stream
    # of the copy, and reuses the memory after that.
    return {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in batch.items()}


def synchronize(device: torch.device) -> None:
    """Synchronizes a CUDA device; does nothing for other devices."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
