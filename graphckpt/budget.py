"""Memory budgets of a step, as people write them. Numbers and text only, no torch."""

from __future__ import annotations

import re
from math import inf
from typing import TypeAlias

from graphckpt.errors import ConfigError
from graphckpt.units import format_bytes, parse_bytes

Budget: TypeAlias = int | float | str
"""Bytes, ``"12GiB"``; ``"50%"`` of the device's memory; ``0.6`` of the plain step's peak; ``"max"`` or ``"min"``."""

_KINDS = "a number of bytes, a size such as '12GiB', '50%', 0.6, 'max' or 'min'"
_FIX = "'12GiB', '50%' of the device's memory, or 0.6 of the plain step's peak"
_FIX_OF_FIT = "'12GiB', '50%' of the device's memory, or 'max'"
_LEAST_BYTES = 1024  # a smaller number is of another unit
_FRACTION = re.compile(r"\s*\d*\.\d*\s*")


def check_budget(budget: Budget, *, for_fit: bool = False) -> Budget:
    """Returns a budget that can be used; text such as ``"0.6"`` becomes a float.

    >>> check_budget("12GiB"), check_budget("50%"), check_budget("0.6")
    ('12GiB', '50%', 0.6)
    >>> check_budget(60)
    Traceback (most recent call last):
    graphckpt.errors.ConfigError: memory_budget: expected at least 1 KiB, got 60 B · did you mean '60GiB' or 0.6? \
· fix: '12GiB', '50%' of the device's memory, or 0.6 of the plain step's peak
    """
    fault, fix = "", _FIX_OF_FIT if for_fit else _FIX
    if isinstance(budget, str) and _FRACTION.fullmatch(budget) and budget.strip() != ".":
        budget = float(budget)
    if isinstance(budget, bool) or not isinstance(budget, (int, float, str)):
        fault = f"expected {_KINDS}, got {budget!r}"
    elif for_fit and (isinstance(budget, float) or budget == "min"):
        fault = f"expected a budget independent of the batch size, got {budget!r}"
    elif isinstance(budget, float):
        if not 0 < budget <= 1:
            fault = f"expected a float greater than 0 and at most 1, a share of the plain step's peak, got {budget!r}"
            fault += _suggestion(budget)
    elif is_percentage(budget):
        fault = _fault_of_percentage(str(budget))
    elif budget not in ("max", "min"):
        try:
            num_bytes = parse_bytes(budget)
        except ValueError as error:
            fault, _, reason = str(error).removeprefix("memory size ").partition(" · fix: ")
            fix = f"{reason}; or {fix}" if "unit" in fault else fix
        else:
            if num_bytes < _LEAST_BYTES:
                fault = f"expected at least 1 KiB, got {format_bytes(num_bytes)}"
                fault += _suggestion(num_bytes, has_shares=not for_fit)
    if fault:
        raise ConfigError(f"memory_budget: {fault} · fix: {fix}")
    return budget


def is_percentage(budget: Budget) -> bool:
    return isinstance(budget, str) and budget.rstrip().endswith("%")


def share_of(percentage: str) -> float:
    return float(percentage.rstrip().removesuffix("%")) / 100


def _fault_of_percentage(budget: str) -> str:
    try:
        is_valid = 0 < share_of(budget) <= 1
    except ValueError:
        return f"expected a percentage, got {budget!r}"
    return "" if is_valid else f"expected more than 0% and at most 100% of the device's memory, got {budget!r}"


def _suggestion(number: float, *, has_shares: bool = True) -> str:
    """Returns the possible meanings of a number that is neither a size in bytes nor a share."""
    if not 1 <= number < inf:
        return ""
    # A float such as 12e9 is a number of bytes. 60 may be 60 GiB, or 60 %, which is 0.6; 8 is taken for 8 GiB alone.
    if number >= _LEAST_BYTES:
        return f" · did you mean the int {int(number)}, in bytes?"
    return f" · did you mean '{number:g}GiB'{f' or {number / 100:g}' if has_shares and 10 <= number <= 100 else ''}?"


def describe_budget(budget: Budget | None) -> str:
    """Returns the quantity that a budget is relative to, in words; empty for a size.

    >>> describe_budget(0.6), describe_budget("50%"), describe_budget("12GiB")
    ("0.6 of the plain step's peak", "50% of the device's memory", '')
    """
    if isinstance(budget, float):
        return f"{budget} of the plain step's peak"
    if budget == "min":
        return "the lowest possible peak"
    return f"{str(budget).strip()} of the device's memory" if budget is not None and is_percentage(budget) else ""


def size_of(budget: Budget) -> int | None:
    """Returns the bytes of a budget that is a size; ``None`` if they depend on the device or on the step."""
    if isinstance(budget, float) or budget in ("max", "min") or is_percentage(budget):
        return None
    return parse_bytes(budget)


def budget_kind(budget: Budget) -> str:
    """Returns which kind of budget it is.

    >>> budget_kind("12GiB"), budget_kind("max"), budget_kind("50%"), budget_kind(0.6), budget_kind("min")
    ('a size', 'a size', 'a size', 'a share of the plain step', 'min')
    """
    if isinstance(budget, float):
        return "a share of the plain step"
    return "min" if budget == "min" else "a size"
