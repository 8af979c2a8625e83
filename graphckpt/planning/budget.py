"""What a memory budget means in bytes."""

from __future__ import annotations

import os
import socket
from typing import TypeAlias

import torch

from graphckpt.errors import ConfigError
from graphckpt.units import parse_bytes

_SHARED = (0, 0)  # the pool of all tensors that are in no private one

Budget: TypeAlias = int | float | str
"""Bytes, ``"12GiB"``, ``"max"``, ``"min"``, or a share of the plain step's activations from above 0 to 1."""


def check_budget(budget: Budget) -> Budget:
    """Returns ``budget`` if it can be read.

    Raises:
        ConfigError: it is no size, no share and no word that means something.

    >>> check_budget("12GiB"), check_budget(0.5)
    ('12GiB', 0.5)
    >>> check_budget(1.5)
    Traceback (most recent call last):
    graphckpt.errors.ConfigError: memory_budget: 1.5 is no share · fix: use one above 0 and up to 1, or bytes as '12GiB'
    """
    if isinstance(budget, bool) or not isinstance(budget, (int, float, str)):
        raise ConfigError(f"memory_budget: {budget!r} is no size · fix: use bytes, '12GiB', 'max', 'min' or a share")
    if isinstance(budget, float):
        if not 0 < budget <= 1:
            raise ConfigError(
                f"memory_budget: {budget!r} is no share · fix: use one above 0 and up to 1, or bytes as '12GiB'"
            )
    elif budget not in ("max", "min"):
        try:
            parse_bytes(budget)
        except ValueError as error:
            text = str(error).removeprefix("memory size ")
            raise ConfigError(f"memory_budget: {text}; 'max' and 'min' mean something too") from None
    return budget


def budget_bytes(budget: Budget, *, floor: int, static: int, plain_peak: int, available: int) -> int:
    """Returns the bytes that the step may have at its peak.

    Args:
        budget: as the user wrote it.
        floor: the least peak of any plan.
        static: what is alive before the first block runs.
        plain_peak: the peak when everything is kept.
        available: what the device has for this step.
    """
    check_budget(budget)
    if budget == "min":
        return floor
    if budget == "max":
        return available
    if isinstance(budget, float):
        return static + int(budget * (plain_peak - static))
    return parse_bytes(budget)


def available_bytes(device: torch.device, alive: int, sharers: int = 1) -> int:
    """Returns what a step may take on ``device``: what is free, and the ``alive`` bytes that the step has already.

    Args:
        device: where it runs.
        alive: what it has there.
        sharers: processes that run it on that device, of which each may have as much of what is free.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) - _unused_in_pools(device)
        return free // sharers + unused + alive
    pages = os.sysconf("SC_AVPHYS_PAGES") if hasattr(os, "sysconf") else 0
    return pages * os.sysconf("SC_PAGE_SIZE") // sharers + alive


def _unused_in_pools(device: torch.device) -> int:
    """Returns the free bytes in private pools, as those of CUDA graphs: no tensor of another step can lie there."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and tuple(segment.get("segment_pool_id", _SHARED)) != _SHARED
    )


def memory_id(device: torch.device) -> str:
    """Returns what tells the memory of ``device`` from that of all others, on any machine."""
    own = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type
    return f"{socket.gethostname()} {own}"


def budget_kind(budget: Budget) -> str:
    """Returns how a budget is said.

    >>> budget_kind("12GiB"), budget_kind("max"), budget_kind(0.5), budget_kind("min")
    ('a size', 'a size', 'a share', 'min')
    """
    if isinstance(budget, float):
        return "a share"
    return "min" if budget == "min" else "a size"
