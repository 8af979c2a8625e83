"""Searches the largest batch size that fits. A step may run only at some sizes, such as multiples of 8. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from math import gcd, inf
from typing import Any, final

from graphckpt.errors import ConfigError, PlanError, first_line, shown, without_repeats
from graphckpt.search.fit_result import BatchFit
from graphckpt.search.search import Search

# Note [How the largest size is found]
# The bytes of a step are nearly affine in its batch, so that `largest` follows the line through the last two sizes. The
# sizes that it measures, each with its bytes above a limit of 1000:
#
#     7 n + 100                          8: -844  16: -788  129: 3  128: -4
#     the same, 200 more from 101 on     8: -844  16: -788  129: 203  106: 42  100: -200  105: 35  104: 28  101: 7
#
# In the second, the line through 106 and 100 leads to 105, that through 100 and 105 to 104, as it cannot see the jump.
# Such a search could go on one by one: after `_MAX_ON_LINES` sizes it bisects.

_MAX_ROWS = 8  # of sizes that were not listed
_MAX_SPREAD = 32  # of these sizes, the ratio of the largest to the smallest
_MAX_ON_LINES = 8  # sizes that are measured where a line leads before the search bisects
_MAX_SIZE = 2**20  # samples in a batch; memory that fits this many does not depend on the batch
_MAX_STEP = 32  # a step may run only at multiples of a number up to this, and the search finds them
_MAX_GAPS = 2  # errors at multiples of a number, with larger sizes that run, until it is not that one


def range_or_list(sizes: Iterable[int], global_batch: int | None) -> range | list[int]:
    """Returns a range to search in, or else all sizes to plan."""
    fix = "fix: batch_sizes=[1, 2, 4, 8], or range(1, 65)"
    if isinstance(sizes, range) and sizes.step == 1:
        if sizes.start < 1 or not sizes:
            raise ConfigError(f"batch_sizes: expected a range from 1 or more, got {sizes!r} · {fix}")
        return sizes
    values: Iterator[Any] = iter(())
    with suppress(TypeError):  # of what is not iterable, such as an array without a dimension
        values = iter(() if isinstance(sizes, (str, bytes)) else sizes)
    entries = list(values)
    listed = {*map(size_of, entries)}
    if not listed or 0 in listed:
        what = "expected a list or a range of ints of 1 or more"
        raise ConfigError(f"batch_sizes: {what}, got {shown(entries or sizes)} · {fix}")
    between = range(min(listed), max(listed) + 1) if global_batch is not None else ()
    return sorted(listed.union(size for size in between if (global_batch or 1) % size == 0))


def size_of(value: Any) -> int:
    """Returns an int of Python, NumPy or torch as one of Python; 0 if it is not an int of 1 or more."""
    size = value.tolist() if hasattr(value, "tolist") else value
    return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else 0


@final
class SizeSearch:
    """Chooses the sizes that ``search`` tries, from ``low`` to ``high``; ``None`` sets no limit."""

    def __init__(self, search: Search[int, BatchFit], low: int, high: int | None) -> None:
        self._search = search
        self._rows = search.results
        self._low = low
        self._high = high
        self._end = inf
        """A size from which on the step cannot run, if one is known."""

    def run(
        self,
        first: int,
        global_batch: int | None,
        plain_excess: Callable[[BatchFit], int],
        excess: Callable[[BatchFit], int],
    ) -> list[int]:
        """Tries sizes until the largest one that fits is known, and some below it; returns those that fit.

        The largest with everything kept is searched first. It is often the fastest, and larger sizes may have to run
        under its plans.

        Args:
            first: The size to begin with.
            global_batch: Samples of one update, if divisors of it are tried too.
            plain_excess: Returns the bytes of a row with everything kept above the limit; 0 or less if they fit.
            excess: Returns those of its lowest peak.
        """
        low, high = self._low, self._high
        first = max(low, min(first, high or first))
        largest(self._excess_of(plain_excess), low, high, [first, min(2 * first, high or 2 * first)])
        check_any_ran(self._search)
        ends = [min(self._rows), max(self._rows)]  # far apart: their line errs least
        top = largest(self._excess_of(excess), low, high, ends)
        if top < low:
            return [low]
        bottom = low if high is not None else max(min(first, top), top // _MAX_SPREAD)
        if global_batch is not None:
            more = [size for size in range(bottom, top + 1) if global_batch % size == 0][-_MAX_ROWS:]
        else:
            num_rows = sum(size <= top for size in self._rows)
            powers = [2**power for power in range(bottom.bit_length() - 1, top.bit_length())]
            more = [size for size in powers if bottom <= size <= top and size not in self._rows]
            more = more[max(0, len(more) + num_rows - _MAX_ROWS) :]
        for size in [low, *more] if high is not None else more:
            self._nearest(size)
        sizes = sorted(self._rows)
        return [size for size in sizes if self._rows[size].fits] or sizes[:1]

    def _excess_of(self, excess: Callable[[BatchFit], int]) -> Callable[[int], int]:
        """Returns a function for :func:`largest` of the bytes above the limit of the nearest smaller size that runs.

        If none is near, the search goes on towards sizes at which the step has run: to smaller ones if there are any.
        """

        def excess_of(size: int) -> int:
            if size >= self._end:
                return 1
            if (row := self._nearest(size)) is not None:
                return excess(row)
            if self._rows and size > min(self._rows):
                self._end = size
                return 1
            if len(self._search.errors) >= _MAX_STEP:
                check_any_ran(self._search)
            return 0

        return excess_of

    def _nearest(self, size: int) -> BatchFit | None:
        """Returns the row of a size, or of a smaller one near it at which the step runs; ``None`` if there is none.

        The step may run only at multiples of a unit, which divides all sizes at which it has run.
        """
        candidates: Iterable[int] = range(size, size - _MAX_STEP, -1)
        if sizes := sorted(one for one, row in self._rows.items() if row.is_measured):
            # A step that has run at 24 and 36 may need multiples of 12, or of a divisor of it. An error between them at
            # a multiple of a candidate speaks against that candidate; a single one may have another cause. For a size
            # of 101 that makes 101, 100, 99, 100, 96 and 96 (of 1, 2, 3, 4, 6 and 12) in this order: the nearest size
            # is tried first, so that a unit that is assumed too large costs no better size.
            common = gcd(*sizes)
            gaps = [error for error in self._search.errors if sizes[0] < error < sizes[-1]]
            units = [unit for unit in range(1, _MAX_STEP + 1) if common % unit == 0]
            units = [unit for unit in units if sum(gap % unit == 0 for gap in gaps) < _MAX_GAPS]
            candidates = [*(size - size % unit for unit in units or [1]), size - 1]
        return next(
            (row for one in candidates if one >= self._low and (row := self._search.result(one)) is not None), None
        )


def check_any_ran(search: Search[int, BatchFit]) -> None:
    """Raises the first error of the step, if it ran at no size."""
    if not search.results:
        cause = next(iter(search.errors.values()))
        fix = "fix: batch_sizes at which it runs"
        raise PlanError(f"find_batch_size: the step cannot run at {faults_of(search.errors)[0]} · {fix}") from cause


def faults_of(errors: Mapping[int, Exception]) -> list[str]:
    """Returns the errors of sizes in words, those of a kind as one."""
    return without_repeats(f"batch size {size}: {first_line(error)}" for size, error in errors.items())


def largest(bytes_of: Callable[[int], int], low: int, high: int | None, start: Iterable[int]) -> int:
    """Returns the largest size from ``low`` to ``high`` that fits, or ``low - 1`` if none does.

    The next size to measure is where the line through the last two reaches the limit, so that few are needed where the
    bytes are nearly affine.

    Args:
        bytes_of: returns the bytes above the limit, 0 or less if a size fits; they do not become fewer with it.
        low: the smallest size.
        high: the largest size; ``None`` sets no limit.
        start: the sizes to measure first.

    >>> largest(lambda size: 100 + 7 * size - 1000, 1, None, [8, 16]), largest(lambda size: size - 83, 1, 64, [8])
    (128, 64)
    >>> largest(lambda size: size * size - 1000, 1, None, [8, 16]), largest(lambda size: size - 3, 4, None, [8])
    (31, 3)
    """
    end = (_MAX_SIZE if high is None else high) + 1
    fits, above = low - 1, end
    points: list[tuple[int, int]] = []
    queue = list(start)
    while above - fits > 1:
        if queue:
            size = queue.pop(0)
            if not fits < size < above:
                continue
        elif 2 <= len(points) <= _MAX_ON_LINES and points[-1][1] != points[-2][1]:
            (before, value_before), (size, value) = points[-2:]
            size -= value * (size - before) // (value - value_before)
        else:
            size = 2 * max(fits, 1) if above == end else (fits + above) // 2
        size = min(max(size, fits + 1), above - 1)
        points.append((size, bytes_of(size)))
        if points[-1][1] <= 0:
            fits = size
        else:
            above = size
    return fits
