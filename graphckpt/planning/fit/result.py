"""The batch sizes that fit into a memory budget, with the plan of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

from graphckpt.ledger.table_style import html_of, show, text_of
from graphckpt.planning.fit.rows import FitRows
from graphckpt.planning.fit.table import parts_of
from graphckpt.units import format_bytes


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Fit(FitRows):
    """What :func:`graphckpt.fit` found: the best plan of each micro-batch size, with its peak and throughput."""

    def __str__(self) -> str:
        """Returns the table, in plain text."""
        return text_of(parts_of(self)).rstrip("\n")

    def __repr__(self) -> str:
        """Returns one line."""
        sizes = [row.batch_size for row in self.rows if row.fits]
        largest = f"largest batch {sizes[-1]}" if sizes else "no batch fits"
        return f"<Fit of {len(self.rows)} batch sizes: {largest} in {format_bytes(self.budget_bytes)} on {self.device}>"

    def _repr_html_(self) -> str:
        return html_of(parts_of(self))

    def explain(self, *, display: bool = True) -> Self:
        """Prints the table unless ``display`` is false; returns the fit, which prints the same."""
        if display:
            show(parts_of(self))
        return self

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values."""
        plain = self.largest_without_recompute
        fits = any(row.fits for row in self.rows)
        found: dict[str, Any] = {
            "device": self.device,
            "budget_bytes": self.budget_bytes,
            "largest": self.largest.batch_size if fits else None,
            "largest_without_recompute": None if plain is None else plain.batch_size,
            "fastest": self.fastest.batch_size if fits else None,
            "rows": [row.to_dict() for row in self.rows],
        }
        if self.global_batch is not None:
            found["global_batch"] = {"size": self.global_batch, **self.at_global_batch(self.global_batch).to_dict()}
        return found

    def plot(self, path: str | Path) -> Path:
        """Draws throughput, peak and policies over the batch size; ``path`` ends in ``.png`` or ``.svg``."""
        from graphckpt.planning.fit.plot import draw_fit  # noqa: PLC0415 - loads matplotlib

        return draw_fit(self, path)
