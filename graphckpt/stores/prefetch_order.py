"""Predicts which group of tensors backward needs next. Integers only, no torch."""

from __future__ import annotations

from typing import final


@final
class PrefetchOrder:
    """Learns from one step in which order its groups are requested, for the next step.

    Groups are numbered as forward opens them. Before the first step is over, backward is assumed to run in reverse.

    >>> order = PrefetchOrder()
    >>> order.next_after(3)
    2
    >>> for number in (3, 1, 2):
    ...     order.record(number)
    >>> order.begin_step()
    >>> order.next_after(3), order.next_after(1), order.next_after(2)
    (1, 2, 1)
    """

    __slots__ = ("_after", "_last")

    def __init__(self) -> None:
        self._after: dict[int, int] = {}
        self._last: int | None = None

    def begin_step(self) -> None:
        """Begins a new step: the next group requested has no predecessor."""
        self._last = None

    def record(self, number: int) -> None:
        """Records that backward requests this group."""
        if self._last is not None:
            self._after[self._last] = number
        self._last = number

    def next_after(self, number: int) -> int:
        """Returns the group that followed ``number`` the last time; without a record, the one before it."""
        return self._after.get(number, number - 1)
