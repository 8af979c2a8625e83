"""Groups equal numbered layers into one row, for printing. Rows in, rows out; knows no table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from graphckpt.ledger.record import Row

_COUNTS = ("bytes_before", "bytes_after", "bytes_host", "bytes_disk", "runs", "reruns")
_TIMES = ("forward_seconds", "recompute_seconds", "copy_seconds", "wait_seconds")
_MAX_PERIOD = 32  # rows; a layer with more policies inside is printed ungrouped


def group_rows(rows: Sequence[Row]) -> Iterator[Row]:
    """Groups consecutive layers that differ only in their number and times into one row of sums.

    Works on whole periods too: ``h.0, h.0.attn, h.1, h.1.attn`` becomes ``h.0-1 (2x), h.0-1.attn (2x)``.

    >>> row = Row(block="h.0", rule="full", bytes_before=8, bytes_after=2, runs=1, reruns=1)
    >>> [(r.block, r.bytes_before) for r in group_rows([replace(row, block=f"h.{i}") for i in range(12)])]
    [('h.0-11 (12x)', 96)]
    """
    start = 0
    while start < len(rows):
        period, repeats = _best_period(rows, start)
        for offset in range(period):
            yield _join(rows[start + offset : start + period * repeats : period])
        start += period * repeats


def _best_period(rows: Sequence[Row], start: int) -> tuple[int, int]:
    """Returns the period and the number of repeats at ``start`` that remove the most rows.

    ::

        start                 period 2, 3 repeats: 4 rows fewer
          v
        | h.0  h.0.attn | h.1  h.1.attn | h.2  h.2.attn | norm
    """
    best, fewest = (1, 1), 0
    for period in range(1, min(_MAX_PERIOD, (len(rows) - start) // 2) + 1):
        step = _number_step(rows[start].block, rows[start + period].block)
        repeats = 1
        while step is not None and _repeats(rows, start, period, repeats, step):
            repeats += 1
        if period * (repeats - 1) > fewest:
            best, fewest = (period, repeats), period * (repeats - 1)
    return best


def _number_step(first: str, later: str) -> tuple[int, int] | None:
    """Returns where and by how much one number in a path grew, if nothing else differs.

    >>> _number_step("h.0.attn", "h.1.attn"), _number_step("h.0.attn", "h.0.mlp")
    ((1, 1), None)
    """
    ours, theirs = first.split("."), later.split(".")
    if len(ours) != len(theirs):
        return None
    differ = [at for at, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
    if len(differ) != 1 or not (ours[differ[0]].isdecimal() and theirs[differ[0]].isdecimal()):
        return None
    grown = int(theirs[differ[0]]) - int(ours[differ[0]])
    return (differ[0], grown) if grown > 0 else None


def _repeats(rows: Sequence[Row], start: int, period: int, times: int, step: tuple[int, int]) -> bool:
    """Whether the period at ``start`` repeats ``times`` periods later, ``times`` steps up."""
    later = start + times * period
    if later + period > len(rows):
        return False
    expected = (step[0], step[1] * times)
    return all(
        _number_step(rows[start + offset].block, rows[later + offset].block) == expected
        and _but_number_and_time(rows[start + offset]) == _but_number_and_time(rows[later + offset])
        for offset in range(period)
    )


def _but_number_and_time(row: Row) -> Row:
    return replace(row, block="", forward_seconds=None, recompute_seconds=None, copy_seconds=None, wait_seconds=None)


def _join(rows: Sequence[Row]) -> Row:
    """Returns one row with the sums of ``rows``, named by the range of their numbers."""
    first, count = rows[0], len(rows)
    if count == 1:
        return first
    step = _number_step(first.block, rows[1].block)
    assert step is not None, "group_rows joins only rows that _repeats() let through"
    at, grown = step
    parts, last = first.block.split("."), rows[-1].block.split(".")
    middle = "-" if grown == 1 else f",{rows[1].block.split('.')[at]},..," if count > 2 else ","
    parts[at] = f"{parts[at]}{middle}{last[at]}"
    return replace(first, block=f"{'.'.join(parts)} ({count}x)", **sums(rows, *_COUNTS, *_TIMES))


def sums(rows: Sequence[Row], *fields: str) -> dict[str, Any]:
    """Returns the sum of each field over rows; ``None`` if no row has a value.

    >>> row = Row(block="h.0", rule="full", bytes_before=8, bytes_after=2, runs=1, reruns=1)
    >>> sums([row, replace(row, copy_seconds=0.5)], "runs", "copy_seconds", "wait_seconds")
    {'runs': 2, 'copy_seconds': 0.5, 'wait_seconds': None}
    """
    known = {field: [value for row in rows if (value := getattr(row, field)) is not None] for field in fields}
    return {field: sum(values) if values else None for field, values in known.items()}
