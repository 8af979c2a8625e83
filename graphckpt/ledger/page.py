"""Writes interactive plots as one HTML page that needs no network and no server, and the page of a step.

Plotly takes half a second to import, so only a call of :func:`plot` or :func:`write_page` does.
"""

# ruff: noqa: PLC0415

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from graphckpt.errors import GraphckptError
from graphckpt.ledger.groups import KINDS, SAVED, Part, Span, composition, fitting_label, kind_of, tensor_name
from graphckpt.ledger.plot import EDGE, INK, MAX_EDGES, StepLevels, shorten, step_totals
from graphckpt.ledger.record import StepRecord, TensorLife
from graphckpt.ledger.table import Column, prefix_note, step_table
from graphckpt.units import format_bytes

_CONFIG = {
    "displaylogo": False,
    "responsive": True,
    "showSendToCloud": False,
    "modeBarButtonsToRemove": ["toImage", "select2d", "lasso2d"],
}
_STYLE = """
:root { color-scheme: light dark; --ink: #2b2f36; --soft: #667080; --line: #dfe3e8; --paper: #ffffff }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e6ea; --soft: #9aa4b2; --line: #3a414b; --paper: #1b1e24 }
}
body { margin: 0 auto; max-width: 1320px; padding: 24px 28px 48px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif }
h1 { font-size: 24px; margin: 0 }
h2 { font-size: 17px; margin: 32px 0 0 }
p { margin: 4px 0; color: var(--soft); max-width: 90ch }
"""
_TABLE_STYLE = """
.table { overflow-x: auto; margin-top: 8px }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums }
:is(th, td) { padding: 5px 24px 5px 0; text-align: left; border-bottom: 1px solid var(--line); white-space: nowrap }
th { color: var(--soft); font-weight: 600 }
:is(th, td).number { text-align: right }
"""
_NOTEBOOK_STYLE = ".graphckpt { --soft: #8d95a1; --line: #8d95a166; font-size: 14px; line-height: 1.5 }" + re.sub(
    r"(?m)^(?=.)", ".graphckpt ", f"\nimg {{ max-width: min(100%, 960px); margin-top: 8px }}{_TABLE_STYLE}"
)  # not nested: older notebooks do not support that
_THEME = """
const dark = window.matchMedia("(prefers-color-scheme: dark)");
function theme() {
  const style = getComputedStyle(document.documentElement);
  const [ink, line, paper] = ["--ink", "--line", "--paper"].map(name => style.getPropertyValue(name).trim());
  for (const plot of document.querySelectorAll(".js-plotly-plot")) {
    const change = {"font.color": ink, "hoverlabel.bgcolor": paper, "hoverlabel.font.color": ink,
      "hoverlabel.bordercolor": line};
    for (const axis of Object.keys(plot.layout).filter(key => /^[xy]axis/.test(key))) {
      change[axis + ".gridcolor"] = line;
      change[axis + ".linecolor"] = line;
    }
    (plot.layout.annotations || []).forEach((_, at) => { change[`annotations[${at}].bgcolor`] = paper; });
    (plot.layout.sliders || []).forEach((_, at) => { change[`sliders[${at}].bordercolor`] = line; });
    Plotly.relayout(plot, change);
    const inked = plot.data.map((trace, at) => trace.meta === "ink" ? at : -1).filter(at => at >= 0);
    if (inked.length) Plotly.restyle(plot, {"line.color": ink, "marker.color": ink}, inked);
  }
}
theme();
dark.addEventListener("change", theme);
"""

_MAX_POINTS = 1200  # each with its tensor, so that the page stays below 6 MB
_MAX_TEXT = 48  # characters of a line below the pointer
_DARK = ("#6b7686", KINDS[SAVED])  # colours with white text
_BYTES = "bytes, at the peak"
_STRIP_CHARACTERS = 110  # that fit into a strip
_NUM_LINES = 8
_HOVER = "<br>".join(f"%{{customdata[{line}]}}" for line in range(_NUM_LINES)) + "<extra></extra>"

INKED = {"meta": "ink"}
"""For a trace whose lines and markers have the colour of text, on a light page and on a dark one."""


def section(heading: str, text: str, body: str) -> str:
    return f"<section><h2>{escape(heading)}</h2>\n<p>{escape(text)}</p>\n{body}</section>\n"


