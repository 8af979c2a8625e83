"""A plugin that runs tests on the simulated CUDA device: `-p simulated_cuda.plugin`, with `tests` on the path.

It is named on the command line, as PyTorch must not be imported before the device is there. Without a compiler nothing
runs; where ``GRAPHCKPT_REQUIRE_SIMULATED_CUDA`` is set, that is an error.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator

import pytest

from simulated_cuda.bindings import install_on_import
from simulated_cuda.build import NoCompiler
from simulated_cuda.library import call, load, use_schedule

_NOT_HERE = "not on the simulated device"
_IS_REQUIRED = os.environ.get("GRAPHCKPT_REQUIRE_SIMULATED_CUDA", "") not in ("", "0")
_missing: str | None = None
try:
    load()
except NoCompiler as error:
    _missing = str(error)
else:
    install_on_import()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--schedule",
        default=os.environ.get("GRAPHCKPT_SCHEDULE", "lazy"),
        help="how late the simulated CUDA device runs its streams: lazy, eager or random:SEED (default: lazy)",
    )


def pytest_configure(config: pytest.Config) -> None:
    if _missing is not None:
        pytest.exit(f"nothing is run: {_missing}", returncode=int(_IS_REQUIRED))
    use_schedule(config.getoption("--schedule"))


def pytest_report_header(config: pytest.Config) -> str:
    return f"simulated CUDA device, schedule: {config.getoption('--schedule')}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        marker = item.get_closest_marker("real_gpu")
        if marker is None and config.getoption("--schedule") != "lazy":
            marker = item.get_closest_marker("one_schedule")
        if marker is not None:
            item.add_marker(pytest.mark.skip(reason=f"{_NOT_HERE}: {marker.args[0]}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Makes other skips errors, where the device is required: a fixture that finds no pinned memory hides a fault."""
    report = yield
    is_expected = (
        not isinstance(report.longrepr, tuple) or _NOT_HERE in report.longrepr[2] or "NCCL" in report.longrepr[2]
    )
    if _IS_REQUIRED and report.skipped and not hasattr(report, "wasxfail") and not is_expected:
        report.outcome = "failed"
    return report


@pytest.fixture(autouse=True)
def settle(request: pytest.FixtureRequest) -> Iterator[None]:
    """Begins each test with the same schedule, and lets none leave a capture or an error of the device behind."""
    use_schedule(request.config.getoption("--schedule"))
    yield
    was_capturing = load().captures_abort()
    call("synchronize_all")
    assert not was_capturing, "the test has left a capture under way"
