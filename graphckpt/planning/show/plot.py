"""Draws the live bytes of a plan over the step, and a sweep over budgets, as PNG or SVG.

Matplotlib takes half a second to import, so only a call of :func:`draw_plan` or :func:`draw_sweep` does.
"""

# ruff: noqa: PLC0415

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from graphckpt.errors import ConfigError
from graphckpt.ledger.plot_style import INK, figure_of, file_of, frame, legend, mark, unit_of
from graphckpt.planning.model.events import Phase
from graphckpt.planning.rows import PlanRow, PlanSummary, Stage
from graphckpt.units import format_bytes, format_seconds

_OUTSIDE = "#c9ced6"
COLOURS = (
    "#4c78a8",
    "#58a55c",
    "#e3bf3a",
    "#f2922f",
    "#d9576a",
    "#a06fb0",
    "#4fb3b0",
    "#a5744f",
    "#cf6fa5",
    "#86a83b",
)
_MARKERS = "osD^vPX<>*"
_OF_BLOCKS = (f"{Phase.FORWARD.value} ", f"{Phase.BACKWARD.value} ")
_BETWEEN = f"{Phase.AFTER_FORWARD.value} ", f"{Phase.AFTER_BACKWARD.value} "
_DASHES = (0, (4, 3))
_NARROW = 0.2  # width of intervals between two blocks; all others are 1 wide
_HIGHEST = 1.6  # a budget further above the peak would flatten the levels


def draw_plan(stages: Sequence[Stage], rows: Sequence[PlanRow], summary: PlanSummary, path: str | Path) -> Path:
    """Draws the predicted live bytes in each interval of the step, with the budget and the interval of the peak.

    Pale colour is the peak in an interval, full colour the level at its start; colours distinguish policies. The same
    plan gives the same file.

    Args:
        stages: the levels.
        rows: the policies.
        summary: the budget, and what sets the peak.
        path: the file to write, or to replace; its suffix, ``.png`` or ``.svg``, is the format.

    Returns:
        The path written.

    Raises:
        ConfigError: the suffix is another one, the folder does not exist, or the plan has no levels.
    """
    target = file_of(path)
    if not stages:
        raise ConfigError(f"{target}: the plan has no levels to draw · fix: plan again; a plan from a file has none")
    peak_bytes = max(stage.peak_bytes for stage in stages)
    scale, unit = unit_of(peak_bytes)
    with figure_of(target) as figure:
        axes = figure.subplots()
        is_near = summary.budget_bytes <= _HIGHEST * peak_bytes
        _draw_levels(axes, stages, rows, scale, has_budget=is_near)
        top = max(peak_bytes, summary.budget_bytes if is_near else 0)
        axes.set_ylim(0, 1.14 * max(top, 1) / scale)
        if is_near:
            axes.axhline(summary.budget_bytes / scale, color=INK, linewidth=1, linestyle=_DASHES)
        _mark_binding(axes, stages, summary, scale)
        frame(axes, f"live bytes of all tensors ({unit})")
        axes.set_xlabel("the step, block by block: forward, then backward", color=INK)
        axes.set_title(
            f"memory budget {format_bytes(summary.budget_bytes)}", loc="left", fontsize=11.5, fontweight="bold"
        )
        kept, took = format_bytes(summary.plain_peak_bytes), format_bytes(summary.predicted_peak_bytes)
        axes.set_title(f"peak: {kept} → {took}" if kept != took else f"peak: {kept}", loc="right", fontsize=9)
    return target


