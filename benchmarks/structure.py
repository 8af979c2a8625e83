"""Counts what a reader of the package must hold in mind: lines and modules, and the files that one journey passes.

    python benchmarks/structure.py

A journey is counted with ``sys.setprofile``: the calls of functions of the package and the bodies of its classes, the
files in which they are defined, and how often a call is in another file than the call before it. Modules that are only
imported do not count. The blocks have three modules and are in their third call; the training run is ``graphckpt train
--config-file quickstart.py --fast-dev-run``.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from report import header, table, write
from torch import nn

import graphckpt

PACKAGE = Path(graphckpt.__file__).parent


class Journey:
    """The calls into the package, in this thread, while it is recorded."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self._prefix = f"{PACKAGE}/"

    def profile(self, frame: Any, event: str, _: Any) -> None:
        """Called by Python for every call and return."""
        code = frame.f_code
        if event == "call" and code.co_name != "<module>" and code.co_filename.startswith(self._prefix):
            self.files.append(code.co_filename.removeprefix(self._prefix))

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Counts what runs inside."""
        sys.setprofile(self.profile)
        try:
            yield
        finally:
            sys.setprofile(None)

    def row(self, name: str) -> dict[str, Any]:
        """Returns calls, files and changes of file."""
        changes = sum(one != other for one, other in zip(self.files, self.files[1:], strict=False))
        return {"journey": name, "calls": len(self.files), "files": len(set(self.files)), "changes of file": changes}


def block_journeys() -> list[dict[str, Any]]:
    """Counts forward and backward of a block of three modules under several policies."""
    rows = []
    for name, policy in {
        "full": {"activation_checkpointing": True},
        "full, disk": {"activation_checkpointing": True, "offload": "disk", "min_elements": 1},
        "selective": {"activation_checkpointing": "selective"},
    }.items():
        model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), nn.Linear(8, 1))
        with graphckpt.apply(model, {"0": policy}):
            for call in range(3):
                forward, backward = Journey(), Journey()
                with forward.recorded():
                    loss = model(torch.randn(2, 8)).sum()
                with backward.recorded():
                    loss.backward()
                del loss, call
        rows += [forward.row(f"`{name}` block, forward"), backward.row(f"`{name}` block, backward")]
    return rows


def plan_journey() -> dict[str, Any]:
    """Counts a plan of six blocks."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)) for _ in range(6)])
    x = torch.randn(64, 32)
    journey = Journey()
    with journey.recorded():
        graphckpt.plan(model, lambda: model(x).sum().backward(), memory_budget=0.85)
    return journey.row("`graphckpt.plan` of six blocks")


def train_journey() -> dict[str, Any]:
    """Counts a training run of a few steps, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["train", "--config-file", "quickstart.py", "--fast-dev-run", f"train.output_dir={folder}/run"]
        done = subprocess.run(
            [sys.executable, __file__, "--train", f"{folder}/files", *words], check=True, capture_output=True, text=True
        )
        del done
        journey = Journey()
        journey.files = Path(f"{folder}/files").read_text(encoding="utf-8").split()
    return journey.row("`graphckpt train --fast-dev-run`")


def _train(output: str, words: list[str]) -> None:
    from graphckpt.__main__ import run  # noqa: PLC0415 - its imports are a part of the journey

    journey = Journey()
    sys.argv = ["graphckpt", *words]
    try:
        with journey.recorded():
            run()
    finally:
        Path(output).write_text("\n".join(journey.files), encoding="utf-8")


def kinds_of_lines(text: str) -> Counter[str]:
    """Counts lines of docstrings, comments alone, blank lines, and code."""
    lines = text.splitlines()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = {t.start[0] for t in tokens if t.type == tokenize.COMMENT and t.line.lstrip().startswith("#")}
    blank = {number for number, line in enumerate(lines, 1) if not line.strip()} - docstrings
    counts = Counter(docstring=len(docstrings), comment=len(comments), blank=len(blank), lines=len(lines))
    counts["code"] = counts["lines"] - counts["docstring"] - counts["comment"] - counts["blank"]
    return counts


def packages() -> list[dict[str, Any]]:
    """Counts lines and modules of each package; modules at the top are one row."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for path in sorted(PACKAGE.rglob("*.py")):
        folder = path.relative_to(PACKAGE).parts[:-1]
        for name in ("graphckpt", folder[0] if folder else "(top)"):
            counts[name] += kinds_of_lines(path.read_text(encoding="utf-8")) + Counter(modules=1)
    tests = [path.read_text(encoding="utf-8") for path in sorted((PACKAGE.parent / "tests").rglob("*.py"))]
    for text in tests:
        counts["tests"] += kinds_of_lines(text) + Counter(modules=1)
    return [{"package": name, **count} for name, count in sorted(counts.items(), key=lambda item: -item[1]["lines"])]


def main() -> None:
    """Counts all and writes the results."""
    if sys.argv[1:2] == ["--train"]:
        _train(sys.argv[2], sys.argv[3:])
        return
    torch.manual_seed(0)
    head = header()
    sizes = packages()
    journeys = [*block_journeys(), plan_journey(), train_journey()]
    columns = ["package", "modules", "lines", "code", "docstring", "comment", "blank"]
    text = "\n".join(
        [
            "## Lines and modules (`wc -l`)",
            "",
            table(columns, [[str(row.get(column, 0)) for column in columns] for row in sizes]),
            "",
            "## Journeys",
            "",
            table(list(journeys[0]), [[str(value) for value in row.values()] for row in journeys]),
        ]
    )
    write("structure", head, [*sizes, *journeys], text)


if __name__ == "__main__":
    main()
