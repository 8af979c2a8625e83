"""Detects random numbers drawn on the host during a capture, which every replay would repeat."""

from __future__ import annotations

import random
from typing import Any, final

import torch

from graphckpt.errors import GraphError

try:
    import numpy as np
except ImportError:  # then no library draws from it
    np = None  # type: ignore[assignment]


@final
class HostRandom:
    """The RNG state of the host at the start of a capture."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        self._numpy: Any = None if np is None else np.random.get_state()

    def check(self) -> None:
        """Checks that nothing was drawn since.

        Raises:
            GraphError: Something was, for example by LayerDrop.
        """
        drawn = []
        if not torch.equal(torch.get_rng_state(), self._torch):
            drawn.append("torch on the CPU")
        if random.getstate() != self._python:
            drawn.append("Python's random")
        if np is not None:
            now: Any = np.random.get_state()
            if now[2:] != self._numpy[2:] or not np.array_equal(now[1], self._numpy[1]):
                drawn.append("NumPy")
        if drawn:
            raise GraphError(
                f"the step draws random numbers with {' and '.join(drawn)}, which every replay would repeat · "
                "fix: draw them on the device, disable LayerDrop, or config.capture = 'eager'"
            )

    def restore(self) -> None:
        """Restores the state."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        if np is not None:
            np.random.set_state(self._numpy)
