"""What a run came to, and how it is shown."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import final

from rich.table import Table

from graphckpt.train.run_folder import CONFIG, LOG, METRICS, PICTURE
from graphckpt.train.snapshots import BEST, FINAL, LAST

_FILES = {
    "weights, config, tokenizer": FINAL,
    "best at the evaluation": BEST,
    "to go on from, with --resume": LAST,
    "memory of a step": PICTURE,
    "metrics": METRICS,
    "log": LOG,
    "config": CONFIG,
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run came to."""

    iterations: int
    is_stopped: bool
    """Whether the user stopped it."""
    files: dict[str, Path]
    """What the run wrote, by what it is."""

    def table(self) -> Table:
        """Returns the files, to be shown."""
        how = "stopped" if self.is_stopped else "done"
        title = f"{how} after {self.iterations} iterations"
        table = Table(title=title, title_justify="left", show_header=False, box=None)
        for what, path in self.files.items():
            table.add_row(what, str(path))
        return table


def written(folder: Path) -> dict[str, Path]:
    """Returns what is in the output folder of a run, by what it is."""
    return {what: folder / name for what, name in _FILES.items() if (folder / name).exists()}
