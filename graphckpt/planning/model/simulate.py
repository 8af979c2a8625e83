"""Walks what happens in an interval: how high the level rises, where it ends, and who holds what then. Integers only.

What an interval leads to depends on its beginning alone: on who holds the few shared storages that it touches. So each
interval is walked in full once for each such beginning, and once for all equal blocks; from then on one sum, and one
highest level, are added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias, final

from graphckpt.planning.model.events import EventKind
from graphckpt.planning.model.program import PrivateRun

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_SOMEBODY = 1  # of a storage's holders: whoever is no block; it holds it or does not, however often it says so
_BLOCK = 2  # each block counts


class Change(NamedTuple):
    """A storage that several parts of the step see comes, goes, is held or let go."""

    kind: EventKind
    storage: int
    num_bytes: int


class EventOutcome(NamedTuple):
    """What an interval leads to from one beginning: levels above the first one, and holders by storage."""

    peak: int
    change: int
    holders: tuple[int, ...]


OutcomeCache: TypeAlias = "dict[tuple[PrivateRun | Change, ...], dict[tuple[int, ...], EventOutcome]]"
"""By what happens, with storages numbered as they come: by their holders at the beginning, what it leads to."""


@final
class EventSeq:
    """What happens in an interval, in order. Equal to itself alone.

    Args:
        steps: what happens.
        walked: is looked up, and added to, by all intervals that may be alike.
    """

    __slots__ = ("_outcomes", "_steps", "storages")

    def __init__(self, steps: Iterable[PrivateRun | Change], walked: OutcomeCache | None = None) -> None:
        self._steps = tuple(steps)
        self.storages = tuple(dict.fromkeys(step.storage for step in self._steps if isinstance(step, Change)))
        """The shared storages that it touches."""
        self._outcomes = ({} if walked is None else walked).setdefault(self._renumbered(), {})

    def __iter__(self) -> Iterator[PrivateRun | Change]:
        return iter(self._steps)

    def outcome(self, holders: tuple[int, ...]) -> EventOutcome:
        """Returns what it leads to, where ``storages`` have these holders at its beginning."""
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
    EventKind.BORN: lambda holders: holders | _SOMEBODY,
    EventKind.GONE: lambda holders: holders & ~_SOMEBODY,
    EventKind.HELD: lambda holders: holders + _BLOCK,
    EventKind.RELEASED: lambda holders: holders - _BLOCK,
}


def _is_alive(holders: int) -> bool:
    return holders > 0 or bool(holders & _SOMEBODY)


@final
class LiveState:
    """Who holds what at a moment: a shared storage lives as long as a block holds it, or anybody else does.

    Args:
        level: live bytes.
        others: storages of which somebody has hold who is no block.
        held: storages that a block holds.

    >>> state = LiveState(100, others=[7])
    >>> events = [Change(EventKind.HELD, 7, 30), Change(EventKind.GONE, 7, 30), PrivateRun(peak=8, change=5)]
    >>> state.advance(EventSeq(events))
    >>> state.level, state.peak  # a block still holds it
    (105, 108)
    """

    __slots__ = ("_holders", "level", "peak")

    def __init__(self, level: int = 0, others: Iterable[int] = (), held: Iterable[int] = ()) -> None:
        self.level = self.peak = level
        self._holders = dict.fromkeys(others, _SOMEBODY)
        self.hold(held)

    def hold(self, storages: Iterable[int]) -> None:
        """One more block holds these; the level has them already."""
        for storage in storages:
            self._holders[storage] = self._holders.get(storage, 0) + _BLOCK

    def advance(self, steps: EventSeq) -> None:
        """Goes through an interval."""
        holders = self._holders
        peak, change, after = steps.outcome(tuple([holders.get(storage, 0) for storage in steps.storages]))
        self.peak = max(self.peak, self.level + peak)
        self.level += change
        holders.update(zip(steps.storages, after, strict=True))
