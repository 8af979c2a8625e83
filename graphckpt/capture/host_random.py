"""Random numbers that Python draws while a step is recorded: every replay would use the same ones again."""

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
    """The random state of the host when a recording begins."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        self._numpy: Any = None if np is None else np.random.get_state()

    def check(self) -> None:
        """Sees that nothing was drawn since.

        Raises:
            GraphError: Something was, as layers that are dropped at random draw it.
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
                "fix: draw them on the device, switch off what drops whole layers, or config.capture = 'eager'"
            )

    def put_back(self) -> None:
        """Makes the state what it was."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        if np is not None:
            np.random.set_state(self._numpy)
