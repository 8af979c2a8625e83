"""Settings around a forward that change what its ops do: autocast, default device, attention kernels.

They are read before the first run and put back for the second, which runs inside of ``backward()``.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TypeAlias

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

Ambient: TypeAlias = tuple[object, ...]
"""``(default device, attention kernels, (device type, enabled, dtype, weight cache), ...)``."""


def take_ambient(devices: tuple[torch.device, ...]) -> Ambient:
    """Reads the settings in force for the CPU and for the types of ``devices``."""
    cuda = torch.backends.cuda
    return (
        torch.get_default_device(),
        (
            cuda.math_sdp_enabled(),
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        ),
        *(_autocast(kind) for kind in ("cpu", *dict.fromkeys(device.type for device in devices))),
    )


def enter_ambient(stack: ExitStack, wanted: Ambient, devices: tuple[torch.device, ...]) -> None:
    """Puts ``wanted`` in force on ``stack``, touching only what differs from now."""
    now = take_ambient(devices)
    if now == wanted:
        return
    device, kernels, *autocasts = wanted
    if device != now[0]:
        stack.enter_context(device)  # type: ignore[arg-type]  # a torch.device is a context manager
    if kernels != now[1]:
        stack.enter_context(sdpa_kernel([k for k, on in zip(_KERNELS, kernels, strict=True) if on]))  # type: ignore[call-overload]
    for autocast in autocasts:
        kind, enabled, dtype, cache_enabled = autocast  # type: ignore[misc]
        stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled))  # type: ignore[has-type]


_KERNELS = (
    SDPBackend.MATH,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
)


def _autocast(kind: str) -> tuple[str, bool, torch.dtype, bool] | None:
    if not torch.amp.is_autocast_available(kind):
        return None
    return (
        kind,
        torch.is_autocast_enabled(kind),
        torch.get_autocast_dtype(kind),
        torch.is_autocast_cache_enabled(),
    )
