"""User-defined map-style data sets, as for PyTorch's DataLoader."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_collate

from graphckpt.train.console import Report
from graphckpt.train.data.corpus import DataError
from graphckpt.train.data.samples import Opened, Samples


class MapDataset(Sized, Protocol):
    """A map-style data set: ``torch.utils.data.Dataset`` with a length, or a list."""

    def __getitem__(self, index: int, /) -> Any:
        """Returns a sample: a dict of tensors and numbers, named as the model's arguments."""


@final
@dataclass(frozen=True, slots=True)
class _Collated:
    items: MapDataset
    key: str

    def __len__(self) -> int:
        return len(self.items)

    def batch(self, indices: NDArray[np.int64]) -> dict[str, Tensor]:
        found = default_collate([self.items[int(index)] for index in indices])
        if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
            fix = "return a dict of tensors and numbers, named as the model's arguments"
            raise DataError(f"{self.key}: a sample is a {type(self.items[0]).__name__} · fix: {fix}")
        return found


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
