"""The held-out samples in batches, divided over the processes that share batches. Knows no model and no metric."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from graphckpt.train.tasks.base import Samples


def heldout_batches(
    heldout: Samples, *, size: int, limit: int | None, part: int = 0, parts: int = 1
) -> Iterator[tuple[dict[str, Tensor], bool]]:
    """Yields every ``parts``-th batch, and whether it counts.

    All parts yield equally many, for a model that is cut runs on all processes or on none: those that are left without
    a last batch run their first one, or the very first, once more, and it does not count.

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
