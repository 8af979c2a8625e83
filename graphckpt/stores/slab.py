"""Learns from one step where each byte range of the next one lies in a slab. Integers only, no torch."""

from __future__ import annotations

from typing import final

from graphckpt.offsets import Lifetime, aligned, plan_offsets

_MOST_PLANS = 32  # as many shapes of a step are remembered


@final
class SlabPlan:
    """Gives out the places of a slab: put number i of a step lies where the plan from an earlier step has it.

    A step that puts other sizes than any before, or frees in an order that the plan does not allow, gets ``None`` for
    what does not fit; it is planned when it is over.

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
        self._plans: list[tuple[list[int], list[int]]] = []  # sizes and offsets of the puts of a step
        self._candidates: list[tuple[list[int], list[int]]] = []
        self._is_off_plan = False
        self._first = 0  # number of the first put of this step
        self._moment = 0
        self._begins: list[tuple[int, int]] = []  # bytes and moment of each put of this step
        self._ends: dict[int, int] = {}
        self._alive: dict[int, tuple[int, int]] = {}  # the ranges of the slab that are in use

    def begin_step(self) -> bool:
        """A new step begins. Returns whether the slab must be made anew, as it is too small for the last one."""
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
            self._alive.clear()  # what is still in use lies in the old slab
        return grows

    def put(self, num_bytes: int) -> tuple[int, int | None]:
        """Returns the number of this put, and its offset in the slab, if it has a place there."""
        position = len(self._begins)
        number = self._first + position
        self._begins.append((num_bytes, self._moment))
        self._moment += 1
        self._candidates = [p for p in self._candidates if position < len(p[0]) and p[0][position] == num_bytes]
        if self._candidates:
            begin = self._candidates[0][1][position]
            end = begin + aligned(num_bytes)
            if all(end <= low or high <= begin for low, high in self._alive.values()):
                self._alive[number] = begin, end
                return number, begin
        self._is_off_plan = True
        return number, None

    def is_extra(self, num_bytes: int) -> bool:
        """Whether the puts of this step so far are those of a plan that has no put of this size from here on."""
        position = len(self._begins)
        return bool(position and self._candidates) and all(num_bytes not in p[0][position:] for p in self._candidates)

    def free(self, number: int) -> None:
        """The range of put ``number`` is no longer in use."""
        self._alive.pop(number, None)
        if number >= self._first:
            self._ends[number] = self._moment
            self._moment += 1
