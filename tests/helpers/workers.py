"""A plugin of the process that starts workers, loaded by ``conftest.py``: which tests run where, and failures at once.

All tests of a file run on one worker, so that what they share is computed once: fixtures of a module, and caches. All
files that start several processes do, since one set of ranks fills two cores, and all whose processes are forked from
one that has imported what they need, which takes seconds. (`--dist loadgroup` of pytest-xdist 3.8 does nothing under
pytest 9.2, whose ids of tests cannot be changed.)
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from xdist.scheduler import LoadFileScheduling


class FileScheduling(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "several processes" if _starts_processes(self.config.rootpath / file) else file


@cache
def _starts_processes(file: Path) -> bool:
    text = file.read_text(encoding="utf-8")
    return "multi_process" in text or "subprocess_runner" in text


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> FileScheduling | None:
    return FileScheduling(config, log) if config.getoption("dist") == "loadfile" else None


class ShowFailures:
    """Shows each failure at once: a run that is stopped at a time limit shows no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line(f"\n{report.nodeid} failed in its {report.when}:\n{report.longreprtext}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ShowFailures(config))
