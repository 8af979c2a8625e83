"""Plots: one style for all of them, and the live bytes of a step by kind as PNG or SVG.

Matplotlib takes half a second to import, so only :func:`figure_of` does.
"""

# ruff: noqa: PLC0415

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from graphckpt.errors import ConfigError
from graphckpt.extras import require
from graphckpt.ledger.groups import (
    GREY,
    KINDS,
    OUTSIDE,
    PHASES,
    Span,
    block_spans,
    fitting_label,
    levels_by_kind,
    peak_index,
    rule_and_place,
    rule_colour,
    sorted_rules,
    spans,
    thin,
)
from graphckpt.ledger.record import StepRecord
from graphckpt.ledger.table import offloaded_bytes
from graphckpt.units import format_bytes, parse_bytes

Curve: TypeAlias = Sequence[tuple[float, float]]
INK = "#2b2f36"
ACCENT = "#f2922f"
PAGE = ".html"
EDGE = "#2b2f3655"
"""Between two parts of a strip."""
MAX_EDGES = 150  # parts; the edges of more would hide them
DASHES = (0, (4, 3))
_SUFFIXES = (".png", ".svg")
_SETTINGS: dict[str, Any] = {
    "font.size": 9,
    "text.color": INK,
    "text.parse_math": False,  # names may contain dollar signs
    "svg.hashsalt": "graphckpt",  # otherwise each file has different ids
}
_MAX_STEPS = 3000  # points on a curve; a plot is 1650 pixels wide
_STRIP_CHARACTERS = 120  # that fit into a strip
_PEAK_LABEL = 56
_TITLE = 30
_LABEL_GAP, _LABEL_HEIGHT, _LABEL_WIDTH = 0.02, 0.13, 0.5  # of the label of a peak: shares of the axes
_MAX_RULES = 8  # in a legend


