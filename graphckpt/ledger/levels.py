"""Prepares the live bytes of one step for drawing: thins them, splits them, and names policies. Knows no plotting."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter

from graphckpt.ledger.record import Event, StepRecord
from graphckpt.units import format_bytes

MAX_STEPS = 3000  # points on a curve; a plot is 1650 pixels wide
FLOOR = "#8d95a1"
"""The colour of weights and optimizer states."""
_LEVEL_OR_DEFAULT = re.compile(r"selective\((level[^)]*)\)|\(matmul\+attention\)")
_UNKNOWN_PHASE = "#98a1ae"
_PHASES = {"forward": "#7fa7d6", "recompute": "#f2a65a", "backward": "#86bf86", "optimizer": "#b49ad0"}

Steps = list[tuple[int, Event]]  # Legend: where on the x axis the level begins, and the level


def phase_colour(phase: str) -> str:
    """Returns the colour of a phase of the step."""
    return _PHASES.get(phase, _UNKNOWN_PHASE)


def thin(events: Sequence[Event], limit: int) -> Steps:
    """Returns at most ``limit`` steps: the highest of consecutive ones, so that no peak is lost.

    >>> steps = thin([Event(level, "", "forward") for level in (1, 5, 2, 3)], limit=2)
    >>> [(at, event.live_bytes) for at, event in steps]
    [(0, 5), (2, 3)]
    """
    size = -(-len(events) // limit)
    return [(at, max(events[at : at + size], key=attrgetter("live_bytes"))) for at in range(0, len(events), size)]


def runs(steps: Steps, end: int, name: str) -> Iterator[tuple[str, int, Steps]]:
    """Splits the steps where ``name`` (``"block"``, ``"phase"``) changes: its value, its end, its steps."""
    parts = [(value, list(run)) for value, run in groupby(steps, key=lambda step: str(getattr(step[1], name)))]
    ends = [run[0][0] for _, run in parts[1:]] + [end]
    for (value, run), stop in zip(parts, ends, strict=True):
        yield value, stop, run


def plain_steps(explanation: StepRecord) -> Steps:
    """Returns the thinned levels without policies; empty if they are unknown or the same as those of the step."""
    levels = explanation.plain_levels
    if not levels or max(levels) == explanation.peak_bytes:
        return []
    return thin([Event(level, "", "") for level in levels], MAX_STEPS)


def policies_of(explanation: StepRecord) -> dict[str, str]:
    """Returns the rule and the store of each block that has any, as short as it is clear."""
    said = {
        row.block: row.rule if row.place in ("", "device") else f"{row.rule} + {row.place}"
        for row in explanation.rows
        if row.rule != "keep" or row.place not in ("", "device")
    }
    return {block: _LEVEL_OR_DEFAULT.sub(r"\1", text) for block, text in said.items()}


def totals(explanation: StepRecord) -> str:
    """Returns what policies change of the saved bytes and of the peak, as one line."""
    plain, peak = explanation.plain_peak_bytes, explanation.peak_bytes
    texts = [_change("kept", explanation.bytes_before, explanation.bytes_after)]
    if plain is not None and peak is not None:
        texts.append(_change("peak", plain, peak, " (predicted)" if plain != peak else ""))
    return "   ".join(texts)


def _change(what: str, before: int, after: int, remark: str = "") -> str:
    texts = [format_bytes(before), format_bytes(after)]
    return f"{what}: {texts[0]}{remark} → {texts[1]}" if texts[0] != texts[1] else f"{what}: {texts[0]}"
