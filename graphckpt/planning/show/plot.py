"""Draws a plan and a sweep over budgets as PNG or SVG.

Matplotlib takes half a second to import, so only a call of a function that draws does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from graphckpt.errors import ConfigError
from graphckpt.ledger.groups import GREY, OUTSIDE, PHASES, Span, block_spans, rule_colour, sorted_rules, spans
from graphckpt.ledger.plot import (
    DASHES,
    INK,
    figure_of,
    file_of,
    frame,
    legend,
    mark,
    patches,
    strip,
    title_of,
    unit_of,
)
from graphckpt.planning.model.events import Phase
from graphckpt.planning.rows import PlanRow, PlanSummary, Stage
from graphckpt.units import format_bytes, format_seconds

LEVEL, LEVEL_AT_START = "#cfd8e3", "#93a6bd"
"""The colours of live bytes whose kind is unknown: the peak of an interval, and the level at its start."""
_MARKERS = "osD^vPX<>*"
_BLOCK = re.compile(f"(?:{Phase.FORWARD.value}|{Phase.BACKWARD.value}) (.*)")
_BETWEEN = f"{Phase.AFTER_FORWARD.value} ", f"{Phase.AFTER_BACKWARD.value} "
_HIGHEST = 1.6  # a budget further above the peak would flatten the levels


def draw_plan(stages: Sequence[Stage], rows: Sequence[PlanRow], summary: PlanSummary, target: Path) -> Path:
    """Draws the predicted live bytes in each interval of the step, with the budget and the interval of the peak.

    The strips on top show the phase and the running block, in the colour of its policy. The same plan gives the same
    file.
    """
    from matplotlib.lines import Line2D  # noqa: PLC0415

    peak_bytes = max(stage.peak_bytes for stage in stages)
    # An interval between two blocks is short, and a line in the picture that says nothing unless it sets the peak.
    stages = [s for s in stages if s.peak_bytes == peak_bytes or not s.name.startswith(_BETWEEN)]
    scale, unit = unit_of(peak_bytes)
    is_near = summary.budget_bytes <= _HIGHEST * peak_bytes
    edges = list(range(len(stages) + 1))
    with figure_of(target) as figure:
        phases, blocks, axes = figure.subplots(3, 1, sharex=True, height_ratios=(1, 1, 20))
        axes.set_xlim(0, edges[-1])
        axes.set_xticks([])
        strip(phases, _phases(stages, edges), "phase")
        policies = {row.block: row.option for row in rows}
        strip(blocks, block_spans([block_of(s.name) or "" for s in stages], policies, edges, edges[-1]), "block")
        peaks = [stage.peak_bytes / scale for stage in stages]
        starts = [stage.start_bytes / scale for stage in stages]
        axes.fill_between(edges, [*peaks, peaks[-1]], step="post", color=LEVEL, linewidth=0)
        axes.fill_between(edges, [*starts, starts[-1]], step="post", color=LEVEL_AT_START, linewidth=0)
        axes.set_ylim(0, 1.14 * max(peak_bytes, summary.budget_bytes if is_near else 0, 1) / scale)
        levels = patches({"peak of the interval": LEVEL, "at its start": LEVEL_AT_START})
        if is_near:
            axes.axhline(summary.budget_bytes / scale, color=INK, linewidth=1, linestyle=DASHES)
            levels.append(Line2D([], [], color=INK, linewidth=1, linestyle=DASHES, label="memory budget"))
        highest = max(range(len(stages)), key=lambda number: stages[number].peak_bytes)
        text = f"peak {format_bytes(summary.predicted_peak_bytes)}\n{summary.binding}"
        mark(axes, (edges[highest] + edges[highest + 1]) / 2, peaks[highest], text)
        frame(axes, f"live bytes of all tensors ({unit})")
        axes.set_xlabel("the step, block by block", color=INK)
        plain, peak = format_bytes(summary.plain_peak_bytes), format_bytes(summary.predicted_peak_bytes)
        budget = f"memory budget {format_bytes(summary.budget_bytes)}"
        title_of(phases, budget, f"peak: {plain} → {peak}" if plain != peak else f"peak: {plain}")
        colours = {option: rule_colour(option) for option in sorted_rules(row.option for row in rows)} | {OUTSIDE: GREY}
        legend(figure, {"live bytes": levels, "policy of the block": patches(colours)})
    return target


def _phases(stages: Sequence[Stage], edges: Sequence[float]) -> Iterator[Span]:
    names = [
        "optimizer" if s.name.startswith(Phase.OPTIMIZER.value)
        else "backward" if s.name.startswith((Phase.BACKWARD.value, Phase.AFTER_BACKWARD.value))
        else "forward"
        for s in stages
    ]  # fmt: skip
    for phase, begin, end in spans(names, edges, edges[-1]):
        yield Span(phase, PHASES[phase], begin, end)


def block_of(stage: str) -> str | None:
    """Returns the block of an interval, from its name.

    >>> block_of("backward of h.3"), block_of("after the forward of h.3"), block_of("optimizer")
    ('h.3', None, None)
    """
    match = _BLOCK.fullmatch(stage)
    return None if match is None else match[1]


def draw_sweep(front: Sequence[tuple[int, float]], uniform: Sequence[tuple[str, int, float]], path: str | Path) -> Path:
    """Draws peak in bytes and seconds of the Pareto-optimal plans and of uniform policies."""
    target = file_of(path)
    if not front and not uniform:
        raise ConfigError(f"{target}: there is no plan to draw · fix: sweep over budgets from the lowest peak up")
    scale, unit = unit_of(max([peak for peak, _ in front] + [peak for _, peak, _ in uniform]))
    second, second_name = second_of(max([s for _, s in front] + [s for _, _, s in uniform]))
    with figure_of(target, inches=(8, 4.8)) as figure:
        axes = figure.subplots()
        planned, points = [], {}
        if front:
            peaks, seconds = zip(*sorted(front), strict=True)
            # steps-post, as a budget between two plans has the lower one
            planned = axes.plot(
                [peak / scale for peak in peaks], [s * second for s in seconds], "o-", drawstyle="steps-post",
                color=INK, linewidth=1.2, markersize=3.5, label="chosen by the planner",
            )  # fmt: skip
        for number, (name, peak, s) in enumerate(uniform):
            (points[name],) = axes.plot(
                [peak / scale], [s * second], linestyle="none", marker=_MARKERS[number % len(_MARKERS)], markersize=8,
                markeredgecolor="white", color=rule_colour(name), label=name,
            )  # fmt: skip
        axes.grid(color=GREY, linewidth=0.6, alpha=0.6)
        frame(axes, f"step time ({second_name})")
        axes.set_xlabel(f"peak memory ({unit})", color=INK)
        title_of(axes, "peak memory and step time")
        legend(figure, {"plans": planned, "one policy for all blocks": [points[name] for name in sorted_rules(points)]})
    return target


def second_of(seconds: float) -> tuple[float, str]:
    """Returns the number of units per second, for the unit in which ``seconds`` is printed, and its name.

    >>> second_of(0.2), second_of(90)
    ((1000.0, 'ms'), (1.0, 's'))
    """
    unit = format_seconds(seconds).split()[-1] if 0 < seconds < 1 else "s"
    return {"ns": 1e9, "us": 1e6, "ms": 1e3}.get(unit, 1.0), unit
