"""Writes the plans for all memory budgets as an interactive page, with a slider over the budgets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from graphckpt.ledger.groups import common_prefix, rule_colour, sorted_rules
from graphckpt.ledger.page import area, legend_entries, line, plot, section, table, write_page
from graphckpt.ledger.plot import ACCENT, shorten, unit_of
from graphckpt.ledger.table import Column, prefix_note
from graphckpt.planning.rows import ShownPlan
from graphckpt.planning.show.plot import LEVEL_AT_START, second_of
from graphckpt.planning.show.table import plan_cells
from graphckpt.units import format_bytes, format_seconds

_MAX_BYTES = 600_000  # of all positions of the slider, so that the page stays below 6 MB
_BYTES_OF_BAR = 2
_BYTES_OF_LEVEL = 9
_MAX_NAME = 48
_LEFT, _RIGHT = [0, 0.4], [0.48, 1]
_TOP, _BOTTOM = [0.44, 1], [0, 0.16]
_AT_ONCE = {"mode": "immediate", "frame": {"duration": 0, "redraw": True}, "transition": {"duration": 0}}


def write_plans(chosen: ShownPlan, front: Sequence[ShownPlan], target: Path) -> Path:
    """Writes peak and time of the Pareto-optimal plans, and of one, at first ``chosen``, its levels and policies."""
    plans, start = _positions(chosen, front)
    summary = chosen.summary
    text = (
        "Move the slider to see the fastest plan for another memory budget: its peak and time, its live bytes over the "
        "step, and the policy of each block."
    )
    peaks = {plan.summary.predicted_peak_bytes for plan in plans}
    if len(peaks) < len({plan.summary.predicted_peak_bytes for plan in (chosen, *front)}):
        text += f" {len(plans)} of {len(front)} plans are shown."
    prefix = common_prefix(row.block for row in chosen.rows)
    label = f"Predicted step time over peak, for {len(plans)} plans"
    lead = (
        f"memory budget {format_bytes(summary.budget_bytes)} · predicted peak "
        f"{format_bytes(summary.predicted_peak_bytes)} of {format_bytes(summary.plain_peak_bytes)} without policies · "
        f"{format_seconds(summary.predicted_step_seconds)} per step on {summary.device}"
    )
    columns = [
        Column("block"),
        Column("policy"),
        *(Column(name, True) for name in ("blocks", "extra time", "offloaded")),
    ]
    rows = table(columns, plan_cells(chosen.rows, prefix, has_moves=True))
    sections = [
        section("Plans for all budgets", text, plot(_figure(plans, start, prefix), "plans", label, 720)),
        section(
            f"Policies for {format_bytes(summary.budget_bytes)}",
            f"The plan that was chosen. {prefix_note(prefix)}",
            rows,
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


def _figure(plans: Sequence[ShownPlan], start: int, prefix: str) -> dict[str, Any]:
    scale, unit = unit_of(max(plan.summary.plain_peak_bytes for plan in plans))
    second, second_name = second_of(max(plan.summary.predicted_step_seconds for plan in plans))
    colour_of = {option: rule_colour(option) for option in sorted_rules(r.option for p in plans for r in p.rows)}
    blocks = [row.block for row in plans[start].rows]
    xs = [plan.summary.predicted_peak_bytes / scale for plan in plans]
    ys = [plan.summary.predicted_step_seconds * second for plan in plans]
    titles = [_title(plan) for plan in plans]
    front = line(xs, ys) | {
        "mode": "lines+markers",
        "marker": {"size": 5},
        "text": [_title(plan) for plan in plans],
        "showlegend": False,
    }
    frames = [_traces(plan, colour_of, blocks, prefix, scale, second) for plan in plans]
    moving = frames[start]
    steps = [
        {"label": format_bytes(plan.summary.predicted_peak_bytes), "method": "animate", "args": [[str(at)], _AT_ONCE]}
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
            "layout": {"title": {"text": _title(plan)}},
        }
        for at, (plan, traces) in enumerate(zip(plans, frames, strict=True))
    ]
    return {"data": [front, *moving, *legend_entries("", colour_of)], "layout": layout, "frames": changes}


def _traces(
    plan: ShownPlan, colour_of: dict[str, str], blocks: Sequence[str], prefix: str, scale: int, second: float
) -> list[dict[str, Any]]:
    """Returns what the slider changes: the marked plan, its levels, and a row of bars for each policy."""
    summary = plan.summary
    mark = {
        "type": "scatter", "mode": "markers", "x": [summary.predicted_peak_bytes / scale],
        "y": [summary.predicted_step_seconds * second], "marker": {"size": 14, "color": ACCENT},
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


def _title(plan: ShownPlan) -> str:
    """Returns peak, time and policies of a plan in one line."""
    summary = plan.summary
    more = summary.predicted_step_seconds / summary.plain_step_seconds - 1 if summary.plain_step_seconds > 0 else 0.0
    counts = Counter(row.option for row in plan.rows)
    policies = ", ".join(f"{count} x {escape(option)}" for option, count in counts.most_common(4))
    peak, seconds = format_bytes(summary.predicted_peak_bytes), format_seconds(summary.predicted_step_seconds)
    return f"<b>peak {peak}, {seconds} per step</b> ({more:+.0%} time) · {policies}"
