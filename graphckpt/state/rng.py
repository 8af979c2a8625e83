"""RNG state of the CPU and of a block's devices: read before the original forward, set for the recomputation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch

RNGState: TypeAlias = tuple[torch.Tensor, tuple[tuple[torch.device, torch.Tensor], ...]]
"""State of the default CPU generator, and of each device's default generator."""

_STATELESS = frozenset({"cpu", "meta"})  # device types with no generator beside the CPU's


def rng_devices(tensors: Iterable[torch.Tensor]) -> tuple[torch.device, ...]:
    """Returns the devices of ``tensors`` that have a random generator of their own, each once, in order."""
    return tuple(dict.fromkeys(t.device for t in tensors if t.device.type not in _STATELESS))


def get_rng_state(devices: tuple[torch.device, ...]) -> RNGState:
    """Returns the RNG state of the CPU and of ``devices``; nothing is drawn."""
    cpu_state = torch.default_generator.get_state()
    if not devices:
        return cpu_state, ()
    return cpu_state, tuple([(d, _device_module(d).get_rng_state(*_index(d))) for d in devices])


def set_rng_state(state: RNGState) -> None:
    """Sets the RNG state that :func:`get_rng_state` returned."""
    cpu_state, device_states = state
    torch.default_generator.set_state(cpu_state)
    for device, device_state in device_states:
        _device_module(device).set_rng_state(device_state, *_index(device))


def _device_module(device: torch.device) -> Any:
    return torch.get_device_module(device)


def _index(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # torch.mps has one device and takes no index
