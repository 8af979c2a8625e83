"""The style of all plots: file types, colours, legends and units.

Matplotlib takes half a second to import, so only :func:`figure_of` does.
"""

# ruff: noqa: PLC0415

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from graphckpt.errors import ConfigError
from graphckpt.extras import require
from graphckpt.units import format_bytes, parse_bytes

INK = "#2b2f36"
PAGE = ".html"
_SUFFIXES = (".png", ".svg")
_SETTINGS: dict[str, Any] = {
    "font.size": 9,
    "text.color": INK,
    "text.parse_math": False,  # names may contain dollar signs
    "svg.hashsalt": "graphckpt",  # otherwise each file has different ids
}


def file_of(path: str | Path, *, has_page: bool = False) -> Path:
    """Returns the file that a plot is written to; ``has_page`` also allows ``.html``.

    Raises:
        ConfigError: its suffix is none of ``.png``, ``.svg`` and, with ``has_page``, ``.html``, or its folder does not
            exist.
        MissingPackageError: matplotlib is not installed, or for ``.html`` plotly.
    """
    target = Path(path)
    suffix = target.suffix.lower()
    allowed = (*_SUFFIXES, PAGE) if has_page else _SUFFIXES
    require(*(("report", "plotly") if suffix == PAGE and has_page else ("plot", "matplotlib")))
    if suffix not in allowed:
        names = f"{', '.join(map(repr, allowed[:-1]))} or {allowed[-1]!r}"
        raise ConfigError(f"{target}: expected a file ending in {names}, got {suffix!r} · fix: rename it")
    if not target.parent.is_dir():
        raise ConfigError(f"{target}: expected an existing folder, got {str(target.parent)!r} · fix: create it first")
    return target


@contextmanager
def figure_of(target: Path, *, inches: tuple[float, float] = (11, 4.8)) -> Iterator[Any]:
    """Yields a figure to draw on, and writes it at the end. The same plot gives the same file."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_SETTINGS):
        figure = Figure(figsize=inches, dpi=150, layout="constrained", facecolor="white")
        yield figure
        no_date: dict[str, Any] = {"Date": None} if target.suffix.lower() == ".svg" else {"Software": None}
        figure.savefig(target, metadata=no_date)


def legend(axes: Any, handles: Sequence[Any], title: str, anchor: float, is_in_layout: bool) -> Any:
    """Places a legend to the right of ``axes``, its top at ``anchor`` of their height, and returns it."""
    box = axes.legend(
        handles=handles,
        title=title,
        loc="upper left",
        bbox_to_anchor=(1.01, anchor),
        borderaxespad=0,
        frameon=False,
        fontsize=8.5,
        alignment="left",
        handlelength=1.2,
    )
    box.set_in_layout(is_in_layout)
    return box


def shorten(text: str, length: int) -> str:
    """Leaves out the middle of a text that is too long.

    >>> shorten("encoder.layers.17.attention", 15)
    'encoder…tention'
    """
    half = (length - 1) // 2
    return text if len(text) <= length else f"{text[:half]}…{text[-half:]}"


def mark(axes: Any, at: float, level: float, text: str) -> None:
    """Marks a point, and writes ``text`` beside it, towards the middle of the plot, or above it in the middle."""
    share = at / (axes.get_xlim()[1] or 1)
    side = "left" if share < 0.3 else "right" if share > 0.7 else "center"
    axes.plot([at], [level], marker="o", markersize=4, color=INK, clip_on=False)
    axes.annotate(
        text,
        xy=(at, level),
        xytext=({"left": 10, "right": -10, "center": 0}[side], 10),
        textcoords="offset points",
        ha=side,
        fontweight="bold",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1},
    )


def frame(axes: Any, label: str) -> None:
    """Labels the y axis, and leaves the upper and right border of ``axes`` open."""
    axes.set_ylabel(label, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)


def unit_of(num_bytes: int) -> tuple[int, str]:
    """Returns the bytes of the unit in which ``num_bytes`` is printed, and its name.

    >>> unit_of(3 * 2**20)
    (1048576, 'MiB')
    """
    unit = format_bytes(num_bytes).split()[1]
    return parse_bytes(f"1 {unit}"), unit
