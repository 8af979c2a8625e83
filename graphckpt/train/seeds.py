"""Seeds of the random generators, alike or apart over processes."""

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
    """Has processes that see different samples or layers draw different masks; the first draws what one process does.

    Args:
        seed: of the run.
        stream: which random numbers are this process's.
        done: iterations before this one, of a run that goes on with more processes.
    """
    if stream:
        entropy = np.random.SeedSequence((seed, stream, done))
        seed_all(int(entropy.generate_state(1, np.uint64)[0]) >> 1)