def draw_sweep(front: Sequence[tuple[int, float]], uniform: Sequence[tuple[str, int, float]], path: str | Path) -> Path:
    """Draws peak and step time of the Pareto-optimal plans and of uniform policies.

    Args:
        front: peak in bytes and seconds of each plan.
        uniform: name, peak in bytes and seconds of each uniform policy.
        path: the file to write, or to replace; its suffix, ``.png`` or ``.svg``, is the format.

    Returns:
        The path written.

    Raises:
        ConfigError: the suffix is another one, the folder does not exist, or there is nothing to draw.
    """
    target = file_of(path)
    if not front and not uniform:
        raise ConfigError(f"{target}: there is no plan to draw · fix: sweep over budgets from the least peak up")
    scale, unit = unit_of(max([peak for peak, _ in front] + [peak for _, peak, _ in uniform]))
    slowest = max([seconds for _, seconds in front] + [seconds for _, _, seconds in uniform])
    second, second_name = second_of(slowest)
    with figure_of(target, inches=(8, 4.8)) as figure:
        axes = figure.subplots()
        handles = []
        if front:
            ordered = sorted(front)
            handles += axes.plot(
                [peak / scale for peak, _ in ordered],
                [seconds * second for _, seconds in ordered],
                drawstyle="steps-post",  # a budget between two plans has the lower one
                color=INK,
                linewidth=1.2,
                marker="o",
                markersize=3.5,
                label="planned",
            )
        for number, (name, peak, seconds) in enumerate(uniform):
            handles += axes.plot(
                [peak / scale],
                [seconds * second],
                linestyle="none",
                marker=_MARKERS[number % len(_MARKERS)],
                markersize=8,
                markeredgecolor="white",
                color=COLOURS[number % len(COLOURS)],
                label=name,
            )
        axes.grid(color=_OUTSIDE, linewidth=0.6, alpha=0.6)
        frame(axes, f"seconds of a step ({second_name})")
        axes.set_xlabel(f"peak of the step ({unit})", color=INK)
        axes.set_title("peak and time of a step", loc="left", fontsize=11.5, fontweight="bold")
        legend(axes, handles, "policy of all blocks", anchor=1.0, is_in_layout=True)
    return target


def _draw_levels(axes: Any, stages: Sequence[Stage], rows: Sequence[PlanRow], scale: int, *, has_budget: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    policies = {row.block: row.option for row in rows}
    names = dict.fromkeys(policies.values())
    colour_of = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    edges = _edges(stages)
    is_any_outside = False
    for left, right, stage in zip(edges, edges[1:], stages, strict=False):
        block = block_of(stage.name)
        is_any_outside |= block is None
        colour = _OUTSIDE if block is None else colour_of[policies[block]]
        axes.fill_between([left, right], stage.peak_bytes / scale, color=colour, linewidth=0, alpha=0.45)
        axes.fill_between([left, right], stage.start_bytes / scale, color=colour, linewidth=0)
    ends = [stage.start_bytes / scale for stage in stages]
    axes.plot(edges, [*ends, ends[-1]], drawstyle="steps-post", color=INK, linewidth=0.8)
    axes.set_xlim(0, edges[-1])
    axes.set_xticks([])
    handles: list[Any] = [Patch(color=colour, label=name) for name, colour in colour_of.items()]
    if is_any_outside:
        handles.append(Patch(color=_OUTSIDE, label="outside of blocks"))
    if has_budget:
        handles.append(Line2D([], [], color=INK, linewidth=1, linestyle=_DASHES, label="memory budget"))
    legend(axes, handles, "policy", anchor=1.0, is_in_layout=True)


def block_of(stage: str) -> str | None:
    """Returns the block of an interval, from its name.

    >>> block_of("backward of h.3"), block_of("after the forward of h.3"), block_of("optimizer")
    ('h.3', None, None)
    """
    return next((stage[len(phase) :] for phase in _OF_BLOCKS if stage.startswith(phase)), None)


def _edges(stages: Sequence[Stage]) -> list[float]:
    """Returns the start of each interval, and the end of the last."""
    return list(accumulate((_NARROW if s.name.startswith(_BETWEEN) else 1.0 for s in stages), initial=0.0))


def _mark_binding(axes: Any, stages: Sequence[Stage], summary: PlanSummary, scale: int) -> None:
    edges = _edges(stages)
    highest = max(range(len(stages)), key=lambda number: stages[number].peak_bytes)
    at, level = (edges[highest] + edges[highest + 1]) / 2, stages[highest].peak_bytes / scale
    mark(axes, at, level, f"peak {format_bytes(summary.predicted_peak_bytes)}  ({summary.binding})")


def second_of(seconds: float) -> tuple[float, str]:
    """Returns the number of units per second, for the unit in which ``seconds`` is printed, and its name.

    >>> second_of(0.2), second_of(90)
    ((1000.0, 'ms'), (1.0, 's'))
    """
    unit = format_seconds(seconds).split()[-1] if 0 < seconds < 1 else "s"
    return {"ns": 1e9, "us": 1e6, "ms": 1e3}.get(unit, 1.0), unit
