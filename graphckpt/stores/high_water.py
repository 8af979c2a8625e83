"""Sums that fall again, and what each share was when the sum was largest. No torch.

A step with micro-batches saves, frees and saves again. What it needs at one time is the largest sum, and the shares of
blocks at that moment add up to it.
"""

from __future__ import annotations

from typing import final


@final
class Total:
    """A sum of shares.

    >>> total = Total()
    >>> first, second = Share(total), Share(total)
    >>> first.add(4); second.add(2); first.drop(4); second.add(1)
    >>> total.largest, first.at_largest, second.at_largest
    (6, 4, 2)
    """

    __slots__ = ("_largest", "_now", "_number")

    def __init__(self) -> None:
        self._now = 0
        self._largest = 0
        self._number = 0

    @property
    def largest(self) -> int:
        """The largest sum at one time, as seen before each :meth:`Share.drop` and now."""
        self._sample()
        return self._largest

    def _sample(self) -> None:
        if self._now > self._largest:
            self._largest = self._now
            self._number += 1


@final
class Share:
    """A part of a :class:`Total`."""

    __slots__ = ("_at_largest", "_now", "_number", "_total")

    def __init__(self, total: Total) -> None:
        self._total = total
        self._now = 0
        self._at_largest = 0
        self._number = total._number

    @property
    def at_largest(self) -> int:
        """This part of the largest sum."""
        self._total._sample()
        self._remember()
        return self._at_largest

    def add(self, amount: int) -> None:
        """Adds ``amount``; a negative one corrects what was added before."""
        self._remember()
        self._now += amount
        self._total._now += amount

    def drop(self, amount: int) -> None:
        """Subtracts ``amount``, which has ended."""
        self._total._sample()
        self.add(-amount)

    def _remember(self) -> None:
        """Notes the value at the last maximum of the total, before it changes."""
        if self._number != self._total._number:
            self._number = self._total._number
            self._at_largest = self._now
