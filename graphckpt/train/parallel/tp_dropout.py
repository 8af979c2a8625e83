"""Random numbers between two layers that are cut over processes: there each process draws from a stream of its own.

Everywhere else all processes draw the same, for they hold the same activations. Where a layer's outputs are cut, one
process has these heads and another those, and equal dropout masks on both would be one mask for two heads.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn

from graphckpt.rng import RandomState, random_devices, set_random_state, take_random_state

# Note [One seed from the common stream]
# The seed of the own stream is drawn from the common one, so a second run of a block, which begins with the random
# state of the first, draws the same masks. What drew nothing leaves the common stream as it was: without dropout
# between its cut layers a model draws what it draws in one process. DTensor's tracker of random state does neither: it
# knows CUDA alone, and of activations those that are DTensors.


@final
class DropoutStream:
    """The stream of one process between a layer that cuts and one that joins: ``begin`` and ``end`` are their hooks.

    Hooks stand outside of ``forward``: a policy on one of the two layers alone runs neither of them again.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._held: tuple[RandomState, RandomState, RandomState] | None = None

    def begin(self, module: nn.Module, args: Any, output: Tensor) -> None:
        """Goes over to the own stream, after a layer that cuts."""
        del args
        self._held = None
        if not module.training:
            return
        devices = random_devices([output])
        before = take_random_state(devices)
        seed = int(torch.randint(2**62, (), device="cpu")) + self._rank
        after = take_random_state(devices)
        own = [torch.Generator(device).manual_seed(seed).get_state() for device in (torch.device("cpu"), *devices)]
        set_random_state((own[0], tuple(zip(devices, own[1:], strict=True))))
        self._held = before, after, take_random_state(devices)

    def end(self, module: nn.Module, args: Any) -> None:
        """Goes back to the common stream, before a layer that joins."""
        del module, args
        if self._held is None:
            return
        (before, after, start), self._held = self._held, None
        devices = tuple(device for device, _ in start[1])
        set_random_state(before if _equal(take_random_state(devices), start) else after)


def _equal(one: RandomState, other: RandomState) -> bool:
    (cpu, devices), (other_cpu, other_devices) = one, other
    pairs = zip(devices, other_devices, strict=True)
    return torch.equal(cpu, other_cpu) and all(torch.equal(a, b) for (_, a), (_, b) in pairs)
