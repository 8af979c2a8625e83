"""Hands out byte ranges of a file and takes them back. Integers only, no torch.

::

    file   [ a ][ b ][   free   ][ c ]|        a new range goes into the first hole that is big enough,
                                      end      else behind the end; a hole at the end makes the end fall
"""

from __future__ import annotations

from bisect import bisect_left
from typing import final

BLOCK = 4096  # bytes; what direct reads and writes need of addresses, offsets and lengths on every common disk


def in_blocks(num_bytes: int) -> int:
    """Returns ``num_bytes`` rounded up to whole blocks of the file, and one block at least.

    >>> in_blocks(0), in_blocks(4096), in_blocks(4097)
    (4096, 4096, 8192)
    """
    return max(-(-num_bytes // BLOCK), 1) * BLOCK


@final
class Regions:
    """Which ranges of a file are in use. The same calls after all were given back hand out the same ranges.

    >>> regions = Regions()
    >>> a, b, c = regions.take(5000), regions.take(100), regions.take(100)
    >>> a, b, c, regions.end
    (0, 8192, 12288, 16384)
    >>> regions.give_back(b, 100)
    >>> regions.take(4097), regions.take(1)  # the hole is too small for the first, and right for the second
    (16384, 8192)
    """

    __slots__ = ("_holes", "end")

    def __init__(self) -> None:
        self.end = 0
        """Bytes from the begin of the file to the end of the last range in use."""
        self._holes: list[
            tuple[int, int]
        ] = []  # begin and end, in order, no two touching, none touching the file's end

    def take(self, num_bytes: int) -> int:
        """Returns the offset of a range of ``num_bytes``, rounded up to blocks."""
        size = in_blocks(num_bytes)
        for at, (begin, end) in enumerate(self._holes):
            if end - begin >= size:
                self._holes[at : at + 1] = [(begin + size, end)] if end - begin > size else []
                return begin
        begin, self.end = self.end, self.end + size
        return begin

    def give_back(self, begin: int, num_bytes: int) -> None:
        """The range of ``num_bytes`` at ``begin`` is not used any more."""
        end = begin + in_blocks(num_bytes)
        at = bisect_left(self._holes, (begin, end))
        first = last = at
        if at < len(self._holes) and self._holes[at][0] == end:
            end, last = self._holes[at][1], at + 1
        if at > 0 and self._holes[at - 1][1] == begin:
            begin, first = self._holes[at - 1][0], at - 1
        if end == self.end:
            self._holes[first:last] = []
            self.end = begin
        else:
            self._holes[first:last] = [(begin, end)]
