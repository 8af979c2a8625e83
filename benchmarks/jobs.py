"""Runs the jobs of a benchmark, each in a process of its own, and writes every row as it comes.

A job that fails, or for which no time is left, is a row that says so. So a run that is cut off still has its rows, in
``<folder>/<name>.jsonl``: a line for what ran where, then one a row.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from processes import run
from report import RESULTS

JOB_SECONDS = 240
"""What one process may take at most, so that one that hangs does not take the others' time."""
_ERROR = re.compile(r"^[\w.]*(Error|Exception|Interrupt|Exit)\b")


def arguments(parser: argparse.ArgumentParser, minutes: float) -> None:
    """Adds what all benchmarks for a GPU take."""
    parser.add_argument("--minutes", type=float, default=minutes, help="what has not begun by then is left out")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of the results")
    parser.add_argument("--dry-run", action="store_true", help="run everything on the CPU in tiny sizes")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)


class Jobs:
    """Runs jobs of one script until the time is used up."""

    def __init__(self, script: str, options: argparse.Namespace, head: dict[str, Any]) -> None:
        self.script = Path(script)
        self.is_dry = options.dry_run
        self.end = perf_counter() + 60 * options.minutes
        self.rows: list[dict[str, Any]] = []
        options.out.mkdir(parents=True, exist_ok=True)
        self.path = options.out / f"{self.script.stem}.jsonl"
        self.path.write_text(json.dumps({"header": head}) + "\n")

    def run(self, job: dict[str, Any]) -> list[dict[str, Any]]:
        """Runs a job, writes its rows and returns them."""
        seconds = min(self.end - perf_counter(), JOB_SECONDS)
        result = self._result(job, seconds) if seconds > 0 else {**job, "failed": "no time left"}
        rows = result if isinstance(result, list) else [result]
        with self.path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        for row in rows:
            if "failed" in row:
                print(f"{job}: {row['failed']}", file=sys.stderr, flush=True)
        self.rows += rows
        return rows

    def _result(self, job: dict[str, Any], seconds: float) -> Any:
        words = [str(self.script), "--job", json.dumps(job), *["--dry-run"] * self.is_dry]
        done = run(words, seconds, is_forked=self.is_dry)
        if done.code == 0:
            return json.loads(done.stdout.splitlines()[-1])
        return {**job, "failed": why(done.stderr, done.code)}


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
