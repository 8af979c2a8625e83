"""Assigns byte ranges of a slab or a file. Integers only, no torch."""

from __future__ import annotations

import sys
from bisect import bisect
from typing import final

ALIGN = 256  # bytes; what cudaMalloc guarantees, so vectorised kernels stay legal


def aligned(num_bytes: int, align: int = ALIGN) -> int:
    """Rounds up to the alignment.

    >>> aligned(1), aligned(256), aligned(257)
    (256, 256, 512)
    """
    return -(-num_bytes // align) * align


@final
class FreeRanges:
    """The free ranges of an address space without an end. Once all is freed, the same calls return the same ranges.

    ::

        bytes ^   +------+ +--+         Forward puts, backward frees: a stack, which first fit packs without a gap.
              | +-+      +-+  +-+
              |-+                +--
              +---------------------> moments

    >>> ranges = FreeRanges()
    >>> ranges.allocate(10), ranges.allocate(20), ranges.take(100, 110), ranges.end
    (0, 10, True, 110)
    >>> ranges.free(0, 10)
    >>> ranges.take(5, 15), ranges.allocate(11), ranges.allocate(3)  # the gap is too small for the second
    (False, 30, 0)
    """

    __slots__ = ("_free",)

    def __init__(self) -> None:
        self._free = [(0, sys.maxsize)]  # begin and end, sorted; no two touch, and the last has no end

    @property
    def end(self) -> int:
        return self._free[-1][0]

    def allocate(self, size: int) -> int:
        at = next(at for at, (begin, end) in enumerate(self._free) if end - begin >= size)
        begin, end = self._free[at]
        self._free[at : at + 1] = [(begin + size, end)] if end - begin > size else []
        return begin

    def take(self, begin: int, end: int) -> bool:
        """Takes a range. Returns whether it was free."""
        at = bisect(self._free, (begin, sys.maxsize)) - 1
        if at < 0 or self._free[at][1] < end:
            return False
        low, high = self._free[at]
        self._free[at : at + 1] = [part for part in ((low, begin), (end, high)) if part[0] < part[1]]
        return True

    def free(self, begin: int, end: int) -> None:
        first = last = bisect(self._free, (begin, end))
        if self._free[last][0] == end:
            end, last = self._free[last][1], last + 1
        if first > 0 and self._free[first - 1][1] == begin:
            begin, first = self._free[first - 1][0], first - 1
        self._free[first:last] = [(begin, end)]
