"""Allocates byte ranges of a file. Integers only, no torch.

::

    file   [ a ][ b ][   free   ][ c ]|        a new range goes into the first free one that is large
                                      end      enough, else after the end; a free range at the end lowers the end
"""

from __future__ import annotations

from bisect import bisect_left
from typing import final

BLOCK = 4096  # bytes; alignment of addresses, offsets and lengths that direct I/O needs on every common disk


def in_blocks(num_bytes: int) -> int:
    """Returns ``num_bytes`` rounded up to whole blocks of the file, and one block at least.

    >>> in_blocks(0), in_blocks(4096), in_blocks(4097)
    (4096, 4096, 8192)
    """
    return max(-(-num_bytes // BLOCK), 1) * BLOCK


@final
class Extents:
    """The ranges of a file in use. Once all are freed, the same calls return the same ranges.

    >>> extents = Extents()
    >>> a, b, c = extents.allocate(5000), extents.allocate(100), extents.allocate(100)
    >>> a, b, c, extents.end
    (0, 8192, 12288, 16384)
    >>> extents.free(b, 100)
    >>> extents.allocate(4097), extents.allocate(1)  # the gap is too small for the first, and fits the second
    (16384, 8192)
    """

    __slots__ = ("_free", "end")

    def __init__(self) -> None:
        self.end = 0
        """Bytes from the start of the file to the end of the last range in use."""
        self._free: list[tuple[int, int]] = []  # begin and end, sorted; no two touch, and none touches the file's end

    def allocate(self, num_bytes: int) -> int:
        """Returns the offset of a range of ``num_bytes``, rounded up to blocks."""
        size = in_blocks(num_bytes)
        for at, (begin, end) in enumerate(self._free):
            if end - begin >= size:
                self._free[at : at + 1] = [(begin + size, end)] if end - begin > size else []
                return begin
        begin, self.end = self.end, self.end + size
        return begin

    def free(self, begin: int, num_bytes: int) -> None:
        """Frees the range of ``num_bytes`` at ``begin``."""
        end = begin + in_blocks(num_bytes)
        at = bisect_left(self._free, (begin, end))
        first = last = at
        if at < len(self._free) and self._free[at][0] == end:
            end, last = self._free[at][1], at + 1
        if at > 0 and self._free[at - 1][1] == begin:
            begin, first = self._free[at - 1][0], at - 1
        if end == self.end:
            self._free[first:last] = []
            self.end = begin
        else:
            self._free[first:last] = [(begin, end)]
