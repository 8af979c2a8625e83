"""Packs byte ranges with known lifetimes into one slab. Integers only, no torch."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from operator import itemgetter

ALIGN = 256  # bytes; what cudaMalloc guarantees, so vectorised kernels stay legal

Lifetime = tuple[int, int, int]
"""Bytes, first and last moment; alive at ``begin <= moment < end``."""


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
    alive = most = 0
    for _, _, change in sorted(changes):
        alive += change
        most = max(most, alive)
    return most


def aligned(num_bytes: int) -> int:
    """Rounds up to the alignment.

    >>> aligned(1), aligned(256), aligned(257)
    (256, 256, 512)
    """
    return -(-num_bytes // ALIGN) * ALIGN


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
