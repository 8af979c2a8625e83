"""The result of ``explain()``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from graphckpt.errors import ConfigError
from graphckpt.ledger.page import notebook_html, write_step
from graphckpt.ledger.plot import PAGE, draw_step, file_of
from graphckpt.ledger.record import StepRecord
from graphckpt.ledger.table import renderables_of, text_of
from graphckpt.units import format_bytes

_LONG = ("timeline", "plain_levels", "tensors")


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Explanation(StepRecord):
    """The rows, totals and warnings of a recorded step.

    ``print(explanation)`` shows the table, a notebook shows it in colour, :meth:`plot` draws the live bytes, and
    :meth:`to_dict` returns plain values, such as for ``json.dumps`` or, of ``["rows"]``, for a data frame.
    """

    def __str__(self) -> str:
        """Returns the table as plain text."""
        return text_of(renderables_of(self)).rstrip("\n")

    def __repr__(self) -> str:
        """Returns one line."""
        change = f"{format_bytes(self.bytes_before)} -> {format_bytes(self.bytes_after)}"
        return f"<Explanation of {self.title}: {len(self.rows)} rows, kept for backward {change}>"

    def _repr_html_(self) -> str:
        return notebook_html(renderables_of(self), self.plot)

    def to_dict(self) -> dict[str, Any]:
        """Returns the rows, totals and warnings as plain values, without the timeline and the tensors."""
        values = {name: value for name, value in self.__dict__.items() if name not in _LONG}
        rows = [asdict(row) for row in self.rows]
        lists = {"warnings": list(self.warnings), "legend": dict(self.legend)}
        return {**values, **lists, "rows": rows, "peak_at": self.peak_at, "bytes_saved": self.bytes_saved}

    def plot(self, path: str | Path) -> Path:
        """Draws the live bytes over the step, by kind; ``path`` ends in ``.png``, ``.svg`` or ``.html``.

        Raises:
            ConfigError: the suffix is another, the folder does not exist, or the step was not measured.
        """
        target = file_of(path, has_page=True)
        if not self.timeline:
            what = f"the record of {self.title!r} has none"
            raise ConfigError(f"{target}: expected a timeline, {what} · fix: `with handle.measure(): step()`")
        return write_step(self, target) if target.suffix.lower() == PAGE else draw_step(self, target)
