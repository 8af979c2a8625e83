"""What all tests share."""

from __future__ import annotations

import contextlib
import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS is not deterministic; read at its start
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test needs the hub, and one that finds no network asks for 20 seconds

import pytest
import torch

with contextlib.suppress(ImportError):  # a machine with a GPU needs none of its tests
    import hypothesis

    # A time limit for each example fails where other processes share the cores.
    hypothesis.settings.register_profile("no time limit", deadline=None)
    hypothesis.settings.load_profile("no time limit")

pytest_plugins = ["pytester"]
collect_ignore = ["rules/op_samples.py"]  # its imports take 20 seconds and change settings of the process
collect_ignore_glob = [] if torch.cuda.is_available() else ["gpu/*"]

torch.set_num_threads(1)  # two workers on two cores

_HAS_GPU_TESTS = re.compile(r"\bmark\.gpu\b|\bdevice: str\b")
_WARNINGS = ("does not have a deterministic implementation", "non-deterministic algorithm")


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
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(ShowFailures(config))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Spares `-m "gpu and ..."` the imports of files that have no test for a device."""
    is_left_out = config.option.markexpr.startswith("gpu") and collection_path.suffix == ".py"
    return (is_left_out and not _HAS_GPU_TESTS.search(collection_path.read_text(encoding="utf-8"))) or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Runs the tests of several processes first, and all on one worker: one set of ranks fills two cores.

    A test that takes ``device`` is marked ``gpu`` where there is one, and what is marked so is left out elsewhere.
    """
    for item in items:
        if "deterministic" in getattr(item, "fixturenames", ()) and torch.cuda.is_available():
            item.add_marker(pytest.mark.gpu)
            for message in _WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(f"ignore:.*{message}"))
    if not torch.cuda.is_available():
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("gpu")])
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    items.sort(key=lambda item: item.get_closest_marker("multi_process") is None)
    for item in items:
        if item.get_closest_marker("multi_process") is not None:
            item.add_marker(pytest.mark.xdist_group("ranks"))


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Bitwise comparisons on CUDA need kernels without atomics."""
    torch.use_deterministic_algorithms(mode=torch.cuda.is_available(), warn_only=True)
    yield
    torch.use_deterministic_algorithms(mode=False)


@pytest.fixture
def device(deterministic: None) -> str:
    """``"cuda"`` where there is a CUDA device, a real or a simulated one, else ``"cpu"``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True, scope="module")
def freeze_older_objects() -> None:
    """Spares the collector what was there before a test module: walking that takes longer than most tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def timed_once() -> Iterator[None]:
    """A step that is planned on the CPU is timed once: tests compare bytes, and no test compares seconds."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr("graphckpt.planning.steps._TIMED_RUNS", 1)
        yield
