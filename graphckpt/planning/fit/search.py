"""Searches for the largest batch size that fits. Integers only, no torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import count

_MOST_ON_LINES = 8  # sizes that are looked at before the search bisects
_MOST = 2**20  # samples in a batch: what fits beyond this does not depend on the batch


def largest(bytes_of: Callable[[int], int], limit: int, low: int, high: int | None = None) -> int:
    """Returns the largest size from ``low`` to ``high`` whose bytes are within a limit, or ``low - 1`` if none is.

    The next size to look at is where the line through the last two reaches the limit, so that few are needed where the
    bytes are nearly affine.

    Args:
        bytes_of: returns the bytes of a size; they do not become fewer with it.
        limit: the most bytes.
        low: the smallest size.
        high: the largest size; ``None`` is no limit.

    >>> largest(lambda size: 100 + 7 * size, 1000, low=1), largest(lambda size: size, 83, low=1, high=64)
    (128, 64)
    >>> largest(lambda size: size * size, 1000, low=1), largest(lambda size: size, 3, low=4)
    (31, 3)
    """
    most = _MOST if high is None else high
    fits, above = low, most + 1
    at_fits = bytes_of(low)
    if at_fits > limit:
        return low - 1
    width, grown = 0, 0
    for turn in count():
        if above - fits <= 1:
            break
        if grown > 0 and turn < _MOST_ON_LINES:
            guess = fits + (limit - at_fits) * width // grown
        else:
            guess = (fits + above) // 2 if above <= most else 2 * fits
        guess = min(max(guess, fits + 1), above - 1)
        value = bytes_of(guess)
        width, grown = guess - fits, value - at_fits
        if value <= limit:
            fits, at_fits = guess, value
        else:
            above = guess
    return fits


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


def on_lines(points: Mapping[int, float], size: int) -> float:
    """Returns the value at a size on the lines between neighbouring points, and that of the last point outside.

    >>> on_lines({4: 1.0, 8: 2.0}, 6), on_lines({4: 1.0, 8: 2.0}, 16), on_lines({4: 1.0, 8: 2.0}, 2)
    (1.5, 2.0, 1.0)
    """
    low = max((one for one in points if one <= size), default=min(points))
    high = min((one for one in points if one >= size), default=max(points))
    if low >= high:
        return points[high] if size < high else points[low]
    return points[low] + (points[high] - points[low]) * (size - low) / (high - low)


def divisors(number: int) -> list[int]:
    """Returns all divisors in ascending order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    low = [one for one in range(1, int(number**0.5) + 1) if number % one == 0]
    return sorted({*low, *(number // one for one in low)})
