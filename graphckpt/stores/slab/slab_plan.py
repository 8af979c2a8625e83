"""Learns from one step where each byte range of the next one lies in a slab. Integers only, no torch."""

from __future__ import annotations

from bisect import bisect, bisect_left
from typing import final

from graphckpt.offsets import Lifetime, aligned, plan_offsets

_MOST_PLANS = 32  # steps of that many shapes are remembered


@final
class Ranges:
    """Ranges of integers that do not overlap, in order. All methods but ``gap`` use bisection.

    >>> ranges = Ranges()
    >>> ranges.add(0, 10), ranges.add(20, 30), ranges.add(5, 15)
    (True, True, False)
    >>> ranges.gap(10), ranges.gap(11)
    (10, 30)
    """

    __slots__ = ("_ranges",)

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []  # one list, so that an interrupt comes before or after a change

    def add(self, begin: int, end: int) -> bool:
        """Adds a range. Returns whether it was free."""
        after = bisect(self._ranges, (begin, end))
        if after and self._ranges[after - 1][1] > begin:
            return False
        if after < len(self._ranges) and self._ranges[after][0] < end:
            return False
        self._ranges.insert(after, (begin, end))
        return True

    def remove(self, begin: int, end: int) -> None:
        """Removes a range."""
        del self._ranges[bisect_left(self._ranges, (begin, end))]

    def gap(self, size: int) -> int:
        """Returns where the first gap of ``size`` begins; it may be after all ranges."""
        begin = 0
        for low, high in self._ranges:
            if low - begin >= size:
                break
            begin = high
        return begin


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
        self._in_use = Ranges()

    @property
    def in_use(self) -> list[int]:
        """The numbers of the allocations whose ranges are in use."""
        return list(self._alive)

    def begin_step(self) -> bool:
        """Begins a new step. Returns whether the slab must be reallocated, as it is too small for the last one."""
        grows = False
        if self._is_off_plan:
            last = self._moment
            lifetimes: list[Lifetime] = [
                (num_bytes, begin, self._ends.get(self._first + i, last))
                for i, (num_bytes, begin) in enumerate(self._begins)
            ]
            sizes = [num_bytes for num_bytes, _, _ in lifetimes]
            offsets, slab_bytes = plan_offsets(lifetimes)
            kept = [plan for plan in self._plans if plan[0] != sizes]
            self._plans = [(sizes, offsets), *kept][:_MOST_PLANS]
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
        self._in_use = Ranges()  # rebuilt, as an interrupt may have left a range in it
        for begin, end in self._alive.values():
            self._in_use.add(begin, end)
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
            if self._in_use.add(begin, end):
                self._alive[number] = begin, end
                return number, begin
        self._is_off_plan = True
        return number, None

    def put_in_gap(self, number: int, num_bytes: int, slab_bytes: int) -> int | None:
        """Returns an offset for allocation ``number``, which is in no plan; ``None`` if no gap is large enough."""
        size = aligned(num_bytes)
        if size > slab_bytes:
            return None
        begin = self._in_use.gap(size)
        if begin + size > slab_bytes:
            return None
        self._in_use.add(begin, begin + size)
        self._alive[number] = begin, begin + size
        return begin

    def is_extra(self, num_bytes: int) -> bool:
        """Whether this step follows a plan so far that has no allocation of this size from here on."""
        position = len(self._begins)
        return bool(position and self._candidates) and all(num_bytes not in p[0][position:] for p in self._candidates)

    def free(self, number: int) -> None:
        """Frees the range of allocation ``number``."""
        found = self._alive.pop(number, None)
        if found is not None:
            self._in_use.remove(*found)
        if number >= self._first:
            self._ends[number] = self._moment
            self._moment += 1