def table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table as HTML.

    >>> table([Column("block"), Column("runs", is_number=True)], [("h<0>", "1")]).count("&lt;")
    1
    """
    classes = [' class="number"' if column.is_number else "" for column in columns]
    head = "".join(f'<th scope="col"{c}>{escape(col.name)}</th>' for c, col in zip(classes, columns, strict=True))
    lines = (
        "<tr>" + "".join(f"<td{c}>{escape(cell)}</td>" for c, cell in zip(classes, row, strict=True)) + "</tr>\n"
        for row in rows
    )
    return f'<div class="table"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{"".join(lines)}</tbody></table></div>'


def notebook_html(
    renderables: Iterable[RenderableType], draw: Callable[[Path], object], *, alt: str = "memory of the step"
) -> str:
    """Returns the renderables of a printed table as HTML for a notebook, with a picture if ``draw`` can draw one."""
    body = "\n".join(map(_html_of, renderables))
    with TemporaryDirectory() as folder, suppress(GraphckptError):  # nothing to draw, or no matplotlib
        target = Path(folder, "plot.png")
        draw(target)
        data = b64encode(target.read_bytes()).decode("ascii")
        body += f'\n<img alt="{alt}" src="data:image/png;base64,{data}">'
    return f'<div class="graphckpt"><style>{_NOTEBOOK_STYLE}</style>\n{body}</div>'


def _html_of(renderable: RenderableType) -> str:
    if not isinstance(renderable, Table):
        return f"<div>{escape(str(renderable))}</div>"
    rows = list(zip(*(map(str, column.cells) for column in renderable.columns), strict=True))
    if not renderable.show_header or renderable.box is None:  # a line with a mark
        return "".join(f"<div>{escape(' '.join(row))}</div>" for row in rows)
    if renderable.show_footer:
        rows.append(tuple(str(column.footer) for column in renderable.columns))
    columns = [Column(str(column.header), is_number=column.justify == "right") for column in renderable.columns]
    return table(columns, rows)


def plot(figure: Mapping[str, Any], name: str, description: str, height: int) -> str:
    """Returns a plot as HTML; ``figure`` is as plotly takes it, ``description`` is for those who cannot see it."""
    from plotly.graph_objects import Figure

    base = {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "inherit", "size": 13},
        "hoverlabel": {"align": "left", "font": {"size": 13}},
        "margin": {"l": 64, "r": 16, "t": 24, "b": 48},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "#8d95a1", "activecolor": "#4c78a8"},
        "height": height,
    }
    drawing = Figure({**figure, "layout": {**base, **figure["layout"]}})
    drawing.layout.template = None
    html: str = drawing.to_html(
        full_html=False,
        include_plotlyjs=False,
        div_id=name,
        config=_CONFIG,
        default_height=f"{height}px",
        auto_play=False,
    )
    return f'<div role="img" aria-label="{escape(description)}">{html}</div>'


def write_page(target: Path, title: str, lead: str, sections: Iterable[str]) -> Path:
    from plotly.offline import get_plotlyjs

    name = escape(title)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{name}</title>'
    sections = (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}{_TABLE_STYLE}</style>',
        f"<script>{get_plotlyjs()}</script>",
        f"</head><body><main><h1>{name}</h1>\n<p>{escape(lead)}</p>\n",
        *sections,
        f"</main><script>{_THEME}</script></body></html>\n",
    )
    target.write_text("".join(sections), encoding="utf-8")
    return target


def area(xs: Sequence[float], ys: Sequence[float], colour: str) -> dict[str, Any]:
    line = {"width": 0, "shape": "hv"}
    return {
        "type": "scatter", "mode": "lines", "x": xs, "y": ys, "line": line, "fill": "tozeroy", "fillcolor": colour,
        "showlegend": False, "hoverinfo": "skip",
    }  # fmt: skip


def line(xs: Sequence[float], ys: Sequence[float], **settings: Any) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": xs,
        "y": ys,
        "line": {"shape": "hv", "width": 1, **settings},
        **INKED,
    }


def peak_label(x: float, end: float, y: float, num_bytes: int, where: str) -> dict[str, Any]:
    """Returns the label of a peak at ``(x, y)``, on an axis that ends at ``end``; the theme gives it a background."""
    return {
        "x": x, "y": y, "ay": -28, "ax": 0, "arrowhead": 0, "arrowwidth": 1, "borderpad": 2,
        "text": f"<b>peak {format_bytes(num_bytes)}</b><br>{escape(shorten(where, 56))}",
        "xanchor": "left" if x < 0.3 * end else "right" if x > 0.7 * end else "center",
    }  # fmt: skip


def strip(spans: Iterable[Span], axis: str) -> dict[str, Any]:
    """Returns the trace of a row of coloured spans, with their labels where they fit."""
    listed = list(spans)
    room = _STRIP_CHARACTERS / listed[-1].end
    colours = [span.colour for span in listed]
    # Edges of the same colour close the pale gaps that browsers leave between neighbours.
    edges = {"color": EDGE, "width": 0.5} if len(listed) <= MAX_EDGES else {"color": colours, "width": 1}
    return {
        "type": "bar", "x": [span.begin for span in listed], "width": [span.end - span.begin for span in listed],
        "offset": 0, "y": [1] * len(listed), "yaxis": axis,
        "marker": {"color": colours, "line": edges},
        "text": [escape(fitting_label(span, room)) for span in listed], "textposition": "inside", "textangle": 0,
        "insidetextanchor": "middle", "insidetextfont": {"size": 11, "color": INK}, "constraintext": "none",
        "hovertext": [escape(span.label) for span in listed], "hovertemplate": "%{hovertext}<extra></extra>",
        "showlegend": False,
    }  # fmt: skip


def legend_entries(title: str, colour_of: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yields traces that draw nothing but a title and entries in the legend."""
    for label, colour in colour_of.items():
        yield {
            "type": "scatter", "mode": "markers", "x": [None], "y": [None], "name": escape(label), "legendgroup": title,
            "legendgrouptitle": {"text": f"<b>{title}</b>"}, "hoverinfo": "skip",
            "marker": {"color": colour, "symbol": "square", "size": 12},
        }  # fmt: skip


