"""Writes the plans for all memory budgets as an interactive page, with a slider over the budgets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from graphckpt.ledger.plot_style import shorten, unit_of
from graphckpt.ledger.report.page import INKED, plot, section, table, write_page
from graphckpt.planning.rows import ShownPlan
from graphckpt.planning.show.plot import COLOURS, second_of
from graphckpt.units import format_bytes, format_seconds

_MAX_BYTES = 600_000  # of all positions of the slider, so that the page stays below 6 MB
_BYTES_OF_BAR = 2
_BYTES_OF_LEVEL = 9
_MAX_NAME = 48
_LEFT, _RIGHT = [0, 0.4], [0.48, 1]
_TOP, _BOTTOM = [0.44, 1], [0, 0.16]


def write_plans(chosen: ShownPlan, front: Sequence[ShownPlan], target: Path) -> Path:
    """Writes the page: peak and time of all plans, and of one of them the levels over the step and its policies.

    Args:
        chosen: the plan at which the slider begins.
        front: the Pareto-optimal plans; without any, the slider has one position.
        target: the file to write, or to replace.

    Returns:
        ``target``.
    """
    plans, start = _positions(chosen, front)
    summary = chosen.summary
    text = (
        "Move the slider to see the fastest plan for another memory budget: its peak and time, its live bytes over the "
        "step, and the policy of each block."
    )
    peaks = {plan.summary.predicted_peak_bytes for plan in plans}
    if len(peaks) < len({plan.summary.predicted_peak_bytes for plan in (chosen, *front)}):
        text += f" {len(plans)} of {len(front)} plans are shown."
    label = f"Predicted step time over peak, for {len(plans)} plans"
    lead = (
        f"memory budget {format_bytes(summary.budget_bytes)} · predicted peak "
        f"{format_bytes(summary.predicted_peak_bytes)} of {format_bytes(summary.plain_peak_bytes)} without policies · "
        f"{format_seconds(summary.predicted_step_seconds)} per step on {summary.device}"
    )
    columns = {"block": False, "policy": False, "extra time": True, "offloaded": True}
    rows = (
        (
            row.block, row.option, format_seconds(row.extra_seconds) if row.extra_seconds else "-",
            format_bytes(row.moved_bytes) if row.moved_bytes else "-",
        )
        for row in chosen.rows
    )  # fmt: skip
    sections = [
        section("Plans for all budgets", text, plot(_figure(plans, start), "plans", label, 720)),
        section(
            f"Policies for {format_bytes(summary.budget_bytes)}", "The plan that was chosen.", table(columns, rows)
        ),
    ]
    return write_page(target, "Activation checkpointing plan", lead, sections)


def _positions(chosen: ShownPlan, front: Sequence[ShownPlan]) -> tuple[list[ShownPlan], int]:
    """Returns the plans of the slider, lowest peak first, and the position of ``chosen``."""
    summary = chosen.summary
    others = [plan for plan in front if plan.summary.predicted_peak_bytes != summary.predicted_peak_bytes]
    num_options = len({row.option for plan in (chosen, *front) for row in plan.rows})
    size = _BYTES_OF_BAR * num_options * len(chosen.rows) + _BYTES_OF_LEVEL * len(chosen.stages)
    every = -(-len(others) * size // _MAX_BYTES) or 1
    plans = sorted([chosen, *others[::every]], key=lambda plan: plan.summary.predicted_peak_bytes)
    return plans, next(at for at, plan in enumerate(plans) if plan is chosen)


def _figure(plans: Sequence[ShownPlan], start: int) -> dict[str, Any]:
    scale, unit = unit_of(max(plan.summary.plain_peak_bytes for plan in plans))
    second, second_name = second_of(max(plan.summary.predicted_step_seconds for plan in plans))
    options = list(dict.fromkeys(row.option for plan in plans for row in plan.rows))
    blocks = [row.block for row in plans[start].rows]
    xs = [plan.summary.predicted_peak_bytes / scale for plan in plans]
    ys = [plan.summary.predicted_step_seconds * second for plan in plans]
    line = {
        "type": "scatter", "mode": "lines+markers", "x": xs, "y": ys, "line": {"shape": "hv", "width": 1},
        "marker": {"size": 5}, "showlegend": False, "text": [_title(plan) for plan in plans],
        "hovertemplate": "%{text}<extra></extra>", **INKED,
    }  # fmt: skip
    fixed = [line]
    frames = [_traces(plan, options, blocks, scale, second) for plan in plans]
    moving = frames[start]
    numbers = list(range(len(fixed), len(fixed) + len(moving)))
    steps = [
        {
            "label": format_bytes(plan.summary.predicted_peak_bytes),
            "method": "animate",
            "args": [
                [str(at)],
                {"mode": "immediate", "frame": {"duration": 0, "redraw": True}, "transition": {"duration": 0}},
            ],
        }
        for at, plan in enumerate(plans)
    ]
    top = max(stage.peak_bytes for plan in plans for stage in plan.stages) / scale
    layout = {
        "title": {"text": _title(plans[start]), "x": 0, "xref": "paper", "y": 0.99, "font": {"size": 15}},
        "xaxis": {
            "domain": _LEFT, "anchor": "y", "title": {"text": f"predicted peak ({unit})", "standoff": 8},
            "zeroline": False,
        },
        "yaxis": {
            "domain": _TOP, "anchor": "x", "title": {"text": f"seconds of a step ({second_name})"}, "zeroline": False,
        },
        "xaxis2": {
            "domain": _RIGHT, "anchor": "y2", "showticklabels": False, "showgrid": False, "zeroline": False,
            "title": {"text": "the step, block by block: forward, then backward", "standoff": 8},
        },
        "yaxis2": {
            "domain": _TOP, "anchor": "x2", "title": {"text": f"live bytes ({unit})"}, "range": [0, 1.08 * top],
            "zeroline": False,
        },
        "xaxis3": {
            "domain": [0, 1], "anchor": "y3", "type": "category", "showticklabels": len(blocks) <= 32,
            "title": {"text": "policy of each block", "standoff": 8},
        },
        "yaxis3": {"domain": _BOTTOM, "anchor": "x3", "visible": False, "range": [0, 1], "fixedrange": True},
        "barmode": "stack",
        "bargap": 0.08 if len(blocks) <= 100 else 0,
        "hovermode": "closest",
        "legend": {"orientation": "h", "x": 0, "y": 0.18, "yanchor": "bottom", "traceorder": "normal"},
        "margin": {"l": 64, "r": 16, "t": 56, "b": 140},
        "sliders": [
            {
                "active": start, "steps": steps, "pad": {"t": 84}, "len": 1,
                "currentvalue": {"prefix": "memory budget from ", "font": {"size": 14}},
                "bgcolor": "#8d95a1", "activebgcolor": COLOURS[3],
                "ticklen": 4, "minorticklen": 2, "font": {"size": 11},
            }
        ],
    }  # fmt: skip
    changes = [
        {
            "name": str(at),
            "data": [
                {"type": mark["type"], "x": mark["x"], "y": mark["y"]},
                *({"type": trace["type"], "y": trace["y"]} for trace in others),
            ],
            "traces": numbers,
            "layout": {"title": {"text": _title(plan)}},
        }
        for at, (plan, (mark, *others)) in enumerate(zip(plans, frames, strict=True))
    ]
    return {"data": [*fixed, *moving], "layout": layout, "frames": changes}


def _traces(
    plan: ShownPlan, options: Sequence[str], blocks: Sequence[str], scale: int, second: float
) -> list[dict[str, Any]]:
    """Returns what the slider changes: the marked plan, its levels, and a row of bars for each policy."""
    summary = plan.summary
    mark = {
        "type": "scatter", "mode": "markers", "x": [summary.predicted_peak_bytes / scale],
        "y": [summary.predicted_step_seconds * second], "marker": {"size": 14, "color": COLOURS[3]},
        "showlegend": False, "hoverinfo": "skip",
    }  # fmt: skip
    levels = {
        "type": "scatter", "mode": "lines", "xaxis": "x2", "yaxis": "y2", "showlegend": False,
        "x": list(range(len(plan.stages))), "y": [round(stage.peak_bytes / scale, 3) for stage in plan.stages],
        "line": {"shape": "hvh", "width": 1.5, "color": COLOURS[0]}, "fill": "tozeroy",
        "fillcolor": "rgba(76, 120, 168, 0.25)",
        "text": [shorten(escape(stage.name), _MAX_NAME) for stage in plan.stages],
        "hovertemplate": "%{text}: %{y}<extra></extra>",
    }  # fmt: skip
    option_of = {row.block: row.option for row in plan.rows}
    bars = [
        {
            "type": "bar", "xaxis": "x3", "yaxis": "y3", "name": escape(option), "x": list(map(escape, blocks)),
            "y": [int(option_of.get(block) == option) for block in blocks],
            "marker": {"color": COLOURS[number % len(COLOURS)], "line": {"width": 0}},
            "hovertemplate": "%{x}: %{fullData.name}<extra></extra>",
        }
        for number, option in enumerate(options)
    ]  # fmt: skip
    return [mark, levels, *bars]


def _title(plan: ShownPlan) -> str:
    """Returns peak, time and policies of a plan in one line."""
    summary = plan.summary
    more = summary.predicted_step_seconds / summary.plain_step_seconds - 1 if summary.plain_step_seconds > 0 else 0.0
    counts = Counter(row.option for row in plan.rows)
    policies = ", ".join(f"{count} x {escape(option)}" for option, count in counts.most_common(4))
    peak, seconds = format_bytes(summary.predicted_peak_bytes), format_seconds(summary.predicted_step_seconds)
    return f"<b>peak {peak}, {seconds} per step</b> ({more:+.0%} time) · {policies}"
