"""Simulates the events of an interval: the peak, the level at the end, and the holders of storages. Integers only.

The outcome of an interval depends only on who holds the few shared storages that it touches when it begins. So each
interval is simulated once for each such state, and once for all equal blocks; afterwards the outcome is looked up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias, final

from graphckpt.planning.model.events import EventKind
from graphckpt.planning.model.program import PrivateRun

_OTHER = 1  # of a storage's holders: any code outside of blocks, counted once
_BLOCK = 2  # of a storage's holders: each block counts
_UNBORN = -(1 << 40)  # of a storage's holders: blocks hold an object that will reach it


class Change(NamedTuple):
    """A shared storage is allocated, freed, held or released."""

    kind: EventKind
    storage: int
    num_bytes: int


class EventOutcome(NamedTuple):
    """The outcome of an interval: peak and change above the level at the start, and the holders at the end."""

    peak: int
    change: int
    holders: tuple[int, ...]


OutcomeCache: TypeAlias = "dict[tuple[PrivateRun | Change, ...], dict[tuple[int, ...], EventOutcome]]"
"""By events, with storages numbered in their order: the outcomes by the holders at the start."""


@final
class EventSeq:
    """The events of an interval, in order, compared by identity.

    Args:
        steps: the events.
        outcomes: a cache of outcomes, shared by all intervals that may have equal events.
    """

    __slots__ = ("_outcomes", "_steps", "storages")

    def __init__(self, steps: Iterable[PrivateRun | Change], outcomes: OutcomeCache | None = None) -> None:
        self._steps = tuple(steps)
        self.storages = tuple(dict.fromkeys(step.storage for step in self._steps if isinstance(step, Change)))
        """The shared storages of the events."""
        self._outcomes = ({} if outcomes is None else outcomes).setdefault(self._renumbered(), {})

    def __iter__(self) -> Iterator[PrivateRun | Change]:
        return iter(self._steps)

    def outcome(self, holders: tuple[int, ...]) -> EventOutcome:
        """Returns the outcome, given the holders of ``storages`` at the start."""
        found = self._outcomes.get(holders)
        if found is None:
            found = self._outcomes[holders] = self._simulate(dict(zip(self.storages, holders, strict=True)))
        return found

    def _renumbered(self) -> tuple[PrivateRun | Change, ...]:
        numbers = {storage: number for number, storage in enumerate(self.storages)}
        return tuple(
            [s if isinstance(s, PrivateRun) else Change(s.kind, numbers[s.storage], s.num_bytes) for s in self._steps]
        )

    def _simulate(self, holders: dict[int, int]) -> EventOutcome:
        level = peak = 0
        for step in self._steps:
            if isinstance(step, PrivateRun):
                peak = max(peak, level + step.peak)
                level += step.change
                continue
            before = holders[step.storage]
            after = holders[step.storage] = _AFTER[step.kind](before)
            level += step.num_bytes * (_is_alive(after) - _is_alive(before))
            peak = max(peak, level)
        return EventOutcome(peak, level, tuple(holders.values()))


_AFTER = {
    EventKind.BORN: lambda holders: (holders - _UNBORN if holders < _UNBORN // 2 else holders) | _OTHER,
    EventKind.GONE: lambda holders: holders & ~_OTHER,
    EventKind.HELD: lambda holders: holders + _BLOCK,
    EventKind.RELEASED: lambda holders: holders - _BLOCK,
}


def _is_alive(holders: int) -> bool:
    return holders > 0 or bool(holders & _OTHER)


@final
class LiveState:
    """The level of live bytes and the holders of shared storages, which live as long as anything holds them.

    Args:
        level: the live bytes.
        others: the storages that code outside of blocks holds.
        held: the storages that a block holds.
        unborn: the storages that blocks may hold before they are allocated.

    >>> state = LiveState(100, others=[7])
    >>> events = [Change(EventKind.HELD, 7, 30), Change(EventKind.GONE, 7, 30), PrivateRun(peak=8, change=5)]
    >>> state.advance(EventSeq(events))
    >>> state.level, state.peak  # a block still holds it
    (105, 108)
    """

    __slots__ = ("_holders", "level", "peak")

    def __init__(
        self, level: int = 0, others: Iterable[int] = (), held: Iterable[int] = (), unborn: Iterable[int] = ()
    ) -> None:
        self.level = self.peak = level
        self._holders = {**dict.fromkeys(others, _OTHER), **dict.fromkeys(unborn, _UNBORN)}
        self.hold(held)

    def hold(self, storages: Iterable[int]) -> None:
        """Adds a block that holds these storages; the level includes them already."""
        for storage in storages:
            self._holders[storage] = self._holders.get(storage, 0) + _BLOCK

    def advance(self, steps: EventSeq) -> None:
        holders = self._holders
        peak, change, after = steps.outcome(tuple([holders.get(storage, 0) for storage in steps.storages]))
        self.peak = max(self.peak, self.level + peak)
        self.level += change
        holders.update(zip(steps.storages, after, strict=True))
