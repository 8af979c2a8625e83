"""Searches for the largest batch size that fits. Integers only, no torch."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MOST = 2**20  # samples in a batch: what fits beyond this does not depend on the batch


def largest(fits: Callable[[int], bool], low: int, high: int | None = None) -> int:
    """Returns the largest size from ``low`` to ``high`` that fits, or ``low - 1`` if none does.

    Args:
        fits: returns whether a size fits; if one does, so do all smaller ones.
        low: the smallest size.
        high: the largest size; ``None`` doubles until one does not fit.

    >>> largest(lambda size: size <= 83, low=1), largest(lambda size: size <= 83, low=1, high=64)
    (83, 64)
    >>> largest(lambda size: False, low=4)
    3
    """
    most = _MOST if high is None else high
    if not fits(low):
        return low - 1
    known, step = low, max(1, low)
    while known < most:
        size = min(known + step, most)
        if not fits(size):
            return known + bisect_left(range(known + 1, size), True, key=lambda one: not fits(one))
        known, step = size, size
    return known


def largest_of(fits: Callable[[int], bool], sizes: Sequence[int]) -> int | None:
    """Returns the largest of some sizes, in ascending order, that fits; ``None`` if none does.

    >>> largest_of(lambda size: size <= 10, [1, 2, 4, 8, 16]), largest_of(lambda size: False, [4])
    (8, None)
    """
    number = bisect_left(sizes, True, key=lambda size: not fits(size))
    return sizes[number - 1] if number else None


def doubling(low: int, high: int) -> list[int]:
    """Returns the powers of two from ``low`` to ``high``, and both ends.

    >>> doubling(1, 20), doubling(3, 8), doubling(5, 5)
    ([1, 2, 4, 8, 16, 20], [3, 4, 8], [5])
    """
    powers = (2**power for power in range(low.bit_length() - 1, high.bit_length()))
    return sorted({low, high, *(size for size in powers if low <= size <= high)})


def divisors(number: int) -> list[int]:
    """Returns all divisors in ascending order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    low = [one for one in range(1, int(number**0.5) + 1) if number % one == 0]
    return sorted({*low, *(number // one for one in low)})
