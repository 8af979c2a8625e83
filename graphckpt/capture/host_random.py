"""Detects random numbers drawn on the host during a capture, which every replay would repeat."""

from __future__ import annotations

from typing import final

import torch

from graphckpt.engine.call_state import get_rng_state, set_rng_state
from graphckpt.errors import GraphError


@final
class HostRandom:
    """The RNG state of the host at the start of a capture."""

    def __init__(self) -> None:
        self._state = get_rng_state((), host=True)

    def check(self) -> None:
        """Checks that nothing was drawn since.

        Raises:
            GraphError: Something was, for example by LayerDrop.
        """
        torch_state, _, host = self._state
        drawn = [] if torch.equal(torch.get_rng_state(), torch_state) else ["torch on the CPU"]
        drawn += host.changes() if host is not None else []
        if drawn:
            raise GraphError(
                f"the step draws random numbers with {' and '.join(drawn)}, which every replay would repeat · "
                "fix: draw them on the device, disable LayerDrop, or config.capture = 'eager'"
            )

    def restore(self) -> None:
        """Restores the state."""
        set_rng_state(self._state)
