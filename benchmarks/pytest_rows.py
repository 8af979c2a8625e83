"""A pytest plugin for a run on a GPU: a line of JSON for each test as it ends, and no test that spoils the others.

The lines go to the file that ``GPU_TEST_ROWS`` names. Some errors of CUDA stay with a process: after one, every later
test would fail, so pytest-xdist's worker ends, and another one takes its place. So does one whose test hangs.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import sys
import threading
from collections.abc import Generator
from pathlib import Path

import pytest

TEST_SECONDS = float(os.environ.get("GPU_TEST_SECONDS", "120"))
_STAYS = re.compile(r"CUDA error: (an illegal|device-side|unspecified|misaligned)")
_BROKEN, _HUNG = 70, 71
_CRASH = "???"  # of reports that pytest-xdist makes for a worker that is gone


class Rows:
    """Writes the rows; a test that fails in its set-up or tear-down failed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        if report.when == _CRASH and self._has_failed(report.nodeid):
            return
        row = {"test": report.nodeid, "outcome": report.outcome, "when": report.when, "seconds": report.duration}
        if report.failed:
            row["failed"] = first_line(report)
        self.write(row)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write({"test": report.nodeid, "outcome": "failed", "when": "collect", "failed": first_line(report)})

    def write(self, row: dict[str, object]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def _has_failed(self, test: str) -> bool:
        rows = [json.loads(line) for line in self.path.read_text().splitlines()]
        return any(row.get("test") == test and "failed" in row for row in rows)


class Watchdog:
    """Ends a process whose test hangs, and a worker whose device is broken."""

    def __init__(self, rows: Rows, *, is_worker: bool) -> None:
        self.rows = rows
        self.is_worker = is_worker

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        timer = threading.Timer(TEST_SECONDS, self.end, [item.nodeid])
        timer.daemon = True
        timer.start()
        try:
            return (yield)
        finally:
            timer.cancel()

    def end(self, test: str) -> None:
        """Names the test, and where each thread is."""
        failed = f"took longer than {TEST_SECONDS:g} s"
        self.rows.write({"test": test, "outcome": "failed", "when": "call", "seconds": TEST_SECONDS, "failed": failed})
        with self.rows.path.with_suffix(".stacks").open("a") as file:
            file.write(f"{test}: {failed}\n")
            file.flush()
            faulthandler.dump_traceback(file)
        os._exit(_HUNG)

    @pytest.hookimpl(trylast=True)  # the report has been sent by then
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.is_worker and report.failed and _STAYS.search(report.longreprtext):
            sys.stderr.flush()
            os._exit(_BROKEN)


def first_line(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Returns the first line of an error's message."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr) if crash is None else crash.message
    return (text.strip().splitlines() or ["no message"])[0]


def pytest_configure(config: pytest.Config) -> None:
    """Registers the rows where the reports of all workers arrive, and the watchdog where tests run."""
    rows, is_worker = Rows(Path(os.environ["GPU_TEST_ROWS"])), hasattr(config, "workerinput")
    if not is_worker:
        config.pluginmanager.register(rows)
    if is_worker or not getattr(config.option, "numprocesses", None):
        config.pluginmanager.register(Watchdog(rows, is_worker=is_worker))
