"""Per-rank dropout streams between a column-parallel and a row-parallel layer.

Elsewhere activations are replicated and all processes draw the same numbers. Between the two layers each process has
other heads, and equal masks would drop the same places in different heads.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn

from graphckpt.engine.call_state import RNGState, get_rng_state, rng_devices, set_rng_state

# Note [One seed from the common stream]
# The seed of the per-rank stream is drawn from the common one, so a recomputation, which starts from the RNG state
# of the original forward, draws the same masks. If nothing was drawn, the common stream is restored: without dropout
# between these layers a model draws the same numbers as in one process. DTensor's RNG tracker does neither: it supports
# CUDA only, and only activations that are DTensors.


@final
class DropoutStream:
    """The random stream of one process between the two layers: ``begin`` and ``end`` are their forward hooks.

    Hooks run outside of ``forward``: a policy on one of the two layers does not run them again.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._held: tuple[RNGState, RNGState, RNGState] | None = None

    def begin(self, module: nn.Module, args: Any, output: Tensor) -> None:
        """Switches to the per-rank stream, after the column-parallel layer."""
        del args
        self._held = None
        if not module.training:
            return
        devices = rng_devices([output])
        before = get_rng_state(devices)
        seed = int(torch.randint(2**62, (), device="cpu")) + self._rank
        after = get_rng_state(devices)
        own = [torch.Generator(device).manual_seed(seed).get_state() for device in (torch.device("cpu"), *devices)]
        set_rng_state((own[0], tuple(zip(devices, own[1:], strict=True)), None))
        self._held = before, after, get_rng_state(devices)

    def end(self, module: nn.Module, args: Any) -> None:
        """Switches back to the common stream, before the row-parallel layer."""
        del module, args
        if self._held is None:
            return
        (before, after, start), self._held = self._held, None
        devices = tuple(device for device, _ in start[1])
        set_rng_state(before if _equal(get_rng_state(devices), start) else after)


def _equal(one: RNGState, other: RNGState) -> bool:
    (cpu, devices, _), (other_cpu, other_devices, _) = one, other
    pairs = zip(devices, other_devices, strict=True)
    return torch.equal(cpu, other_cpu) and all(torch.equal(a, b) for (_, a), (_, b) in pairs)
