"""Seeds the random generators, alike or per rank."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Sets the random generators of PyTorch, on all devices, of NumPy and of Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - what a user's data code may draw from
    random.seed(seed)


def seed_per_rank(seed: int, stream: int, done: int = 0) -> None:
    """Seeds ranks with different samples or layers differently; stream 0 draws the numbers of a single process.

    Args:
        seed: of the run.
        stream: the random stream of this rank.
        done: iterations done, in a run that is resumed with more processes.
    """
    if stream:
        entropy = np.random.SeedSequence((seed, stream, done))
        seed_all(int(entropy.generate_state(1, np.uint64)[0]) >> 1)
