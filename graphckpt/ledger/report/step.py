"""Writes the live bytes of one step as an interactive page. Knows the record only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from typing import Any

from graphckpt.ledger.group_rows import group_rows
from graphckpt.ledger.legend import legend_names, shades
from graphckpt.ledger.levels import FLOOR, Steps, phase_colour, plain_steps, policies_of, runs, thin, totals
from graphckpt.ledger.plot_style import shorten, unit_of
from graphckpt.ledger.record import Row, StepRecord, TensorLife
from graphckpt.ledger.report.composition import KINDS, Part, composition, kind_of, peak_index, tensor_name
from graphckpt.ledger.report.page import INKED, plot, section, table, write_page
from graphckpt.ledger.table import rule_and_place
from graphckpt.units import format_bytes

_LABEL = 40
_KIND_COLOURS = ("#8d95a1", "#58a55c", "#a06fb0", "#4fb3b0", "#4c78a8", "#f2a65a", "#d9576a")
_MAX_POINTS = 1200  # each with its tensor, so that the page stays below 6 MB
_MAX_TEXT = 48  # characters of a line below the pointer
_NUM_LINES = 8
_HOVER = "<br>".join(f"%{{customdata[{line}]}}" for line in range(_NUM_LINES)) + "<extra></extra>"
_TOP = [0, 0.93]
_STRIP = [0.955, 1]


def write_report(explanation: StepRecord, target: Path) -> Path:
    """Writes the page: live bytes over the step, the composition of the peak, and the policies.

    Args:
        explanation: a record with a timeline.
        target: the file to write, or to replace.

    Returns:
        ``target``.
    """
    end = len(explanation.timeline)
    steps = thin(explanation.timeline, _MAX_POINTS)
    drawn = (
        "" if len(steps) == end else f" {len(steps):,} of {end:,} levels are drawn, the highest of those in between."
    )
    peak = f"peak {format_bytes(explanation.peak_bytes or 0)}, {explanation.peak_at}"
    whole = composition(explanation)
    sections = [
        section(
            "Live bytes over the step",
            f"One level for each allocation and free, in the colour of the running block. Drag to zoom.{drawn}",
            plot(_levels(explanation, steps), "levels", f"Live bytes over the step: {peak}", 520),
        ),
        section(
            "Composition of the peak",
            f"{whole.num_bytes:,} bytes are alive at the {peak}. Click a part to enlarge it.",
            plot(_treemap(whole, explanation), "composition", f"Composition of the {peak}", 460),
        ),
        section(
            "Policies", "Bytes that blocks save for backward, without policies and with them.", _policies(explanation)
        ),
    ]
    return write_page(
        target, f"{explanation.title}: memory of a training step", totals(explanation).replace("   ", " · "), sections
    )


def _levels(explanation: StepRecord, steps: Steps) -> dict[str, Any]:
    timeline, end = explanation.timeline, len(explanation.timeline)
    scale, unit = unit_of(max(event.live_bytes for event in timeline))
    names = legend_names(event.block for _, event in steps)
    colours = shades(names)
    policies = policies_of(explanation)
    middle = {name: [block for block in names if names[block] == name] for name in names.values()}
    labels = {}
    for name, blocks in middle.items():
        policy = ", ".join(dict.fromkeys(policies[block] for block in blocks if block in policies))
        labels[name] = escape(shorten(f"{name} · {policy}" if policy else name, _LABEL))
    areas: dict[str, tuple[list[Any], list[Any]]] = {name: ([], []) for name in middle}
    for block, stop, run in runs(steps, end, "block"):
        _extend(areas[names[block]], run, stop, scale)
    data = [
        _area(xs, ys, labels[name], _css(colours[middle[name][len(middle[name]) // 2]]), legend="legend")
        for name, (xs, ys) in areas.items()
    ]
    strips: dict[str, tuple[list[Any], list[Any]]] = {}
    for phase, stop, run in runs(steps, end, "phase"):
        xs, ys = strips.setdefault(phase, ([], []))
        xs += [run[0][0], stop]
        ys += [1, 0]
    data += [
        _area(xs, ys, phase, phase_colour(phase), legend="legend2", yaxis="y2") for phase, (xs, ys) in strips.items()
    ]
    static = explanation.static_bytes
    if static:
        label = f"weights, optimizer ({format_bytes(static)})"
        data.append(_area([0, end], [static / scale] * 2, label, FLOOR, legend="legend3"))
    plain = plain_steps(explanation)
    if plain:
        xs, ys = [at for at, _ in plain], [round(event.live_bytes / scale, 4) for _, event in plain]
        data.append(
            {
                **_line([*xs, end], [*ys, ys[-1]], dash="dot"),
                "name": "without policies (predicted)",
                "legend": "legend3",
                "hoverinfo": "skip",
            }
        )
    data.append(
        {
            **_line([at for at, _ in steps], [round(event.live_bytes / scale, 4) for _, event in steps]),
            "name": "live bytes",
            "showlegend": False,
            "customdata": list(_hovers(explanation, steps)),
            "hovertemplate": _HOVER,
        }
    )
    at, peak = max(steps, key=lambda step: step[1].live_bytes)
    mark = {
        "x": at, "y": peak.live_bytes / scale, "ay": -28, "ax": 0, "arrowhead": 0, "arrowwidth": 1,
        "text": f"<b>peak {format_bytes(peak.live_bytes)}</b><br>{escape(shorten(explanation.peak_at, 56))}",
        "xanchor": "left" if at < 0.3 * end else "right" if at > 0.7 * end else "center",
    }  # fmt: skip
    top = max([peak.live_bytes, *explanation.plain_levels]) / scale
    entries = {"x": 1.01, "xanchor": "left", "yanchor": "top", "font": {"size": 12}, "itemwidth": 30}
    layout = {
        "xaxis": {
            "title": {"text": f"allocations and frees, in order ({end:,})"}, "range": [0, end], "showgrid": False,
        },
        "yaxis": {
            "title": {"text": f"live bytes of all tensors ({unit})"}, "range": [0, 1.18 * top], "domain": _TOP,
            "zeroline": False,
        },
        "yaxis2": {"domain": _STRIP, "range": [0, 1], "visible": False, "fixedrange": True},
        "hovermode": "x",
        "hoverdistance": -1,
        "dragmode": "zoom",
        "annotations": [mark],
        "legend": {**entries, "title": {"text": "<b>running block · policy</b>"}, "y": 0.52},
        "legend2": {**entries, "title": {"text": "<b>phase</b>"}, "y": 1},
        "legend3": {**entries, "title": {"text": "<b>memory</b>"}, "y": 0.72},
    }  # fmt: skip
    return {"data": data, "layout": layout}


def _extend(area: tuple[list[Any], list[Any]], run: Steps, stop: int, scale: int) -> None:
    """Adds the levels of a run to an area, which is 0 from there to the next run: a gap would be filled."""
    xs, ys = area
    xs += [*(at for at, _ in run), stop]
    ys += [*(round(event.live_bytes / scale, 4) for _, event in run), 0]


def _area(xs: list[Any], ys: list[Any], name: str, colour: str, **where: str) -> dict[str, Any]:
    line = {"width": 0, "shape": "hv"}
    fill = {"fill": "tozeroy", "fillcolor": colour, "marker": {"color": colour}}
    return {
        "type": "scatter",
        "mode": "lines",
        "x": xs,
        "y": ys,
        "name": name,
        "line": line,
        "hoverinfo": "skip",
        **fill,
        **where,
    }


def _line(xs: list[Any], ys: list[Any], dash: str = "solid") -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": xs,
        "y": ys,
        "line": {"width": 0.8, "shape": "hv", "dash": dash},
        **INKED,
    }


def _css(colour: tuple[float, float, float]) -> str:
    return f"rgb({', '.join(str(round(255 * value)) for value in colour)})"


def _hovers(explanation: StepRecord, steps: Steps) -> Iterator[list[str]]:
    """Yields for each step which tensor was allocated or freed there."""
    timeline, plain = explanation.timeline, explanation.plain_levels
    born = {life.begin: life for life in explanation.tensors if not life.is_old}
    freed = {life.end: life for life in explanation.tensors if life.end is not None}
    ends = [at for at, _ in steps[1:]] + [len(timeline)]
    for (first, event), stop in zip(steps, ends, strict=True):
        at = timeline.index(event, first, stop)
        life = born.get(at) or freed.get(at)
        lines = [f"<b>{format_bytes(event.live_bytes)}</b> after event {at:,}"]
        if plain:
            lines.append(f"without policies: {format_bytes(plain[at])} (predicted)")
        lines.append(f"{event.phase} of {_text(event.block)}" if event.block else event.phase)
        if life is not None:
            lines.append(
                f"{'allocates' if at in born else 'frees'} <b>{tensor_name(life)}</b>, {format_bytes(life.num_bytes)}"
            )
            lines += _facts(life, at)
        yield _padded(lines)


def _text(name: str) -> str:
    return escape(shorten(name, _MAX_TEXT))


def _padded(lines: list[str]) -> list[str]:
    """Returns the lines of a hover label; they are separate values since ``<br>`` would take 12 bytes in the page."""
    return [*lines, *[""] * (_NUM_LINES - len(lines))]


def _facts(life: TensorLife, at: int) -> Iterator[str]:
    """Yields what is known of a tensor, in lines of HTML."""
    yield f"{kind_of(life, at)}{f', saved by {_text(life.saved_by)}' if life.saved_by else ''}"
    if life.op:
        yield f"{life.op}{f' in {_text(life.block)}' if life.block else ''}"
    if life.source:
        yield _text(life.source)
    begin = "before the step" if life.is_old else f"at {life.begin:,}"
    yield f"allocated {begin}, " + ("alive after the step" if life.end is None else f"freed at {life.end:,}")


def _treemap(whole: Part, explanation: StepRecord) -> dict[str, Any]:
    at = peak_index(explanation)
    colour_of = dict(zip(KINDS, _KIND_COLOURS, strict=True))
    columns: dict[str, list[Any]] = {
        name: [] for name in ("ids", "labels", "parents", "values", "customdata", "colours")
    }

    def add(part: Part, parent: str, number: int, colour: str) -> None:
        name = f"{parent}/{number}" if parent else "0"
        share = f"{part.num_bytes / max(1, whole.num_bytes):.1%}".replace("%", " %")
        size = f"{part.num_bytes:,} bytes ({format_bytes(part.num_bytes)}), {share} of the peak"
        facts = [] if part.tensor is None else list(_facts(part.tensor, at))
        lines = _padded([f"<b>{escape(part.name)}</b>", size, *facts])
        row = (name, escape(part.name), parent, part.num_bytes, lines, colour)
        for column, value in zip(columns.values(), row, strict=True):
            column.append(value)
        for position, child in enumerate(part.parts):
            add(child, name, position, colour_of.get(child.name, colour) if not parent else colour)

    add(whole, "", 0, "#6b7686")
    colours = columns.pop("colours")
    labels = columns["labels"]
    labels[:] = [f"{label}  {format_bytes(value)}" for label, value in zip(labels, columns["values"], strict=True)]
    tree = {
        "type": "treemap",
        **columns,
        "branchvalues": "total",
        "marker": {
            "colors": colours,
            "line": {"width": 1, "color": "rgba(255,255,255,0.6)"},
            "pad": {"t": 22, "l": 3, "r": 3, "b": 3},
        },
        "hovertemplate": _HOVER,
        "textinfo": "label",
        "textfont": {"size": 13, "color": "#ffffff"},
        "pathbar": {"visible": True, "textfont": {"color": "#ffffff"}},
        "maxdepth": 3,
        "tiling": {"packing": "squarify"},
        "sort": True,
    }
    return {
        "data": [tree],
        "layout": {"margin": {"l": 0, "r": 0, "t": 32, "b": 8}, "uniformtext": {"minsize": 10, "mode": "hide"}},
    }


def _policies(explanation: StepRecord) -> str:
    columns = {"block": False, "policy": False, "without policies": True, "on the device": True, "moved": True,
               "runs": True, "recomputations": True, "note": False}  # fmt: skip
    return table(columns, _cells(group_rows(explanation.rows)))


def _cells(rows: Iterable[Row]) -> Iterator[tuple[str, ...]]:
    for row in rows:
        moved = row.bytes_host + row.bytes_disk
        yield (
            row.block, rule_and_place(row), format_bytes(row.bytes_before), format_bytes(row.bytes_after),
            format_bytes(moved) if moved else "-", str(row.runs), str(row.reruns), row.note,
        )  # fmt: skip
