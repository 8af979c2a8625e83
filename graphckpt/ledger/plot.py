"""Plots the live bytes of one step as PNG, SVG or HTML. Knows the record only.

Matplotlib takes half a second to import, so only a call of :func:`draw` does.
"""

# ruff: noqa: PLC0415

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from graphckpt.errors import ConfigError
from graphckpt.ledger.legend import legend_names, shades
from graphckpt.ledger.levels import FLOOR, MAX_STEPS, Steps, phase_colour, plain_steps, policies_of, runs, thin, totals
from graphckpt.ledger.plot_style import INK, PAGE, figure_of, file_of, frame, legend, mark, shorten, unit_of
from graphckpt.ledger.record import StepRecord
from graphckpt.units import format_bytes

_LABEL = 38  # characters of an entry of the legend, which takes a quarter of the width then
_PEAK_LABEL = 56
_TITLE = 30


def draw(explanation: StepRecord, path: str | Path) -> Path:
    """Plots the live bytes after each allocation and free of the step.

    The area has the colour of the running block; layers of one stack have shades of one colour. The grey floor are
    weights and optimizer states, the line is the step without policies, if it can be predicted. The strip on top
    shows the phase. The same record gives the same file.

    Args:
        explanation: a record with a timeline.
        path: the file to write; its suffix is ``.png``, ``.svg`` or, for an interactive page, ``.html``.

    Returns:
        The path written.

    Raises:
        ConfigError: the suffix is another, the folder does not exist, or the record has no timeline.
    """
    target = file_of(path, has_page=True)
    if not explanation.timeline:
        record = f"the record of {explanation.title!r}"
        raise ConfigError(f"{target}: expected a timeline, {record} has none · fix: `with handle.measure(): step()`")
    if target.suffix.lower() == PAGE:
        from graphckpt.ledger.report.step import write_report

        return write_report(explanation, target)
    steps = thin(explanation.timeline, MAX_STEPS)
    end = len(explanation.timeline)
    with figure_of(target) as figure:
        strip, axes = figure.subplots(2, 1, sharex=True, height_ratios=(1, 20))
        _draw_phases(strip, steps, end)
        _draw_levels(axes, steps, explanation)
        _mark_peak(axes, steps, explanation.peak_at)
        axes.set_xlabel(f"allocations and frees, in order ({end:,})", color=INK)
        strip.set_title(shorten(explanation.title, _TITLE), loc="left", fontsize=11.5, fontweight="bold", pad=8)
        strip.set_title(totals(explanation), loc="right", fontsize=9, pad=8)
    return target


def _draw_phases(strip: Any, steps: Steps, end: int) -> None:
    from matplotlib.patches import Patch

    seen = {}
    for phase, stop, run in runs(steps, end, "phase"):
        seen[phase] = phase_colour(phase)
        strip.axvspan(run[0][0], stop, color=seen[phase], linewidth=0)
    strip.set_axis_off()
    handles = [Patch(color=colour, label=phase) for phase, colour in seen.items()]
    legend(strip, handles, "phase", anchor=1.0, is_in_layout=False)  # covers the free corner below


def _draw_levels(axes: Any, steps: Steps, explanation: StepRecord) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    end = len(explanation.timeline)
    names = legend_names(event.block for _, event in steps)
    colours = shades(names)
    areas: dict[str, list[list[tuple[float, float]]]] = {block: [] for block in names}
    peak_bytes = max(event.live_bytes for _, event in steps)
    scale, unit = unit_of(peak_bytes)
    for block, stop, run in runs(steps, end, "block"):
        starts = [at for at, _ in run]
        ends = zip(run, [*starts[1:], stop], strict=True)
        top = [(x, event.live_bytes / scale) for (at, event), end_of in ends for x in (at, end_of)]
        areas[block].append([(starts[0], 0), *top, (stop, 0)])
    for block, polygons in areas.items():
        axes.add_collection(PolyCollection(polygons, facecolor=colours[block], edgecolor="face", linewidth=0.4))
    memory = [*_draw_floor(axes, explanation, scale), *_draw_plain(axes, explanation, scale)]
    top_bytes = max(peak_bytes, 1, *explanation.plain_levels)
    axes.set_xlim(0, end)
    axes.set_ylim(0, 1.18 * top_bytes / scale)
    frame(axes, f"live bytes of all tensors ({unit})")
    axes.yaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 2.5, 5, 10]))
    axes.grid(axis="y", color="white", linewidth=0.6, alpha=0.5)
    middle = {name: [block for block in names if names[block] == name] for name in dict.fromkeys(names.values())}
    policies = policies_of(explanation)
    handles = [
        Patch(
            color=colours[blocks[len(blocks) // 2]],
            label=_label(name, dict.fromkeys(policies[b] for b in blocks if b in policies)),
        )
        for name, blocks in middle.items()
    ]
    is_stack = any(len(blocks) > 1 for blocks in middle.values())
    title = "running block · policy" if policies else "running block"
    title += "\n(pale: first layer)" if is_stack else ""
    if memory:
        box = axes.add_artist(legend(axes, memory, "memory", anchor=0.81, is_in_layout=True))
        box.set_clip_on(False)  # else the layout takes it for a part of the axes
    legend(axes, handles, title, anchor=0.81 - 0.05 * (len(memory) + 1.6) * bool(memory), is_in_layout=True)


def _label(name: str, policies: Iterable[str]) -> str:
    """Returns an entry of the legend; of a long name, the end says most."""
    policy = shorten(", ".join(policies), _LABEL - 12)
    room = _LABEL - len(policy) - 3 * bool(policy)
    name = name if len(name) <= room else f"…{name[1 - room :]}"
    return f"{name} · {policy}" if policy else name


def _draw_floor(axes: Any, explanation: StepRecord, scale: int) -> Iterator[Any]:
    """Draws weights and optimizer states, and yields their entry in the legend."""
    if explanation.static_bytes:
        label = f"weights, optimizer ({format_bytes(explanation.static_bytes)})"
        yield axes.axhspan(0, explanation.static_bytes / scale, color=FLOOR, linewidth=0, label=label)


def _draw_plain(axes: Any, explanation: StepRecord, scale: int) -> Iterator[Any]:
    """Draws the step without policies, and yields its entry in the legend."""
    steps = plain_steps(explanation)
    if steps:
        xs, ys = [at for at, _ in steps], [event.live_bytes / scale for _, event in steps]
        end = len(explanation.plain_levels)
        label = "without policies (predicted)"
        yield from axes.plot([*xs, end], [*ys, ys[-1]], drawstyle="steps-post", color=INK, lw=0.8, label=label)


def _mark_peak(axes: Any, steps: Steps, peak_at: str) -> None:
    at, peak = max(steps, key=lambda step: step[1].live_bytes)
    scale, _ = unit_of(max(event.live_bytes for _, event in steps))
    text = f"peak {format_bytes(peak.live_bytes)}\n{shorten(peak_at, _PEAK_LABEL)}"
    mark(axes, at, peak.live_bytes / scale, text)
