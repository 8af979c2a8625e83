"""Plots the live bytes of one step as PNG or SVG. Knows the record only.

Matplotlib takes half a second to import, so only a call of :func:`draw` does.
"""

# ruff: noqa: PLC0415

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from graphckpt.errors import ConfigError
from graphckpt.ledger.legend import legend_names, shades
from graphckpt.ledger.plot_style import INK, figure_of, file_of, frame, legend, mark, unit_of
from graphckpt.ledger.record import Event, StepRecord
from graphckpt.units import format_bytes

_MAX_STEPS = 3000  # points on the curve; the plot is 1650 pixels wide
_UNKNOWN_PHASE = "#98a1ae"
_PHASES = {"forward": "#7fa7d6", "recompute": "#f2a65a", "backward": "#86bf86", "optimizer": "#b49ad0"}

_Steps = list[tuple[int, Event]]  # Legend: where on the x axis the level begins, and the level


def draw(explanation: StepRecord, path: str | Path) -> Path:
    """Plots the live bytes after each allocation and free of the step.

    The area has the colour of the running block; layers of one stack have shades of one colour.
    The strip on top shows the phase. The same record gives the same file.

    Args:
        explanation: a record with a timeline.
        path: the file to write; its suffix is ``.png`` or ``.svg``.

    Returns:
        The path written.

    Raises:
        ConfigError: the suffix is another, the folder does not exist, or the record has no timeline.
    """
    target = file_of(path)
    if not explanation.timeline:
        record = f"the record of {explanation.title!r}"
        raise ConfigError(f"{target}: expected a timeline, {record} has none · fix: `with handle.measure(): step()`")
    steps = thin(explanation.timeline, _MAX_STEPS)
    end = len(explanation.timeline)
    with figure_of(target) as figure:
        strip, axes = figure.subplots(2, 1, sharex=True, height_ratios=(1, 20))
        _draw_phases(strip, steps, end)
        _draw_levels(axes, steps, end)
        _mark_peak(axes, steps)
        axes.set_xlabel(f"tensors coming and going, in order ({end:,} events)", color=INK)
        strip.set_title(explanation.title, loc="left", fontsize=11.5, fontweight="bold", pad=8)
        strip.set_title(_kept(explanation), loc="right", fontsize=9, pad=8)
    return target


def thin(events: Sequence[Event], limit: int) -> _Steps:
    """Returns at most ``limit`` steps: the highest of consecutive ones, so that no peak is lost.

    >>> steps = thin([Event(level, "", "forward") for level in (1, 5, 2, 3)], limit=2)
    >>> [(at, event.live_bytes) for at, event in steps]
    [(0, 5), (2, 3)]
    """
    size = -(-len(events) // limit)
    return [(at, max(events[at : at + size], key=_level)) for at in range(0, len(events), size)]


def _level(event: Event) -> int:
    return event.live_bytes


def _runs(steps: _Steps, end: int, name: str) -> Iterator[tuple[str, int, _Steps]]:
    """Splits the steps where ``name`` (``"block"``, ``"phase"``) changes: its value, its end, its steps."""
    runs = [(value, list(run)) for value, run in groupby(steps, key=lambda step: str(getattr(step[1], name)))]
    ends = [run[0][0] for _, run in runs[1:]] + [end]
    for (value, run), stop in zip(runs, ends, strict=True):
        yield value, stop, run


def _draw_phases(strip: Any, steps: _Steps, end: int) -> None:
    from matplotlib.patches import Patch

    seen = {}
    for phase, stop, run in _runs(steps, end, "phase"):
        seen[phase] = _PHASES.get(phase, _UNKNOWN_PHASE)
        strip.axvspan(run[0][0], stop, color=seen[phase], linewidth=0)
    strip.set_axis_off()
    handles = [Patch(color=colour, label=phase) for phase, colour in seen.items()]
    legend(strip, handles, "phase", anchor=1.0, is_in_layout=False)  # covers the free corner below


def _draw_levels(axes: Any, steps: _Steps, end: int) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    names = legend_names(event.block for _, event in steps)
    colours = shades(names)
    areas: dict[str, list[list[tuple[float, float]]]] = {block: [] for block in names}
    peak_bytes = max(event.live_bytes for _, event in steps)
    scale, unit = unit_of(peak_bytes)
    for block, stop, run in _runs(steps, end, "block"):
        starts = [at for at, _ in run]
        top = [
            (x, event.live_bytes / scale)
            for (at, event), after in zip(run, [*starts[1:], stop], strict=True)
            for x in (at, after)
        ]
        areas[block].append([(starts[0], 0), *top, (stop, 0)])
    for block, polygons in areas.items():
        axes.add_collection(PolyCollection(polygons, facecolor=colours[block], edgecolor="face", linewidth=0.4))
    axes.set_xlim(0, end)
    axes.set_ylim(0, 1.14 * max(peak_bytes, 1) / scale)
    frame(axes, f"live bytes of all tensors ({unit})")
    axes.yaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 2.5, 5, 10]))
    axes.grid(axis="y", color="white", linewidth=0.6, alpha=0.5)
    middle = {name: [block for block in names if names[block] == name] for name in dict.fromkeys(names.values())}
    handles = [Patch(color=colours[blocks[len(blocks) // 2]], label=name) for name, blocks in middle.items()]
    legend(axes, handles, "running block", anchor=0.8, is_in_layout=True)


def _mark_peak(axes: Any, steps: _Steps) -> None:
    at, peak = max(steps, key=lambda step: step[1].live_bytes)
    scale, _ = unit_of(peak.live_bytes)
    where = " · ".join(word for word in (peak.block, peak.phase) if word)
    mark(axes, at, peak.live_bytes / scale, f"peak {format_bytes(peak.live_bytes)}  ({where})")


def _kept(explanation: StepRecord) -> str:
    before, after = format_bytes(explanation.bytes_before), format_bytes(explanation.bytes_after)
    return f"kept for backward: {before} → {after}" if before != after else f"kept for backward: {before}"
