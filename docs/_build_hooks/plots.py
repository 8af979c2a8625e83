"""A picture of a benchmark's JSON: one bar for each variant, with what it keeps and how long it takes."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

plt.switch_backend("svg")
plt.rcParams.update({"svg.hashsalt": "graphckpt", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9})

Bars = list[tuple[str, float]]
BLUE, ORANGE = "#4c78a8", "#f2922f"
MIB = 2**20


def draw(result: Path) -> str | None:
    """Returns an SVG of the result, or `None` if nobody has said how to draw it."""
    if not result.exists():
        return None
    data = json.loads(result.read_text(encoding="utf-8"))
    for prefix, panels_of in PANELS.items():
        if result.stem.startswith(prefix):
            return _bars(panels_of(data["rows"]))
    return None


def _median(value: Any) -> float:
    if isinstance(value, list):
        return float(sorted(value)[len(value) // 2])
    return float(value["median"] if isinstance(value, dict) else value)


def _column(rows: list[dict[str, Any]], key: str, scale: float = 1.0) -> Bars:
    return [(row["variant"], _median(row[key]) / scale) for row in rows if row.get(key) is not None]


def _memory(rows: list[dict[str, Any]]) -> dict[str, Bars]:
    return {
        "kept for backward, MiB": _column(rows, "kept_bytes", MIB),
        "live peak, MiB": _column(rows, "live_peak_bytes", MIB),
    }


def _overhead(rows: list[dict[str, Any]]) -> dict[str, Bars]:
    panels: dict[str, Bars] = {}
    for row in rows:
        title = f"{row['subject']}\ntime as a ratio to {row['against']}"
        panels.setdefault(title, []).append((row["variant"], _median(row["ratio"])))
    return panels


def _partition(rows: list[dict[str, Any]]) -> dict[str, Bars]:
    panels: dict[str, Bars] = {}
    for row in (row for row in rows if "kept_bytes" in row):
        shape = " x ".join(map(str, row["shape"]))
        panels.setdefault(f"kept per rank, MiB, input {shape}", []).append((row["variant"], row["kept_bytes"] / MIB))
    return panels


def _compile(rows: list[dict[str, Any]]) -> dict[str, Bars]:
    return {"step, ms": _column(rows, "ms"), "kept for backward, MiB": _column(rows, "kept MiB")}


def _stores(rows: list[dict[str, Any]]) -> dict[str, Bars]:
    return {"resident after forward, MiB": _column(rows, "rss_after_forward_bytes", MIB)}


def _scale(rows: list[dict[str, Any]]) -> dict[str, Bars]:
    named = [(f"{row['ranks']} {row['way']}: {row['policy']}", row["kept"] / MIB) for row in rows if "kept" in row]
    return {"kept for backward per rank, MiB": named}


PANELS: dict[str, Callable[[list[dict[str, Any]]], dict[str, Bars]]] = {
    "memory": _memory,
    "overhead": _overhead,
    "partition": _partition,
    "compile": _compile,
    "stores": _stores,
    "scale": _scale,
}


def _bars(panels: dict[str, Bars]) -> str:
    filled = {title: bars for title, bars in panels.items() if bars}
    heights = [0.24 * len(bars) + 0.7 for bars in filled.values()]
    figure, axes = plt.subplots(
        len(filled), 1, figsize=(8, sum(heights)), squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    for axis, (title, bars) in zip(axes[:, 0], filled.items(), strict=True):
        names, values = [name for name, _ in bars][::-1], [value for _, value in bars][::-1]
        colours = [BLUE if "graphckpt" in name or name.startswith("Graph") else ORANGE for name in names]
        drawn = axis.barh(range(len(names)), values, color=colours)
        axis.bar_label(drawn, labels=[f" {value:,.3g}" if value < 1000 else f" {value:,.0f}" for value in values])
        axis.set_yticks(range(len(names)), names)
        axis.set_title(title, loc="left", fontsize=9, fontweight="bold")
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        axis.set_xticks([])
        axis.margins(x=0.12)
    figure.tight_layout()
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    plt.close(figure)
    return out.getvalue()
