"""A chain whose states include the bytes of copies in flight, for the dynamic programme."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import final

from graphckpt.planning.solve.chain import Chain, Move
from graphckpt.planning.solve.copy_schedule import CopyTiming

_NUM_SIZES = 6  # that are distinguished: each is a state, and the time grows with the states


@final
@dataclass
class CachedChain:
    """A chain that caches moves."""

    inner: Chain
    _moves: dict[tuple[int, int, Hashable], Move | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.num_blocks = self.inner.num_blocks
        self.start, self.base, self.fixed_peak = self.inner.start, self.inner.base, self.inner.fixed_peak
        self.options, self.head_peak = self.inner.options, self.inner.head_peak

    def move(self, block: int, option: int, held: Hashable) -> Move | None:
        """Returns the cached move."""
        key = block, option, held
        if key not in self._moves:
            self._moves[key] = self.inner.move(block, option, held)
        return self._moves[key]


@final
class OffloadChain:
    """A chain whose states include the bytes in flight and the remaining copy times.

    The time that a block waits follows from the previous block that offloads::

        forward    | i ...... | j |wait|        j ends after the copy of i, which began when i had ended (and waited)
        out               | i          |
        backward   | j ...... |wait| i |        i begins after its copy, which began when j did
        back       | i             |

    So block ``j`` waits ``out seconds of i - forward seconds of i+1..j``, and block ``i`` waits ``back seconds of i -
    backward seconds of j..i+1``; both are known when ``j`` is chosen, and add up.

    Bytes are rounded up to one of a few sizes, so a plan may need less than this, but never more.

    Args:
        inner: The chain.
        timing: The seconds and offloaded bytes of options.
        moves: Whether options may offload.
        quantum: Remaining seconds are rounded to multiples of it, which limits the states; 0 does not round.
    """

    def __init__(self, inner: Chain, timing: CopyTiming, *, moves: bool = True, quantum: float = 0.0) -> None:
        self._inner = inner
        self._timing = timing
        self._moves = moves
        self._quantum = quantum
        most = max((size for row in timing.moved_bytes for size in row), default=0)
        sizes = {size for row in timing.moved_bytes for size in row if size > 0}
        grid = [-(-most * (step + 1) // _NUM_SIZES) for step in range(_NUM_SIZES)]
        self._grid = sorted(sizes) if len(sizes) <= _NUM_SIZES else grid
        self.num_blocks = inner.num_blocks
        self.base, self.fixed_peak = inner.base, inner.fixed_peak
        self.start: Hashable = (inner.start, 0, 0.0, 0.0)

    def options(self, block: int) -> list[float]:
        """The seconds of forward and backward, without waiting."""
        tables = self._timing.forward_seconds[block], self._timing.backward_seconds[block]
        return [forward + backward for forward, backward in zip(*tables, strict=True)]

    def move(self, block: int, option: int, held: Hashable) -> Move | None:
        """The effect of the option, with the bytes in flight and the time that it waits."""
        assert isinstance(held, tuple)
        inner_held, in_flight, out_left, back_left = held
        timing = self._timing
        size = timing.moved_bytes[block][option]
        move = None if size and not self._moves else self._inner.move(block, option, inner_held)
        if move is None:
            return None
        out_left = max(0.0, out_left - timing.forward_seconds[block][option])
        back_left = max(0.0, back_left - timing.backward_seconds[block][option])
        waits, after = move.waits, in_flight
        if size:
            waits += out_left + back_left
            out_left, back_left = size / timing.out_rate, size / timing.back_rate
            after = next(level for level in self._grid if level >= size)
        peaks = move.forward_peak + in_flight, move.kept, move.backward_peak + in_flight
        return Move(*peaks, (move.held, after, self._rounded(out_left), self._rounded(back_left)), waits)

    def head_peak(self, held: Hashable) -> int:
        """The peak of the head, with the bytes in flight."""
        assert isinstance(held, tuple)
        return self._inner.head_peak(held[0]) + int(held[1])

    def _rounded(self, left: float) -> float:
        return round(left / self._quantum) * self._quantum if self._quantum else left
