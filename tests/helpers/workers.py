"""A plugin of the process that starts workers, which ``conftest.py`` loads: which tests run on which worker.

All tests of a file run on one worker, so that what they share is computed once: fixtures of a module, and caches. All
files that start several processes do, since one set of ranks fills two cores. (`--dist loadgroup` of pytest-xdist 3.8
does nothing under pytest 9.2, whose ids of tests cannot be changed.)
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling


class FileScheduling(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        has_ranks = "multi_process" in (self.config.rootpath / file).read_text(encoding="utf-8")
        return "several processes" if has_ranks else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling | None:
    return FileScheduling(config, log) if config.getoption("dist") == "loadfile" else None
