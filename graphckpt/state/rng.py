"""RNG state of the host and of a block's devices: read before the original forward, set for the recomputation."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import torch

RNGState: TypeAlias = "tuple[torch.Tensor, tuple[tuple[torch.device, torch.Tensor], ...], HostRNGState | None]"
"""State of PyTorch's CPU generator, of each device's default generator, and of Python and NumPy if it was asked for."""

_STATELESS = frozenset({"cpu", "meta"})  # device types with no generator beside the CPU's


class HostRNGState(NamedTuple):
    """State of the global generators of Python and NumPy. To read both takes 40 us, most of it in NumPy."""

    python: tuple[Any, ...]
    numpy: dict[str, Any] | None
    """``None`` if NumPy is not imported."""

    @classmethod
    def read(cls) -> HostRNGState:
        """Returns the present state; nothing is drawn."""
        numpy = _numpy_random()
        return cls(random.getstate(), None if numpy is None else numpy.get_state(legacy=False))

    def restore(self) -> None:
        """Sets the state."""
        random.setstate(self.python)
        if self.numpy is not None:
            _numpy_random().set_state(self.numpy)

    def changes(self) -> list[str]:
        """Returns which libraries have drawn since: ``"Python's random"``, ``"NumPy"``."""
        now = HostRNGState.read().fingerprints()
        return [library for library, number in self.fingerprints().items() if now[library] != number]

    def fingerprints(self) -> dict[str, int]:
        """Returns a hash of each library's state."""
        hashes = {"Python's random": hash(self.python)}
        if self.numpy is not None:
            values = (*self.numpy.values(), *self.numpy["state"].values())  # the key of MT19937 is an array
            hashes["NumPy"] = hash(
                tuple(v.tobytes() if hasattr(v, "tobytes") else v for v in values if v is not self.numpy["state"])
            )
        return hashes


def rng_devices(tensors: Iterable[torch.Tensor]) -> tuple[torch.device, ...]:
    """Returns the devices of ``tensors`` that have a random generator of their own, each once, in order."""
    return tuple(dict.fromkeys(t.device for t in tensors if t.device.type not in _STATELESS))


def get_rng_state(devices: tuple[torch.device, ...], *, host: bool = False) -> RNGState:
    """Returns the RNG state of the CPU and of ``devices``, with ``host`` that of Python and NumPy too."""
    cpu_state = torch.default_generator.get_state()
    host_state = HostRNGState.read() if host else None
    if not devices:
        return cpu_state, (), host_state
    return cpu_state, tuple([(d, _device_module(d).get_rng_state(*_index(d))) for d in devices]), host_state


def set_rng_state(state: RNGState) -> None:
    """Sets the RNG state that :func:`get_rng_state` returned."""
    cpu_state, device_states, host_state = state
    torch.default_generator.set_state(cpu_state)
    for device, device_state in device_states:
        _device_module(device).set_rng_state(device_state, *_index(device))
    if host_state is not None:
        host_state.restore()


def _device_module(device: torch.device) -> Any:
    return torch.get_device_module(device)


def _index(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # torch.mps has one device and takes no index


def _numpy_random() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random  # NumPy imports it on first use, which may be in the block
