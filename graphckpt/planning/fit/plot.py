"""Draws throughput, peak and policies over the batch size, as PNG or SVG.

Matplotlib takes half a second to import, so only a call of :func:`draw_fit` does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from graphckpt.ledger.plot_style import INK, figure_of, file_of, frame, legend, unit_of
from graphckpt.planning.errors import PlanError
from graphckpt.planning.fit.rows import BatchFit, FitRows
from graphckpt.planning.fit.table import policies_of
from graphckpt.units import format_bytes

_COLOURS = ("#4c78a8", "#58a55c", "#e3bf3a", "#f2922f", "#d9576a", "#a06fb0", "#4fb3b0", "#a5744f")
_DASHES = (0, (4, 3))
_TOP = 1.25  # of the budget: what the plain step would need beyond this is cut off


def draw_fit(fit: FitRows, path: str | Path) -> Path:
    """Draws three panels over the batch size: samples per second, the peak, and the share of blocks of each policy.

    Args:
        fit: the rows.
        path: the file to write, or to replace; its suffix, ``.png`` or ``.svg``, is the format.

    Returns:
        The path written.

    Raises:
        ConfigError: the suffix is another one, or the folder does not exist.
        PlanError: no batch fits.
    """
    target = file_of(path)
    rows = [row for row in fit.rows if row.fits]
    if not rows:
        raise PlanError(f"{target}: expected a batch that fits, got none · fix: a larger budget")
    with figure_of(target, inches=(9, 7.2)) as figure:
        speed, memory, policies = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 2))
        _draw_speed(speed, fit, rows)
        _draw_memory(memory, fit, rows)
        _draw_policies(policies, rows)
        policies.set_xscale("log", base=2)
        policies.set_xticks([row.batch_size for row in rows], [str(row.batch_size) for row in rows])
        policies.minorticks_off()
        policies.tick_params(axis="x", labelrotation=45 if len(rows) > 10 else 0)
        policies.set_xlabel("micro-batch size", color=INK)
        budget = format_bytes(fit.budget_bytes)
        speed.set_title(f"batch sizes in {budget} on {fit.device}", loc="left", fontsize=11.5, fontweight="bold")
        speed.set_title(
            f"largest: {fit.largest.batch_size} · fastest: {fit.fastest.batch_size}", loc="right", fontsize=9
        )
    return target


def _draw_speed(axes: Any, fit: FitRows, rows: list[BatchFit]) -> None:
    line = axes.plot(
        _sizes(rows), [row.samples_per_second for row in rows], color=INK, linewidth=1.2, label="predicted"
    )
    measured = [row for row in rows if row.is_measured]
    points = axes.plot(
        _sizes(measured), [row.samples_per_second for row in measured], "o", color=INK, markersize=4, label="measured"
    )
    fastest = fit.fastest
    best = axes.plot(
        [fastest.batch_size], [fastest.samples_per_second], "o", color=_COLOURS[4], markersize=7, label="fastest"
    )
    axes.set_ylim(0, 1.12 * fastest.samples_per_second)
    frame(axes, "samples per second")
    legend(axes, [*line, *points, *best], "throughput", anchor=1.0, is_in_layout=True)


def _draw_memory(axes: Any, fit: FitRows, rows: list[BatchFit]) -> None:
    scale, unit = unit_of(fit.budget_bytes)
    peak = axes.plot(_sizes(rows), [r.peak_bytes / scale for r in rows], color=_COLOURS[0], marker="o", markersize=3.5)
    plain = axes.plot(_sizes(rows), [r.plain_peak_bytes / scale for r in rows], color=_COLOURS[4], linewidth=1)
    floor = axes.plot(_sizes(rows), [r.floor_bytes / scale for r in rows], color=_COLOURS[1], linewidth=1)
    budget = axes.axhline(fit.budget_bytes / scale, color=INK, linewidth=1, linestyle=_DASHES)
    names = ("under the plan", "with everything kept", "lowest possible", "memory budget")
    handles = [*peak, *plain, *floor, budget]
    for handle, name in zip(handles, names, strict=True):
        handle.set_label(name)
    axes.set_ylim(0, _TOP * fit.budget_bytes / scale)
    frame(axes, f"peak of the step ({unit})")
    legend(axes, handles, "peak", anchor=1.0, is_in_layout=True)


def _draw_policies(axes: Any, rows: list[BatchFit]) -> None:
    """Draws a band for each policy, as wide as its share of the blocks."""
    counts = [policies_of(row.plan) for row in rows if row.plan is not None]
    names = list(dict.fromkeys(name for count in counts for name in count))
    shares = [[count.get(name, 0) / sum(count.values()) for count in counts] for name in names]
    colours = [_COLOURS[number % len(_COLOURS)] for number in range(len(names))]
    bands = axes.stackplot(_sizes(rows), shares, labels=names, colors=colours, alpha=0.8)
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 0.5, 1], ["0", "50 %", "100 %"])
    frame(axes, "share of the blocks")
    legend(axes, bands, "policy", anchor=1.0, is_in_layout=True)


def _sizes(rows: list[BatchFit]) -> list[int]:
    return [row.batch_size for row in rows]
