"""A pytest plugin that writes a line of JSON for each test as it ends, into the file that ``GPU_TEST_ROWS`` names."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


class Rows:
    """Writes the rows; a test that fails in its set-up or tear-down failed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        row = {"test": report.nodeid, "outcome": report.outcome, "when": report.when, "seconds": report.duration}
        if report.failed:
            row["failed"] = first_line(report)
        self._write(row)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write({"test": report.nodeid, "outcome": "failed", "when": "collect", "failed": first_line(report)})

    def _write(self, row: dict[str, object]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def first_line(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Returns the first line of an error's message."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr) if crash is None else crash.message
    return (text.strip().splitlines() or ["no message"])[0]


def pytest_configure(config: pytest.Config) -> None:
    """Registers the rows where the reports of all workers arrive."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Rows(Path(os.environ["GPU_TEST_ROWS"])))
