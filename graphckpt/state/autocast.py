"""Settings around a forward that change what its ops do: autocast, default device, attention kernels.

They are read before the original forward and put back for the recomputation, which runs inside of ``backward()``.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any, TypeAlias

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from graphckpt._compat import has_function_modes

Ambient: TypeAlias = tuple[object, ...]
"""``(default device, attention kernels, (device type, enabled, dtype, weight cache), ...)``."""


def take_ambient(devices: tuple[torch.device, ...]) -> Ambient:
    """Reads the active settings for the CPU and for the types of ``devices``."""
    kernels = tuple([is_enabled() for is_enabled in _KERNELS_ENABLED])
    device = torch.get_default_device() if has_function_modes() else _CPU
    if not devices:
        return device, kernels, _autocast("cpu")
    kinds = dict.fromkeys(device.type for device in devices)
    return device, kernels, _autocast("cpu"), *(_autocast(kind) for kind in kinds)


def enter_ambient(stack: ExitStack, wanted: Ambient, now: Ambient) -> None:
    """Applies ``wanted`` on ``stack``, touching only what differs from ``now``."""
    device, kernels, *autocasts = wanted
    if device != now[0]:
        stack.enter_context(device)  # type: ignore[arg-type]  # a torch.device is a context manager
    if kernels != now[1]:
        stack.enter_context(sdpa_kernel([k for k, on in zip(_KERNELS, kernels, strict=True) if on]))  # type: ignore[call-overload]
    if is_autocast(now):
        # `backward()` was called in a region of autocast, maybe by another thread. The cache is the process's, and has
        # the casts of the forward of that region, which clears it; no region that ends in this thread may do so before.
        torch.autocast_increment_nesting()
        stack.callback(torch.autocast_decrement_nesting)
    if tuple(autocasts) == now[2:]:
        return
    for autocast in autocasts:
        kind, enabled, *how = autocast  # type: ignore[misc]
        stack.enter_context(torch.autocast(kind, enabled=enabled, **dict(zip(_HOW, how, strict=False))))  # type: ignore[has-type]


def is_autocast(ambient: Ambient) -> bool:
    """Whether autocast is enabled for a type of device."""
    return any(autocast[1] for autocast in ambient[2:])  # type: ignore[index]


def autocast_depth() -> int:
    """Returns the number of ``torch.autocast`` contexts that this thread is in."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def restore_ambient(wanted: Ambient, depth: int) -> None:
    """Sets what :func:`take_ambient` read, where an exception kept context managers from doing so.

    Args:
        wanted: The settings. The default device is not among those that are set.
        depth: The number of ``torch.autocast`` contexts at the time.
    """
    _, kernels, *autocasts = wanted
    for (_, enable), on in zip(_KERNEL_SWITCHES, kernels, strict=True):  # type: ignore[call-overload]
        enable(on)
    for autocast in autocasts:
        settings: Any = autocast
        kind, enabled, *how = settings
        torch.set_autocast_enabled(kind, enabled)
        if how:
            torch.set_autocast_dtype(kind, how[0])
            torch.set_autocast_cache_enabled(how[1])
    if autocast_depth() == depth:
        return  # the cache is the process's: another thread may be in a forward whose casts are in it
    while autocast_depth() > depth:
        torch.autocast_decrement_nesting()
    if not depth:
        torch.clear_autocast_cache()


_CPU = torch.device("cpu")
_KERNELS = (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)
_cuda = torch.backends.cuda
_KERNEL_SWITCHES = (
    (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
)
_KERNELS_ENABLED = tuple(is_enabled for is_enabled, _ in _KERNEL_SWITCHES)
_HOW = ("dtype", "cache_enabled")

_has_autocast = functools.cache(torch.amp.is_autocast_available)


def _autocast(kind: str) -> tuple[object, ...]:
    if not (_has_autocast(kind) and torch.is_autocast_enabled(kind)):
        return kind, False
    return kind, True, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
