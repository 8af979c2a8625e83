"""Predicts the trace of a step at a batch size from those at two others, of which each storage is affine in the batch.

The events of a step are the same at both sizes; only the bytes of its storages differ. So the trace at a third size has
the same events, and the bytes follow from two numbers for each storage: exactly, where the bytes are affine.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Self, TypeVar, final

from graphckpt.planning.measure.trace import Trace
from graphckpt.planning.model.events import BlockCall, EventKind, Interval, StorageEvent, TraceSpan
from graphckpt.planning.model.measured_step import StepSample

_Key = TypeVar("_Key", bound="Hashable")


class NotAffineError(Exception):
    """The traces at two sizes have different events, or sizes between them would not be whole numbers of bytes."""


@final
@dataclass(frozen=True, slots=True)
class SizedTrace:
    """The trace of a step, which the release of its tensors after the step does not change."""

    stretches: list[TraceSpan]
    calls: list[BlockCall]
    sizes: list[int]
    """The bytes of each storage by its number, as requested from the allocator."""
    rounded: Callable[[int], int]
    """Returns the bytes that the allocator reserves."""

    @classmethod
    def of(cls, trace: Trace) -> Self:
        """Returns the trace as it is now, with storages that are freed together in the order of their numbers.

        PyTorch frees the casts that autocast has cached in the order of their addresses, which differs between runs.
        """
        stretches = [TraceSpan(span.interval, list(_in_order(span.entries))) for span in trace.stretches]
        return cls(stretches, trace.calls, list(trace.sizes), trace.rounded)

    def with_sizes(self, sizes: list[int]) -> Self:
        """Returns the same events with other storages."""
        bytes_of = [self.rounded(num_bytes) for num_bytes in sizes]
        stretches = [
            TraceSpan(
                span.interval, [e if e.storage < 0 else e._replace(num_bytes=bytes_of[e.storage]) for e in span.entries]
            )
            for span in self.stretches
        ]
        return replace(self, stretches=stretches, sizes=sizes)

    def has_events_of(self, other: SizedTrace) -> bool:
        """Returns whether both have the same events, apart from the bytes of their storages."""
        if len(self.sizes) != len(other.sizes) or self.calls != other.calls:
            return False
        return self._events() == other._events()

    def _events(self) -> list[tuple[Interval, list[tuple[EventKind, int]]]]:
        return [(span.interval, [(e.kind, e.storage) for e in span.entries]) for span in self.stretches]


@final
@dataclass(frozen=True, slots=True)
class Position:
    """A batch size beside two others, ``low`` and ``high``."""

    size: int
    low: int
    high: int

    def of_ints(self, low: int, high: int) -> int:
        """Returns the value of an affine function of the size.

        Raises:
            NotAffineError: it is not a whole number, or negative.

        >>> Position(6, low=2, high=4).of_ints(100, 120)
        140
        """
        if low == high:
            return low
        grown, rest = divmod((high - low) * (self.size - self.low), self.high - self.low)
        if rest or low + grown < 0:
            raise NotAffineError
        return low + grown

    def of_seconds(self, low: float, high: float) -> float:
        """Returns the value on the line through two others, not negative."""
        return max(0.0, low + (high - low) * (self.size - self.low) / (self.high - self.low))


def predicted_trace(at: Position, low: SizedTrace, high: SizedTrace) -> SizedTrace:
    """Returns the trace at a size from those at two others.

    Raises:
        NotAffineError: the events differ, or a number of bytes would not be whole.
    """
    if not low.has_events_of(high):
        raise NotAffineError
    return low.with_sizes([at.of_ints(one, other) for one, other in zip(low.sizes, high.sizes, strict=True)])


def predicted_sample(at: Position, low: StepSample, high: StepSample) -> StepSample:
    """Returns a run at a size that did not take place, from the same run at two others.

    Raises:
        NotAffineError: the events differ, or a number of bytes would not be whole.
    """
    assert isinstance(low.trace, SizedTrace)
    assert isinstance(high.trace, SizedTrace)
    plain = None
    if low.plain_seconds is not None and high.plain_seconds is not None:
        plain = _seconds(at, low.plain_seconds, high.plain_seconds)
    return StepSample(
        predicted_trace(at, low.trace, high.trace),
        _ints(at, low.far_bytes, high.far_bytes),
        _seconds(at, low.seconds, high.seconds),
        at.of_seconds(low.step_seconds, high.step_seconds),
        plain,
        _ints(at, low.ahead_bytes, high.ahead_bytes),
    )


def is_affine(traces: Sequence[tuple[int, SizedTrace]]) -> bool:
    """Returns whether the storages of one run are affine in the size.

    Args:
        traces: the same run at three sizes, with the size, in ascending order.
    """
    (low_size, low), (size, middle), (high_size, high) = traces
    try:
        found = predicted_trace(Position(size, low_size, high_size), low, high)
    except NotAffineError:
        return False
    return middle.has_events_of(low) and middle.sizes == found.sizes


def _in_order(entries: Iterable[StorageEvent]) -> Iterator[StorageEvent]:
    """Yields events, with the storages of consecutive releases in the order of their numbers.

    >>> born, gone = EventKind.BORN, EventKind.GONE
    >>> events = [StorageEvent(kind, n, 8, 0) for kind, n in ((born, 7), (gone, 7), (gone, 3), (born, 9), (gone, 9))]
    >>> [event.storage for event in _in_order(events)]
    [7, 3, 7, 9, 9]
    """
    for (kind, _), together in groupby(entries, key=lambda entry: (entry.kind, entry.op)):
        events = list(together)
        yield from sorted(events, key=lambda entry: entry.storage) if kind is EventKind.GONE else events


def _seconds(at: Position, low: Mapping[_Key, float], high: Mapping[_Key, float]) -> dict[_Key, float]:
    return {key: at.of_seconds(took, high.get(key, took)) for key, took in low.items()}


def _ints(at: Position, low: Mapping[_Key, int], high: Mapping[_Key, int]) -> dict[_Key, int]:
    if low.keys() != high.keys():
        raise NotAffineError
    return {key: at.of_ints(value, high[key]) for key, value in low.items()}
