"""Says which cases of a product `make test` runs: the others are slow, and `make slow` runs them. Not a test itself."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest


def slow_unless(is_fast: bool) -> pytest.MarkDecorator | tuple[()]:
    """Returns the marks of a case."""
    return () if is_fast else pytest.mark.slow


def is_chosen(case: tuple[Any, ...], *axes: Collection[Any]) -> bool:
    """Whether a case is in the part of the product of ``axes`` that has every pair of values of any axis and the last.

    >>> [(a, b, c) for a in "ab" for b in "xy" for c in "12" if is_chosen((a, b, c), "ab", "xy", "12")]
    [('a', 'x', '1'), ('a', 'y', '2'), ('b', 'x', '2'), ('b', 'y', '1')]
    """
    *others, last = (list(axis).index(value) for axis, value in zip(axes, case, strict=True))
    return sum(others) % len(axes[-1]) == last
