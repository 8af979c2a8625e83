"""Draws plans: as PNG or SVG, and as an interactive page with a slider over the memory budgets.

Matplotlib takes half a second to import, so only a call of a function that draws does.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from graphckpt.errors import ConfigError
from graphckpt.ledger.groups import (
    GREY,
    OUTSIDE,
    PHASES,
    Span,
    block_spans,
    common_prefix,
    rule_colour,
    sorted_rules,
    spans,
)
from graphckpt.ledger.page import area, legend_entries, line, peak_label, plot, section, table, write_page
from graphckpt.ledger.plot import (
    ACCENT,
    DASHES,
    INK,
    figure_of,
    file_of,
    frame,
    legend,
    mark,
    patches,
    shorten,
    strip,
    title_of,
    unit_of,
)
from graphckpt.ledger.table import Column, prefix_note
from graphckpt.planning.intervals import Phase
from graphckpt.planning.rows import PlanData, Stage, assumptions_line, device_text, plan_cells, reserved_lines
from graphckpt.units import format_bytes, format_seconds

LEVEL, LEVEL_AT_START = "#cfd8e3", "#93a6bd"
"""The colours of live bytes whose kind is unknown: the peak of an interval, and the level at its start."""
_MARKERS = "osD^vPX<>*"
_BLOCK = re.compile(f"(?:{Phase.FORWARD.value}|{Phase.BACKWARD.value}) (.*)")
_BETWEEN = f"{Phase.AFTER_FORWARD.value} ", f"{Phase.AFTER_BACKWARD.value} "
_HIGHEST = 1.6  # a budget further above the peak would flatten the levels


def draw_plan(plan: PlanData, target: Path) -> Path:
    """Draws the predicted live bytes in each interval of the step, with the budget and the interval of the peak.

    The strips on top show the phase and the running block, in the colour of its policy. The same plan gives the same
    file.
    """
    from matplotlib.lines import Line2D  # noqa: PLC0415

    peak_bytes = max(stage.peak_bytes for stage in plan.stages)
    # An interval between two blocks is short, and a line in the picture that says nothing unless it sets the peak.
    stages = [s for s in plan.stages if s.peak_bytes == peak_bytes or not s.name.startswith(_BETWEEN)]
    scale, unit = unit_of(peak_bytes)
    is_near = plan.budget_bytes <= _HIGHEST * peak_bytes
    budget_level = plan.budget_bytes / scale
    edges = list(range(len(stages) + 1))
    with figure_of(target) as figure:
        phases, blocks, axes = figure.subplots(3, 1, sharex=True, height_ratios=(1, 1, 20))
        axes.set_xlim(0, edges[-1])
        axes.set_xticks([])
        strip(phases, _phases(stages, edges), "phase")
        policies = {row.block: row.option for row in plan.rows}
        strip(blocks, block_spans([block_of(s.name) or "" for s in stages], policies, edges, edges[-1]), "block")
        peaks = [stage.peak_bytes / scale for stage in stages]
        starts = [stage.start_bytes / scale for stage in stages]
        axes.fill_between(edges, [*peaks, peaks[-1]], step="post", color=LEVEL, linewidth=0)
        axes.fill_between(edges, [*starts, starts[-1]], step="post", color=LEVEL_AT_START, linewidth=0)
        axes.set_ylim(0, 1.18 * max(peak_bytes, plan.budget_bytes if is_near else 0, 1) / scale)
        levels = patches({"peak of the interval": LEVEL, "at its start": LEVEL_AT_START})
        if is_near:
            axes.axhline(budget_level, color=INK, linewidth=1, linestyle=DASHES)
            levels.append(Line2D([], [], color=INK, linewidth=1, linestyle=DASHES, label="memory budget"))
        highest = max(range(len(stages)), key=lambda number: stages[number].peak_bytes)
        text = f"peak {format_bytes(plan.predicted_peak_bytes)}\n{plan.binding}"
        mark(
            axes,
            (edges[highest] + edges[highest + 1]) / 2,
            peaks[highest],
            text,
            [[(0, budget_level)]] if is_near else [],
        )
        frame(axes, f"live bytes of all tensors ({unit})")
        axes.set_xlabel("the step, block by block", color=INK)
        plain, peak = format_bytes(plan.plain_peak_bytes), format_bytes(plan.predicted_peak_bytes)
        budget = f"memory budget {format_bytes(plan.budget_bytes)}"
        title_of(phases, budget, f"peak: {plain} → {peak}" if plain != peak else f"peak: {plain}")
        options = sorted_rules(row.option for row in plan.rows)
        colours = {**{option: rule_colour(option) for option in options}, OUTSIDE: GREY}
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


def draw_sweep(front: Sequence[PlanData], uniform: Mapping[str, PlanData], path: str | Path) -> Path:
    """Draws peak in bytes and seconds of the Pareto-optimal plans and of uniform policies."""
    target = file_of(path)
    plans = [*front, *uniform.values()]
    if not plans:
        raise ConfigError(
            f"{target}: expected a plan to draw, got none · fix: sweep over budgets from the lowest peak up"
        )
    scale, unit = unit_of(max(plan.predicted_peak_bytes for plan in plans))
    second, second_name = second_of(max(plan.predicted_step_seconds for plan in plans))

    def point(plan: PlanData) -> tuple[float, float]:
        return plan.predicted_peak_bytes / scale, plan.predicted_step_seconds * second

    with figure_of(target, inches=(8, 4.8)) as figure:
        axes = figure.subplots()
        planned, points = [], {}
        if front:
            # steps-post, as a budget between two plans has the lower one
            planned = axes.plot(
                *zip(*sorted(map(point, front)), strict=True), "o-", drawstyle="steps-post",
                color=INK, linewidth=1.2, markersize=3.5, label="chosen by the planner",
            )  # fmt: skip
        for number, (name, plan) in enumerate(uniform.items()):
            (points[name],) = axes.plot(
                *point(plan), linestyle="none", marker=_MARKERS[number % len(_MARKERS)], markersize=8,
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


_MAX_BYTES = 600_000  # of all positions of the slider, so that the page stays below 6 MB
_BYTES_OF_BAR = 2
_BYTES_OF_LEVEL = 9
_MAX_NAME = 48
_MAX_TICK = 24
_LEFT, _RIGHT = [0, 0.4], [0.48, 1]
_TOP, _BOTTOM = [0.44, 1], [0, 0.16]
_AT_ONCE = {"mode": "immediate", "frame": {"duration": 0, "redraw": True}, "transition": {"duration": 0}}


def write_plans(chosen: PlanData, front: Sequence[PlanData], target: Path) -> Path:
    """Writes peak and time of the Pareto-optimal plans, and of one, at first ``chosen``, its levels and policies."""
    others = [plan for plan in front if plan.predicted_peak_bytes != chosen.predicted_peak_bytes]
    num_options = len({row.option for plan in (chosen, *front) for row in plan.rows})
    num_bytes = _BYTES_OF_BAR * num_options * len(chosen.rows) + _BYTES_OF_LEVEL * len(chosen.stages)
    every = -(-len(others) * num_bytes // _MAX_BYTES) or 1
    plans = sorted([chosen, *others[::every]], key=lambda plan: plan.predicted_peak_bytes)
    start = next(at for at, plan in enumerate(plans) if plan is chosen)
    text = (
        "Move the slider to see the fastest plan for another memory budget: its peak and time, its live bytes over the "
        "step, and the policy of each block."
    )
    if len({p.predicted_peak_bytes for p in plans}) < len({p.predicted_peak_bytes for p in (chosen, *front)}):
        text += f" {len(plans)} of {len(front)} plans are shown."
    prefix = common_prefix(row.block for row in chosen.rows)
    label = f"Predicted step time over peak, for {len(plans)} plans"
    lead = (
        f"memory budget {format_bytes(chosen.budget_bytes)} · predicted peak "
        f"{format_bytes(chosen.predicted_peak_bytes)} of {format_bytes(chosen.plain_peak_bytes)} without policies · "
        f"{format_seconds(chosen.predicted_step_seconds)} per step on {device_text(chosen)}"
        f"{''.join(f' · {line}' for line in reserved_lines(chosen))}"
        f"{f' · {assumptions_line(chosen)}' if chosen.assumptions else ''}"
    )
    numbers = (Column(name, is_number=True) for name in ("blocks", "extra time", "offloaded"))
    columns = [Column("block"), Column("policy"), *numbers]
    rows = table(columns, plan_cells(chosen.rows, prefix, has_moves=True))
    sections = [
        section("Plans for all budgets", text, plot(_figure(plans, start, prefix), "plans", label, 720)),
        section(
            f"Policies for {format_bytes(chosen.budget_bytes)}",
            f"The plan that was chosen. {prefix_note(prefix)}",
            rows,
        ),
    ]
    return write_page(target, "Activation checkpointing plan", lead, sections)


def _figure(plans: Sequence[PlanData], start: int, prefix: str) -> dict[str, Any]:
    scale, unit = unit_of(max(plan.plain_peak_bytes for plan in plans))
    second, second_name = second_of(max(plan.predicted_step_seconds for plan in plans))
    colour_of = {option: rule_colour(option) for option in sorted_rules(r.option for p in plans for r in p.rows)}
    blocks = [row.block for row in plans[start].rows]
    parents = {block.rpartition(".")[0] for block in blocks}
    inside = parents.pop() if len(parents) == 1 else ""
    xs = [plan.predicted_peak_bytes / scale for plan in plans]
    ys = [plan.predicted_step_seconds * second for plan in plans]
    titles = [_title(plan) for plan in plans]
    front = line(xs, ys) | {"mode": "lines+markers", "marker": {"size": 5}, "text": titles, "showlegend": False}
    frames = [_traces(plan, colour_of, blocks, prefix, scale, second) for plan in plans]
    moving = frames[start]
    steps = [
        {"label": format_bytes(plan.predicted_peak_bytes), "method": "animate", "args": [[str(at)], _AT_ONCE]}
        for at, plan in enumerate(plans)
    ]
    top = max(stage.peak_bytes for plan in plans for stage in plan.stages) / scale
    layout = {
        "title": {"text": titles[start], "x": 0, "xref": "paper", "y": 0.99, "font": {"size": 15}},
        "xaxis": {
            "domain": _LEFT, "anchor": "y", "title": {"text": f"peak memory ({unit})", "standoff": 8},
            "zeroline": False,
        },
        "yaxis": {"domain": _TOP, "anchor": "x", "title": {"text": f"step time ({second_name})"}, "zeroline": False},
        "xaxis2": {
            "domain": _RIGHT, "anchor": "y2", "showticklabels": False, "showgrid": False, "zeroline": False,
            "title": {"text": "the step, block by block: forward, then backward", "standoff": 8},
        },
        "yaxis2": {
            "domain": _TOP, "anchor": "x2", "title": {"text": f"live bytes ({unit})"}, "range": [0, 1.25 * top],
            "zeroline": False,
        },
        "xaxis3": {
            "domain": [0, 1], "anchor": "y3", "type": "category", "showticklabels": len(blocks) <= 32,
            "title": {"text": f"policy of each block{f' of {escape(inside)}' if inside else ''}", "standoff": 8},
            "tickvals": [escape(block.removeprefix(prefix)) for block in blocks],
            "ticktext": [escape(shorten(block.removeprefix(f"{inside}."), _MAX_TICK)) for block in blocks],
            "automargin": True,
        },
        "annotations": [_peak_label(plans[start], scale)],
        "yaxis3": {"domain": _BOTTOM, "anchor": "x3", "visible": False, "range": [0, 1], "fixedrange": True},
        "barmode": "stack",
        "bargap": 0.08 if len(blocks) <= 100 else 0,
        "hovermode": "closest",
        "legend": {
            "orientation": "h", "x": 0, "y": 0.18, "yanchor": "bottom", "traceorder": "normal", "itemclick": False,
            "itemdoubleclick": False,
        },
        "margin": {"l": 64, "r": 16, "t": 56, "b": 140},
        "sliders": [
            {
                "active": start, "steps": steps, "pad": {"t": 84}, "len": 1,
                "currentvalue": {"prefix": "memory budget: ", "suffix": " and above", "font": {"size": 14}},
                "bgcolor": "#8d95a1", "activebgcolor": ACCENT, "ticklen": 4, "minorticklen": 2, "font": {"size": 11},
            }
        ],
    }  # fmt: skip
    changes = [
        {
            "name": str(at),
            "data": [
                {key: trace[key] for key in (("type", "x", "y") if trace is traces[0] else ("type", "y"))}
                for trace in traces
            ],
            "traces": list(range(1, 1 + len(moving))),
            "layout": {"title": {"text": titles[at]}, "annotations": [_peak_label(plans[at], scale)]},
        }
        for at, traces in enumerate(frames)
    ]
    return {"data": [front, *moving, *legend_entries("", colour_of)], "layout": layout, "frames": changes}


def _peak_label(plan: PlanData, scale: int) -> dict[str, Any]:
    peaks = [stage.peak_bytes for stage in plan.stages]
    at = peaks.index(max(peaks))
    label = peak_label(at, len(peaks) - 1, peaks[at] / scale, plan.predicted_peak_bytes, plan.binding)
    return {**label, "xref": "x2", "yref": "y2"}


def _traces(
    plan: PlanData, colour_of: dict[str, str], blocks: Sequence[str], prefix: str, scale: int, second: float
) -> list[dict[str, Any]]:
    """Returns the traces that the slider changes: the marked plan, its levels, and a row of bars for each policy."""
    mark = {
        "type": "scatter", "mode": "markers", "x": [plan.predicted_peak_bytes / scale],
        "y": [plan.predicted_step_seconds * second], "marker": {"size": 14, "color": ACCENT},
        "showlegend": False, "hoverinfo": "skip",
    }  # fmt: skip
    names = [shorten(escape(stage.name), _MAX_NAME) for stage in plan.stages]
    peaks = [round(stage.peak_bytes / scale, 3) for stage in plan.stages]
    levels = area(list(range(len(peaks))), peaks, LEVEL_AT_START) | {
        "xaxis": "x2", "yaxis": "y2", "line": {"shape": "hvh", "width": 0}, "text": names,
        "hoverinfo": None, "hovertemplate": "%{text}: %{y}<extra></extra>",
    }  # fmt: skip
    option_of = {row.block: row.option for row in plan.rows}
    bars = [
        {
            "type": "bar", "xaxis": "x3", "yaxis": "y3", "name": escape(option), "showlegend": False,
            "x": [escape(block.removeprefix(prefix)) for block in blocks],
            "y": [int(option_of.get(block) == option) for block in blocks],
            "marker": {"color": colour, "line": {"width": 0}}, "hovertemplate": "%{x}: %{fullData.name}<extra></extra>",
        }
        for option, colour in colour_of.items()
    ]  # fmt: skip
    return [mark, levels, *bars]


def _title(plan: PlanData) -> str:
    more = plan.predicted_step_seconds / plan.plain_step_seconds - 1 if plan.plain_step_seconds > 0 else 0.0
    counts = Counter(row.option for row in plan.rows)
    policies = ", ".join(f"{count} x {escape(option)}" for option, count in counts.most_common(4))
    peak, seconds = format_bytes(plan.predicted_peak_bytes), format_seconds(plan.predicted_step_seconds)
    return f"<b>peak {peak}, {seconds} per step</b> ({more:+.0%} time) · {policies}"
