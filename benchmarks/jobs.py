"""Runs the jobs of a benchmark, each in a process of its own, and writes every row as it comes.

A job prints its rows, a line of JSON each, and at its end an empty one. The rows that it printed count, however its
process ends; one that ends before its job does, or for which no time is left, is a row that says so. So a run that is
cut off still has its rows, in ``<folder>/<name>.jsonl``: a line for what ran where, then one a row.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from processes import run
from report import RESULTS

ERROR_LINES = 20
JOB_SECONDS = 240
"""What one process may take at most, so that one that hangs does not take the others' time."""
_ERROR = re.compile(r"^[\w.]*(Error|Exception|Interrupt|Exit)\b")


def arguments(parser: argparse.ArgumentParser, minutes: float) -> None:
    """Adds what all benchmarks for a GPU take."""
    parser.add_argument("--minutes", type=float, default=minutes, help="what has not begun by then is left out")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of the results")
    parser.add_argument("--dry-run", action="store_true", help="run everything on the CPU in tiny sizes")
    parser.add_argument("--name", help="of the results' files; by default that of the script")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)


def answer(rows: Iterable[dict[str, Any]]) -> None:
    """Prints the rows of a job as they come, and that these were all."""
    for row in itertools.chain(rows, [{}]):
        print(json.dumps(row), flush=True)


class Jobs:
    """Runs jobs of one script until the time is used up."""

    def __init__(self, script: str, options: argparse.Namespace, head: dict[str, Any]) -> None:
        self.script = Path(script)
        self.is_dry = options.dry_run
        self.is_forked = True if self.is_dry and not torch.cuda.is_available() else None
        self.end = perf_counter() + 60 * options.minutes
        self.rows: list[dict[str, Any]] = []
        options.out.mkdir(parents=True, exist_ok=True)
        self.name = options.name or self.script.stem
        self.path = options.out / f"{self.name}.jsonl"
        self.head = head
        self._write()

    def run(self, job: dict[str, Any], most_seconds: float | None = None) -> list[dict[str, Any]]:
        """Runs a job, writes its rows and returns them; it may take ``most_seconds``, by default `JOB_SECONDS`."""
        num_before, is_done = len(self.rows), False

        def read(line: str) -> None:
            nonlocal is_done
            row = row_in(line)
            is_done |= row == {}
            if row:
                self._add(row)

        seconds = min(self.end - perf_counter(), most_seconds or JOB_SECONDS)
        if seconds <= 0:
            self._add({**job, "failed": "no time left"})
        else:
            words = [str(self.script), "--job", json.dumps(job), *["--dry-run"] * self.is_dry]
            done = run(words, seconds, is_forked=self.is_forked, on_line=read)
            if not is_done and (done.code != 0 or len(self.rows) == num_before):
                error = {"exit_status": done.code, "error": done.stderr.splitlines()[-ERROR_LINES:]}
                self._add({**job, "failed": why(done.stderr, done.code), **error})
            elif done.code != 0:
                self.rows[-1]["exit_status"] = done.code
                self._write()
        return self.rows[num_before:]

    def _write(self) -> None:
        self.path.write_text("".join(json.dumps(line) + "\n" for line in ({"header": self.head}, *self.rows)))

    def _add(self, row: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if "failed" in row:
            print(f"{row}", file=sys.stderr, flush=True)
        self.rows.append(row)


def row_in(line: str) -> dict[str, Any] | None:
    """Returns the row that a line is; libraries may print others between them."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def why(stderr: str, code: int | None) -> str:
    """Returns in one line why a process failed; ``code`` is its exit status, ``None`` after its time limit."""
    if code is None:
        return "took longer than its time limit"
    if "OutOfMemoryError" in stderr or "out of memory" in stderr:
        return "out of memory"
    lines = [line for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.match(line)]
    return (errors or lines or [f"no message, exit status {code}"])[-1]


def cell(value: Any, text: Callable[[Any], str]) -> str:
    """Returns a value as ``text`` writes it; one that was not measured is a dash."""
    return "-" if value is None else text(value)
