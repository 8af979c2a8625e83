"""Settings around a forward that change what its ops do: autocast, default device, attention kernels.

They are read before the first run and put back for the second, which runs inside of ``backward()``.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TypeAlias

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from graphckpt._compat import has_function_modes

Ambient: TypeAlias = tuple[object, ...]
"""``(default device, attention kernels, (device type, enabled, dtype, weight cache), ...)``."""


def take_ambient(devices: tuple[torch.device, ...]) -> Ambient:
    """Reads the settings in force for the CPU and for the types of ``devices``."""
    cuda = torch.backends.cuda
    kernels = (
        cuda.math_sdp_enabled(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )
    device = torch.get_default_device() if has_function_modes() else _CPU
    if not devices:
        return device, kernels, _autocast("cpu")
    kinds = dict.fromkeys(device.type for device in devices)
    return device, kernels, _autocast("cpu"), *(_autocast(kind) for kind in kinds)


def enter_ambient(stack: ExitStack, wanted: Ambient, now: Ambient) -> None:
    """Puts ``wanted`` in force on ``stack``, touching only what differs from ``now``."""
    device, kernels, *autocasts = wanted
    if device != now[0]:
        stack.enter_context(device)  # type: ignore[arg-type]  # a torch.device is a context manager
    if kernels != now[1]:
        stack.enter_context(sdpa_kernel([k for k, on in zip(_KERNELS, kernels, strict=True) if on]))  # type: ignore[call-overload]
    for autocast in autocasts:
        kind, enabled, *how = autocast  # type: ignore[misc]
        stack.enter_context(torch.autocast(kind, enabled=enabled, **dict(zip(_HOW, how, strict=False))))  # type: ignore[has-type]


_CPU = torch.device("cpu")
_KERNELS = (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)
_HOW = ("dtype", "cache_enabled")


def _autocast(kind: str) -> tuple[object, ...]:
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return kind, False
    return kind, True, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
