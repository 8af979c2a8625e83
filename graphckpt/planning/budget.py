"""Reads memory budgets, and converts them to bytes."""

from __future__ import annotations

import os
import re
import socket
import warnings
from pathlib import Path
from typing import TypeAlias

import torch

from graphckpt.errors import ConfigError
from graphckpt.units import parse_bytes

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

_FRACTION = re.compile(r"\s*\d*\.\d*\s*")
_SHARED = (0, 0)  # the pool of tensors that are not in a private one

Budget: TypeAlias = int | float | str
"""Bytes, ``"12GiB"``, ``"50%"`` of the plain step's activations, ``"max"`` or ``"min"``; a float is deprecated."""


def check_budget(budget: Budget) -> int | str:
    """Returns ``budget`` if it can be read; a float becomes a percentage.

    Raises:
        ConfigError: It is neither a size nor a percentage nor a known word.

    >>> check_budget("12GiB"), check_budget("50%")
    ('12GiB', '50%')
    >>> check_budget("150%")
    Traceback (most recent call last):
    graphckpt.errors.ConfigError: memory_budget: expected above 0% and up to 100%, got '150%' · fix: '50%', or '12GiB'
    """
    fix = "fix: memory_budget='12GiB', or '50%' of the activations"
    if isinstance(budget, bool) or not isinstance(budget, (int, float, str)):
        raise ConfigError(f"memory_budget: expected bytes, '12GiB', '50%', 'max' or 'min', got {budget!r} · {fix}")
    if isinstance(budget, float):
        _share_of(budget, budget)
        percentage = f"{100 * budget:.12g}%"
        text = f"memory_budget: a float is deprecated, got {budget!r} · fix: memory_budget={percentage!r}"
        warnings.warn(text, DeprecationWarning, stacklevel=3)
        return percentage
    if is_percentage(budget):
        _percentage(str(budget))
    elif isinstance(budget, str) and _FRACTION.fullmatch(budget):
        raise ConfigError(f"memory_budget: expected a unit, got {budget!r} · fix: '{budget.strip()}GiB', or '50%'")
    elif budget not in ("max", "min"):
        try:
            parse_bytes(budget)
        except ValueError as error:
            text = str(error).removeprefix("memory size ")
            raise ConfigError(f"memory_budget: {text}; or '50%', 'max', 'min'") from None
    return budget


def is_percentage(budget: int | str) -> bool:
    """Returns whether a budget is a share of the plain step's activations, which may differ between processes."""
    return isinstance(budget, str) and budget.rstrip().endswith("%")


def _percentage(budget: str) -> float:
    try:
        share = float(budget.rstrip().removesuffix("%")) / 100
    except ValueError:
        raise ConfigError(f"memory_budget: expected a percentage, got {budget!r} · fix: '50%', or '12GiB'") from None
    return _share_of(share, budget)


def _share_of(share: float, budget: Budget) -> float:
    if not 0 < share <= 1:
        raise ConfigError(f"memory_budget: expected above 0% and up to 100%, got {budget!r} · fix: '50%', or '12GiB'")
    return share


def budget_bytes(budget: int | str, *, floor: int, static: int, plain_peak: int, available: int) -> int:
    """Returns the largest peak of the step in bytes.

    Args:
        budget: A value that :func:`check_budget` returned.
        floor: The lowest peak of any plan.
        static: The live bytes before the first block.
        plain_peak: The peak when everything is kept.
        available: The memory of the device for this step.
    """
    if budget == "min":
        return floor
    if budget == "max":
        return available
    if is_percentage(budget):
        return static + int(_percentage(str(budget)) * (plain_peak - static))
    return parse_bytes(budget)


def available_bytes(device: torch.device, alive: int, sharers: int = 1) -> int:
    """Returns the memory that a step may use on ``device``: free bytes, and the ``alive`` bytes of the step itself.

    Args:
        device: The device of the step.
        alive: The bytes that the step holds already.
        sharers: The number of processes that share the free bytes.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) - _unused_in_pools(device)
        return free // sharers + unused + alive
    pages = os.sysconf("SC_AVPHYS_PAGES") if hasattr(os, "sysconf") else 0
    free = pages * os.sysconf("SC_PAGE_SIZE") // sharers
    return min(free, _free_address_space(default=free)) + alive


def _free_address_space(default: int) -> int:
    """Returns the bytes that this process may still map; ``default`` without a limit."""
    if resource is None or (limit := resource.getrlimit(resource.RLIMIT_AS)[0]) == resource.RLIM_INFINITY:
        return default
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except OSError:
        return default
    return max(0, limit - pages * os.sysconf("SC_PAGE_SIZE"))


def _unused_in_pools(device: torch.device) -> int:
    """Returns the free bytes in private pools, such as those of CUDA graphs, which other steps cannot use."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and tuple(segment.get("segment_pool_id", _SHARED)) != _SHARED
    )


def memory_id(device: torch.device) -> str:
    """Returns a key that is equal for processes with the same memory of ``device``, across hosts."""
    own = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type
    return f"{socket.gethostname()} {own}"


def budget_kind(budget: int | str) -> str:
    """Returns which kind of budget it is.

    >>> budget_kind("12GiB"), budget_kind("max"), budget_kind("50%"), budget_kind("min")
    ('a size', 'a size', 'a percentage', 'min')
    """
    if is_percentage(budget):
        return "a percentage"
    return "min" if budget == "min" else "a size"