def file_of(path: str | Path, *, has_page: bool = False) -> Path:
    """Returns the file that a plot is written to; ``has_page`` also allows ``.html``."""
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
def figure_of(target: Path, *, inches: tuple[float, float] = (11, 5.2)) -> Iterator[Any]:
    """Yields a figure to draw on, and writes it at the end. The same plot gives the same file."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_SETTINGS):
        figure = Figure(figsize=inches, dpi=150, layout="constrained", facecolor="white")
        yield figure
        no_date: dict[str, Any] = {"Date": None} if target.suffix.lower() == ".svg" else {"Software": None}
        figure.savefig(target, metadata=no_date)


def patches(colour_of: Mapping[str, str]) -> list[Any]:
    from matplotlib.patches import Patch

    return [Patch(facecolor=colour, label=label) for label, colour in colour_of.items()]


def legend(owner: Any, entries: Mapping[str, Sequence[Any]]) -> None:
    """Places a legend to the right of a figure or of axes: titles, and the entries below each."""
    from matplotlib.patches import Patch

    handles = [h for title, group in entries.items() if group for h in (Patch(alpha=0, label=title), *group)]
    where: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "borderaxespad": 0}
    if not hasattr(owner, "spines"):
        where = {"loc": "outside right upper"}
    box = owner.legend(handles=handles, frameon=False, fontsize=8.5, alignment="left", handlelength=1.2, **where)
    for text in box.get_texts():
        if text.get_text() in entries:
            text.set_fontweight("bold")


def title_of(axes: Any, title: str, remark: str = "") -> None:
    axes.set_title(title, loc="left", fontsize=11.5, fontweight="bold", pad=8)
    axes.set_title(remark, loc="right", fontsize=9, pad=8)


def strip(axes: Any, spans: Iterable[Span], label: str) -> None:
    """Draws a row of coloured spans, with their labels where they fit; ``axes`` have the limits of the x axis."""
    listed = list(spans)
    room = _STRIP_CHARACTERS / axes.get_xlim()[1]
    # Without smoothing, since neighbours that share a pixel would leave a pale line between them.
    bars = [(span.begin, span.end - span.begin) for span in listed]
    edges = {"edgecolor": EDGE, "linewidth": 0.5 if len(bars) <= MAX_EDGES else 0}
    axes.broken_barh(bars, (0, 1), facecolors=[span.colour for span in listed], antialiased=False, **edges)
    for span in listed:
        if name := fitting_label(span, room):
            axes.text((span.begin + span.end) / 2, 0.46, name, ha="center", va="center", fontsize=7, color=INK)
    axes.set_ylim(0, 1)
    axes.set_axis_off()
    axes.annotate(label, (0, 0.46), (-4, 0), "axes fraction", "offset points", ha="right", va="center", fontsize=8)


def shorten(text: str, length: int) -> str:
    """Leaves out the middle of a text that is too long.

    >>> shorten("encoder.layers.17.attention", 15)
    'encoder…tention'
    """
    half = (length - 1) // 2
    return text if len(text) <= length else f"{text[:half]}…{text[-half:]}"


def mark(axes: Any, at: float, level: float, text: str, lines: Iterable[Curve] = ()) -> None:
    """Marks a point, with a text above it that covers none of ``lines``: steps, as pairs of an x and the level from it.

    The limits of the axes are set before, with the room of a label above everything else.
    """
    end, top = axes.get_xlim()[1] or 1, axes.get_ylim()[1]
    side = "left" if at < 0.3 * end else "right" if at > 0.7 * end else "center"
    before, behind = {"left": (0.0, _LABEL_WIDTH), "right": (_LABEL_WIDTH, 0.0)}.get(side, (_LABEL_WIDTH / 2,) * 2)
    # The label is as wide as half of the axes: from the lines that cross that range, the lowest first, each that would
    # run through the label moves it up on top of itself.
    spans = (_levels_between(line, at - before * end, at + behind * end) for line in lines)
    foot = level
    for lowest, highest in sorted(spans):
        if lowest <= foot + _LABEL_HEIGHT * top and highest >= foot:
            foot = highest
    axes.plot([at], [level], marker="o", markersize=4, color=INK, clip_on=False)
    if foot > level:
        axes.vlines(at, level, foot + _LABEL_GAP * top, color=INK, linewidth=0.6, linestyle=":")
    axes.annotate(
        text,
        xy=(at, foot + _LABEL_GAP * top),
        ha=side,
        va="bottom",
        fontweight="bold",
    )


def _levels_between(line: Curve, begin: float, end: float) -> tuple[float, float]:
    """Returns the lowest and the highest level of a line of steps between two places.

    >>> _levels_between([(0, 1.0), (10, 3.0), (20, 2.0)], 12, 15)
    (3.0, 3.0)
    """
    ends = [x for x, _ in line[1:]] + [float("inf")]
    levels = [level for (x, level), until in zip(line, ends, strict=True) if x <= end and until >= begin]
    return min(levels), max(levels)


def frame(axes: Any, label: str) -> None:
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


# ---- a step


class StepLevels:
    """The curves and bands of a picture of a step, of at most ``limit`` points: the highest level between two."""

    def __init__(self, record: StepRecord, limit: int) -> None:
        self.record = record
        timeline = record.timeline
        self.end = len(timeline)
        levels = [event.live_bytes for event in timeline]
        points = thin(levels, limit)
        self.xs = [x for x, _ in points]
        self.events = [event for _, event in points]
        """The index of the event that is drawn at each point."""
        self.scale, self.unit = unit_of(max(levels))
        self.levels = [levels[at] / self.scale for at in self.events]
        self.peak = peak_index(record)
        self.peak_x, self.peak_bytes = next(x for x, at in points if at == self.peak), levels[self.peak]
        self.top = 1.18 * max(1, self.peak_bytes, *record.plain_levels) / self.scale
        kinds = {kind: at for kind, at in levels_by_kind(record).items() if any(at)}
        self.colour_of = {kind: KINDS[kind] for kind in kinds}
        self.at_peak = {kind: format_bytes(levels[self.peak]) for kind, levels in kinds.items()}
        self.bands: dict[str, list[float]] = {}
        """The sum of each kind and those below it, at each point, the highest first: drawn in this order, each covers
        what is not its own, without a gap between two of them."""
        # Weights of 4, saved 2 and transient 1 at a point are bands of 4, 6 and 7.
        sums = [0] * len(points)
        for kind, bytes_at in kinds.items():
            sums = [total + bytes_at[at] for total, at in zip(sums, self.events, strict=True)]
            self.bands = {kind: [total / self.scale for total in sums], **self.bands}
        has_plain = bool(record.plain_levels) and max(record.plain_levels) != record.peak_bytes
        self.plain = thin(record.plain_levels, limit) if has_plain else []

    def phases(self) -> Iterator[Span]:
        phases = [self.record.timeline[at].phase for at in self.events]
        for phase, begin, end in spans(phases, self.xs, self.end):
            yield Span(phase, PHASES.get(phase, GREY), begin, end)

    def blocks(self) -> Iterator[Span]:
        policies = {row.block: rule_and_place(row) for row in self.record.rows}
        return block_spans([self.record.timeline[at].block for at in self.events], policies, self.xs, self.end)

    def policies(self) -> dict[str, str]:
        options = sorted_rules(map(rule_and_place, self.record.rows))
        colours = {option: rule_colour(option) for option in options[:_MAX_RULES]}
        return colours | {OUTSIDE: GREY} if any(not event.block for event in self.record.timeline) else colours


def step_totals(record: StepRecord) -> list[str]:
    plain, peak = record.plain_peak_bytes, record.peak_bytes
    texts = [_change("kept for backward", record.bytes_before, record.bytes_after)]
    if plain is not None and peak is not None:
        texts.append(_change("peak", plain, peak, " (predicted)" if plain != peak else ""))
    if offloaded := offloaded_bytes(record):
        texts.append(f"offloaded: {offloaded}")
    return texts


def _change(what: str, before: int, after: int, remark: str = "") -> str:
    texts = [format_bytes(before), format_bytes(after)]
    return f"{what}: {texts[0]}{remark} → {texts[1]}" if texts[0] != texts[1] else f"{what}: {texts[0]}"


def draw_step(explanation: StepRecord, target: Path) -> Path:
    step = StepLevels(explanation, _MAX_STEPS)
    with figure_of(target) as figure:
        phases, blocks, axes = figure.subplots(3, 1, sharex=True, height_ratios=(1, 1, 20))
        axes.set_xlim(0, step.end)
        strip(phases, step.phases(), "phase")
        strip(blocks, step.blocks(), "block")
        for kind, levels in step.bands.items():
            xs, ys = [*step.xs, step.end], [*levels, levels[-1]]
            axes.fill_between(xs, ys, step="post", color=KINDS[kind], linewidth=0)
        lines, curves = [], []
        if step.plain:
            xs = [x for x, _ in step.plain]
            ys = [explanation.plain_levels[at] / step.scale for _, at in step.plain]
            curves = [list(zip(xs, ys, strict=True))]
            label = "without policies (predicted)"
            lines = axes.plot(
                [*xs, step.end], [*ys, ys[-1]], drawstyle="steps-post", color=INK, linewidth=0.8, label=label
            )
        axes.set_ylim(0, step.top)
        frame(axes, f"live bytes of all tensors ({step.unit})")
        axes.set_xlabel(f"allocations and frees, in order ({step.end:,})", color=INK)
        text = f"peak {format_bytes(step.peak_bytes)}\n{shorten(explanation.peak_at, _PEAK_LABEL)}"
        mark(axes, step.peak_x, step.peak_bytes / step.scale, text, curves)
        title_of(phases, shorten(explanation.title, _TITLE), "   ".join(step_totals(explanation)))
        kinds = {f"{kind}: {step.at_peak[kind]}": KINDS[kind] for kind in step.bands}
        phase_colours = {part.label: part.colour for part in step.phases()}
        entries = {"bytes, at the peak": [*lines, *patches(kinds)], "phase": patches(phase_colours)}
        legend(figure, {**entries, "policy of the block": patches(step.policies())})
    return target
