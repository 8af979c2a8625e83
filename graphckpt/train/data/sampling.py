"""The order of training samples, and batches of held-out ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from graphckpt.train.data.samples import Samples


@final
class ShuffledOrder:
    """A permutation for each epoch, determined by the seed and the epoch's number.

    The order is stateless: a resumed run continues after the samples it has consumed.

    >>> order = ShuffledOrder(num_sequences=4, seed=0)
    >>> sorted(order.take(start=0, count=4).tolist())
    [0, 1, 2, 3]
    >>> order.take(start=3, count=2)[1] == order.take(start=4, count=1)[0]
    np.True_
    """

    def __init__(self, *, num_sequences: int, seed: int) -> None:
        self._num_sequences = num_sequences
        self._seed = seed
        self._epoch = -1
        self._permutation: NDArray[np.int64] = np.empty(0, np.int64)

    def take(self, *, start: int, count: int) -> NDArray[np.int64]:
        """Returns the indices of ``count`` sequences, after the first ``start`` of the run."""
        taken = np.empty(count, np.int64)
        filled = 0
        while filled < count:
            epoch, offset = divmod(start + filled, self._num_sequences)
            some = self._of(epoch)[offset : offset + count - filled]
            taken[filled : filled + len(some)] = some
            filled += len(some)
        return taken

    def _of(self, epoch: int) -> NDArray[np.int64]:
        if epoch != self._epoch:
            self._permutation = np.random.default_rng((self._seed, epoch)).permutation(self._num_sequences)
            self._epoch = epoch
        return self._permutation


def heldout_batches(
    heldout: Samples, *, size: int, limit: int | None, part: int = 0, parts: int = 1
) -> Iterator[tuple[dict[str, Tensor], bool]]:
    """Yields every ``parts``-th batch, and whether it counts.

    All parts yield equally many batches, since a sharded model runs on all processes or on none: a part without a last
    batch repeats its first one, or the very first, which does not count.

    Args:
        heldout: the samples.
        size: samples of a batch.
        limit: batches at most, over all parts; they are spread over all samples.
        part: which process this is.
        parts: of how many.
    """
    count = len(heldout) if limit is None else min(len(heldout), size * limit)
    chosen = np.arange(count) * len(heldout) // max(1, count)
    starts = range(0, count, size)
    for turn in range(-(-len(starts) // parts)):
        number = turn * parts + part
        counts = number < len(starts)
        first = starts[number if counts else 0]
        yield heldout.batch(chosen[first : first + size]), counts
