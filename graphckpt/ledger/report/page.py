"""Writes interactive plots as one HTML page that needs no network and no server.

Plotly takes half a second to import, so only a call of :func:`write_page` does.
"""

# ruff: noqa: PLC0415

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

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
.table { overflow-x: auto; margin-top: 8px }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums }
th, td { padding: 5px 24px 5px 0; text-align: left; border-bottom: 1px solid var(--line); white-space: nowrap }
th { color: var(--soft); font-weight: 600 }
td.number, th.number { text-align: right }
"""
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
    (plot.layout.sliders || []).forEach((_, at) => { change[`sliders[${at}].bordercolor`] = line; });
    Plotly.relayout(plot, change);
    const inked = plot.data.map((trace, at) => trace.meta === "ink" ? at : -1).filter(at => at >= 0);
    if (inked.length) Plotly.restyle(plot, {"line.color": ink, "marker.color": ink}, inked);
  }
}
theme();
dark.addEventListener("change", theme);
"""

INKED = {"meta": "ink"}
"""For a trace whose lines and markers have the colour of text, on a light page and on a dark one."""


def section(heading: str, text: str, body: str) -> str:
    """Returns a part of a page as HTML; ``body`` is HTML already."""
    return f"<section><h2>{escape(heading)}</h2>\n<p>{escape(text)}</p>\n{body}</section>\n"


def table(columns: Mapping[str, bool], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table as HTML; ``columns`` are titles, and whether the column has numbers.

    >>> table({"block": False, "runs": True}, [("h<0>", "1")]).count("&lt;"), table({"runs": True}, []).count("number")
    (1, 1)
    """
    classes = [' class="number"' if is_number else "" for is_number in columns.values()]
    head = "".join(f'<th scope="col"{c}>{escape(name)}</th>' for c, name in zip(classes, columns, strict=True))
    lines = (
        "<tr>" + "".join(f"<td{c}>{escape(cell)}</td>" for c, cell in zip(classes, row, strict=True)) + "</tr>\n"
        for row in rows
    )
    return f'<div class="table"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{"".join(lines)}</tbody></table></div>'


def plot(figure: Mapping[str, Any], name: str, description: str, height: int) -> str:
    """Returns a plot as HTML.

    Args:
        figure: ``data``, ``layout`` and perhaps ``frames``, as plotly's ``Figure`` takes them.
        name: the id of its element.
        description: what it shows, for those who cannot see it.
        height: in pixels.
    """
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
    whole = Figure({**figure, "layout": {**base, **figure["layout"]}})
    whole.layout.template = None
    html: str = whole.to_html(
        full_html=False,
        include_plotlyjs=False,
        div_id=name,
        config=_CONFIG,
        default_height=f"{height}px",
        auto_play=False,
    )
    return f'<div role="img" aria-label="{escape(description)}">{html}</div>'


def write_page(target: Path, title: str, lead: str, sections: Iterable[str]) -> Path:
    """Writes a page with plotly's own code in it.

    Args:
        target: the file to write, or to replace.
        title: the title of the page, and its first heading.
        lead: the sentence below it.
        sections: of :func:`section`.

    Returns:
        ``target``.
    """
    from plotly.offline import get_plotlyjs

    name = escape(title)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{name}</title>'
    parts = (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style>\n<script>{get_plotlyjs()}</script>',
        f"</head><body><main><h1>{name}</h1>\n<p>{escape(lead)}</p>\n",
        *sections,
        f"</main><script>{_THEME}</script></body></html>\n",
    )
    target.write_text("".join(parts), encoding="utf-8")
    return target