# ---- the page of a step


def write_step(explanation: StepRecord, target: Path) -> Path:
    step = StepLevels(explanation, _MAX_POINTS)
    drawn = f" {len(step.xs):,} of {step.end:,} levels are drawn, the highest of those in between."
    peak = f"peak of {format_bytes(step.peak_bytes)}, {explanation.peak_at}"
    parts = composition(explanation)
    columns, cells, prefix = step_table(explanation)
    rows = table(columns, cells)
    sections = [
        section(
            "Live bytes over the step",
            "Bytes of all tensors by kind, after each allocation and free. Point at a level to see its tensor, drag to "
            f"zoom.{drawn if len(step.xs) < step.end else ''}",
            plot(_levels(step), "levels", f"Live bytes over the step: {peak}", 560),
        ),
        section(
            "Composition of the peak",
            f"{parts.num_bytes:,} bytes are alive at the {peak}. Click a part to enlarge it.",
            plot(_treemap(parts, step.peak), "composition", f"Composition of the {peak}", 460),
        ),
        section(
            "Policies",
            f"Bytes that blocks save for backward, without policies and with them. {prefix_note(prefix)}",
            rows,
        ),
    ]
    title = f"{explanation.title}: memory of a training step"
    return write_page(target, title, " · ".join(step_totals(explanation)), sections)


def _levels(step: StepLevels) -> dict[str, Any]:
    record, end = step.record, step.end
    data = [area([*step.xs, end], [*_rounded(ys), 0], KINDS[kind]) for kind, ys in step.bands.items()]
    data += [strip(step.phases(), "y2"), strip(step.blocks(), "y3")]
    if step.plain:
        xs, ys = [x for x, _ in step.plain], _rounded(record.plain_levels[at] / step.scale for _, at in step.plain)
        plain = line([*xs, end], [*ys, ys[-1]], dash="dot")
        name = "without policies (predicted)"
        data.append({**plain, "name": name, "legendgroup": _BYTES, "hoverinfo": "skip"})
    levels = line(step.xs, _rounded(step.levels), width=0.6)
    data.append({**levels, "showlegend": False, "customdata": list(_hovers(step)), "hovertemplate": _HOVER})
    data += legend_entries(_BYTES, {f"{kind}: {step.at_peak[kind]}": KINDS[kind] for kind in step.bands})
    data += legend_entries("phase", {part.label: part.colour for part in step.phases()})
    data += legend_entries("policy of the block", step.policies())
    mark = peak_label(step.peak_x, end, step.peak_bytes / step.scale, step.peak_bytes, record.peak_at)
    hidden = {"range": [0, 1], "visible": False, "fixedrange": True}
    layout = {
        "xaxis": {
            "title": {"text": f"allocations and frees, in order ({end:,})"}, "range": [0, end], "showgrid": False,
        },
        "yaxis": {
            "title": {"text": f"live bytes of all tensors ({step.unit})"}, "range": [0, step.top], "domain": [0, 0.88],
            "zeroline": False,
        },
        "yaxis2": {**hidden, "domain": [0.955, 1]},
        "yaxis3": {**hidden, "domain": [0.9, 0.945]},
        "barmode": "overlay",
        "hovermode": "x",
        "hoverdistance": -1,
        "dragmode": "zoom",
        "annotations": [mark],
        "legend": {"x": 1.01, "y": 1, "font": {"size": 12}, "itemclick": False, "itemdoubleclick": False},
    }  # fmt: skip
    return {"data": data, "layout": layout}


