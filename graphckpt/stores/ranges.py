"""Assigns byte ranges of a slab or a file, at once or from known lifetimes. Integers only, no torch."""

from __future__ import annotations

import sys
from bisect import bisect, insort
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import final

ALIGN = 256  # bytes; what cudaMalloc guarantees, so vectorised kernels stay legal
_MOST_PLANS = 32  # steps of that many shapes are remembered

Lifetime = tuple[int, int, int]
"""Bytes, first and last moment; alive at ``begin <= moment < end``."""


def aligned(num_bytes: int, align: int = ALIGN) -> int:
    """Rounds up to the alignment.

    >>> aligned(1), aligned(256), aligned(257)
    (256, 256, 512)
    """
    return -(-num_bytes // align) * align


@final
class FreeRanges:
    """The free ranges of an address space without an end. Once all is freed, the same calls return the same ranges.

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
        """The end of the last range in use."""
        return self._free[-1][0]

    def allocate(self, size: int, limit: int = sys.maxsize) -> int | None:
        """Takes the first free range of ``size`` that ends at ``limit`` at the latest, and returns its begin."""
        for at, (begin, end) in enumerate(self._free):
            if end - begin >= size:
                if begin + size > limit:
                    break
                self._free[at : at + 1] = [(begin + size, end)] if end - begin > size else []
                return begin
        return None

    def take(self, begin: int, end: int) -> bool:
        """Takes a range. Returns whether it was free."""
        at = bisect(self._free, (begin, sys.maxsize)) - 1
        if at < 0 or self._free[at][1] < end:
            return False
        low, high = self._free[at]
        self._free[at : at + 1] = [part for part in ((low, begin), (end, high)) if part[0] < part[1]]
        return True

    def free(self, begin: int, end: int) -> None:
        """Frees a range."""
        first = last = bisect(self._free, (begin, end))
        if self._free[last][0] == end:
            end, last = self._free[last][1], last + 1
        if first > 0 and self._free[first - 1][1] == begin:
            begin, first = self._free[first - 1][0], first - 1
        self._free[first:last] = [(begin, end)]


@final
class SlabPlan:
    """Assigns offsets in a slab: allocation number i of a step gets the offset that an earlier step's plan gives it.

    A step that allocates other sizes than any before, or frees in an order that the plan does not allow, gets ``None``
    for what does not fit; it is planned when it is over.

    >>> slab = SlabPlan()
    >>> slab.put(100), slab.put(300)
    ((0, None), (1, None))
    >>> slab.free(1), slab.free(0)
    (None, None)
    >>> slab.begin_step(), slab.num_bytes
    (True, 768)
    >>> slab.put(100), slab.put(300)
    ((2, 0), (3, 256))
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        """Size of the slab that all plans fit in."""
        self._plans: list[tuple[list[int], list[int]]] = []  # sizes and offsets of the allocations of a step
        self._candidates: list[tuple[list[int], list[int]]] = []
        self._is_off_plan = False
        self._first = 0  # number of the first allocation of this step
        self._moment = 0
        self._begins: list[tuple[int, int]] = []  # bytes and moment of each allocation of this step
        self._ends: dict[int, int] = {}
        self._alive: dict[int, tuple[int, int]] = {}  # the ranges of the slab in use, by allocation
        self._ranges = FreeRanges()

    @property
    def in_use(self) -> list[int]:
        """The numbers of the allocations whose ranges are in use."""
        return list(self._alive)

    def begin_step(self) -> bool:
        """Begins a new step. Returns whether the slab must be reallocated, as it is too small for the last one."""
        grows = False
        if self._is_off_plan:
            lifetimes: list[Lifetime] = [
                (num_bytes, begin, self._ends.get(self._first + i, self._moment))
                for i, (num_bytes, begin) in enumerate(self._begins)
            ]
            sizes = [num_bytes for num_bytes, _, _ in lifetimes]
            offsets, slab_bytes = plan_offsets(lifetimes)
            others = [plan for plan in self._plans if plan[0] != sizes]
            self._plans = [(sizes, offsets), *others][:_MOST_PLANS]
            grows = slab_bytes > self.num_bytes
            self.num_bytes = max(self.num_bytes, slab_bytes)
        self._first += len(self._begins)
        self._candidates = self._plans
        self._is_off_plan = False
        self._moment = 0
        self._begins = []
        self._ends.clear()
        if grows:
            self._alive.clear()  # what is still in use is in the old slab
        self._ranges = FreeRanges()  # rebuilt, as an interrupt may have left a range in it
        for begin, end in self._alive.values():
            self._ranges.take(begin, end)
        return grows

    def put(self, num_bytes: int, slab_bytes: int | None = None) -> tuple[int, int | None]:
        """Returns the number of this allocation, and its offset in the slab, if it fits.

        Args:
            num_bytes: Size of the allocation.
            slab_bytes: Size of the slab, if that may be smaller than the plans need.
        """
        position = len(self._begins)
        number = self._first + position
        self._begins.append((num_bytes, self._moment))
        self._moment += 1
        self._candidates = [p for p in self._candidates if position < len(p[0]) and p[0][position] == num_bytes]
        if self._candidates:
            begin = self._candidates[0][1][position]
            end = begin + aligned(num_bytes)
            if slab_bytes is not None and end > slab_bytes:
                return number, None  # the plan is still valid
            if self._ranges.take(begin, end):
                self._alive[number] = begin, end
                return number, begin
        self._is_off_plan = True
        return number, None

    def put_in_gap(self, number: int, num_bytes: int, slab_bytes: int) -> int | None:
        """Returns an offset for allocation ``number``, which is in no plan; ``None`` if no gap is large enough."""
        size = aligned(num_bytes)
        begin = self._ranges.allocate(size, slab_bytes)
        if begin is not None:
            self._alive[number] = begin, begin + size
        return begin

    def is_extra(self, num_bytes: int) -> bool:
        """Whether this step follows a plan so far that has no allocation of this size from here on."""
        position = len(self._begins)
        return bool(position and self._candidates) and all(num_bytes not in p[0][position:] for p in self._candidates)

    def free(self, number: int) -> None:
        """Frees the range of allocation ``number``."""
        entry = self._alive.pop(number, None)
        if entry is not None:
            self._ranges.free(*entry)
        if number >= self._first:
            self._ends[number] = self._moment
            self._moment += 1


def plan_offsets(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """Returns an offset for each range, so that no two that are alive at once overlap, and the slab's bytes.

    ::

        bytes ^   +------+ +--+         forward puts, backward frees: a stack, which first fit packs without a gap.
              | +-+      +-+  +-+       Other orders may leave gaps; then the bigger ranges are placed first as well,
              |-+                +--    and the smaller slab of the two is taken.
              +---------------------> moments

    Offsets and the size are multiples of 256 bytes.

    >>> plan_offsets([(256, 0, 6), (512, 1, 3), (256, 4, 5)])
    ([0, 256, 256], 768)
    """
    sizes = [aligned(num_bytes) for num_bytes, _, _ in lifetimes]
    in_order = sorted(range(len(sizes)), key=lambda i: lifetimes[i][1])
    offsets, slab = _first_fit(lifetimes, sizes, in_order)
    if slab > lower_bound(lifetimes):
        biggest_first = sorted(range(len(sizes)), key=lambda i: -sizes[i])
        others, smaller = _first_fit(lifetimes, sizes, biggest_first)
        if smaller < slab:
            return others, smaller
    return offsets, slab


def lower_bound(lifetimes: Iterable[Lifetime]) -> int:
    """Returns the most bytes that are alive at one moment; no slab can be smaller.

    >>> lower_bound([(256, 0, 6), (512, 1, 3), (256, 4, 5)])
    768
    """
    lives = [life for life in lifetimes if life[2] > life[1]]
    changes = [(begin, 1, aligned(num_bytes)) for num_bytes, begin, _ in lives]
    changes += [(end, 0, -aligned(num_bytes)) for num_bytes, _, end in lives]
    alive = largest = 0
    for _, _, change in sorted(changes):
        alive += change
        largest = max(largest, alive)
    return largest


def _first_fit(lifetimes: Sequence[Lifetime], sizes: Sequence[int], order: Iterable[int]) -> tuple[list[int], int]:
    offsets = [0] * len(sizes)
    placed: list[tuple[int, int, int, int]] = []  # (offset, end of the range, begin, end of the life), by offset
    slab = 0
    for number in order:
        _, begin, end = lifetimes[number]
        offset = 0
        for low, high, other_begin, other_end in placed:
            if other_begin < end and begin < other_end:
                if low >= offset + sizes[number]:
                    break
                offset = max(offset, high)
        offsets[number] = offset
        slab = max(slab, offset + sizes[number])
        insort(placed, (offset, offset + sizes[number], begin, end), key=itemgetter(0))
    return offsets, slab
