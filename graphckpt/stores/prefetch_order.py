"""Guesses which group of tensors backward will ask for next. Integers only, no torch."""

from __future__ import annotations

from typing import final


@final
class Order:
    """Learns from one step in which order its groups are asked for, for the next step.

    Groups are numbered as forward opens them. Until a step has been seen, backward is taken to go the other way round.

    >>> order = Order()
    >>> order.next_after(3)
    2
    >>> for number in (3, 1, 2):
    ...     order.asked(number)
    >>> order.begin_step()
    >>> order.next_after(3), order.next_after(1), order.next_after(2)
    (1, 2, 1)
    """

    __slots__ = ("_after", "_last")

    def __init__(self) -> None:
        self._after: dict[int, int] = {}
        self._last: int | None = None

    def begin_step(self) -> None:
        """The next group asked for follows none."""
        self._last = None

    def asked(self, number: int) -> None:
        """Backward asks for this group."""
        if self._last is not None:
            self._after[self._last] = number
        self._last = number

    def next_after(self, number: int) -> int:
        """Returns the group that followed ``number`` the last time; the one before it, if that is not known."""
        return self._after.get(number, number - 1)