def _rounded(values: Iterable[float]) -> list[float]:
    return [round(value, 4) for value in values]


def _hovers(step: StepLevels) -> Iterator[list[str]]:
    record = step.record
    born = {life.begin: life for life in record.tensors if not life.is_old}
    freed = {life.end: life for life in record.tensors if life.end is not None}
    for at in step.events:
        event, life = record.timeline[at], born.get(at) or freed.get(at)
        lines = [f"<b>{format_bytes(event.live_bytes)}</b> after event {at:,}"]
        if record.plain_levels:
            lines.append(f"without policies: {format_bytes(record.plain_levels[at])} (predicted)")
        lines.append(f"{event.phase} of {_text(event.block)}" if event.block else event.phase)
        if life is not None:
            verb = "allocates" if at in born else "frees"
            lines.append(f"{verb} <b>{tensor_name(life)}</b>, {format_bytes(life.num_bytes)}")
            lines += _facts(life, at)
        yield _padded(lines)


def _text(name: str) -> str:
    return escape(shorten(name, _MAX_TEXT))


def _padded(lines: list[str]) -> list[str]:
    """Returns the lines of a hover label; they are separate values since ``<br>`` would take 12 bytes in the page."""
    return [*lines, *[""] * (_NUM_LINES - len(lines))]


def _facts(life: TensorLife, at: int) -> Iterator[str]:
    yield f"{kind_of(life, at)}{f', by {_text(life.saved_by)}' if life.saved_by else ''}"
    if life.op:
        yield f"{life.op}{f' in {_text(life.block)}' if life.block else ''}"
    if life.source:
        yield _text(life.source)
    begin = "before the step" if life.is_old else f"at {life.begin:,}"
    yield f"allocated {begin}, " + ("alive after the step" if life.end is None else f"freed at {life.end:,}")


def _treemap(peak: Part, at: int) -> dict[str, Any]:
    columns: dict[str, list[Any]] = {
        name: [] for name in ("ids", "labels", "parents", "values", "customdata", "colours")
    }

    def add(part: Part, parent: str, number: int, colour: str) -> None:
        name = f"{parent}/{number}" if parent else "0"
        share = f"{part.num_bytes / max(1, peak.num_bytes):.1%}".replace("%", " %")
        size = f"{part.num_bytes:,} bytes ({format_bytes(part.num_bytes)}), {share} of the peak"
        facts = [] if part.tensor is None else list(_facts(part.tensor, at))
        lines = _padded([f"<b>{escape(part.name)}</b>", size, *facts])
        label = f"{escape(part.name)}  {format_bytes(part.num_bytes)}"
        for column, value in zip(columns.values(), (name, label, parent, part.num_bytes, lines, colour), strict=True):
            column.append(value)
        for position, child in enumerate(part.parts):
            add(child, name, position, KINDS.get(child.name, colour) if not parent else colour)

    add(peak, "", 0, _DARK[0])
    colours = columns.pop("colours")
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
        "textfont": {"size": 13, "color": ["#ffffff" if c in _DARK else INK for c in colours]},
        "pathbar": {"visible": True, "textfont": {"color": "#ffffff"}},
        "maxdepth": 3,
        "tiling": {"packing": "squarify"},
        "sort": True,
    }
    margin = {"l": 0, "r": 0, "t": 32, "b": 8}
    return {"data": [tree], "layout": {"margin": margin, "uniformtext": {"minsize": 10, "mode": "hide"}}}
