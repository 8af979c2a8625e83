"""A plugin of a process that runs tests: fixtures that all tests share, and which files and tests a device needs.

``conftest.py`` loads it. With ``pytest -n`` the first process starts workers and runs no test: it needs no PyTorch.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

with contextlib.suppress(ImportError):  # a machine with a GPU needs none of its tests
    import hypothesis

    # A time limit for each example fails where other processes share the cores.
    hypothesis.settings.register_profile("no time limit", deadline=None)
    hypothesis.settings.load_profile("no time limit")

torch.set_num_threads(1)  # two workers on two cores
# A tenth of the time of all tests was the collector's, which walks what a module has made every 70,000 objects. A test
# that counts on it calls it.
gc.set_threshold(10_000, 20, 20)
gc.disable()  # until all is imported and collected, which it walks again and again
# pytest gives a handler to each logger that does not propagate. This one then writes out all graphs that are compiled.
logging.getLogger("torch.__trace").propagate = True

_HAS_GPU_TESTS = re.compile(r"\bmark\.gpu\b|\bdevice: str\b")
_WARNINGS = ("does not have a deterministic implementation", "non-deterministic algorithm")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files for a device where there is none, and those without a test for it under `-m "gpu and ..."`."""
    if collection_path.parent.name == "gpu" and not torch.cuda.is_available():
        return True
    is_left_out = config.option.markexpr.startswith("gpu") and collection_path.suffix == ".py"
    return (is_left_out and not _HAS_GPU_TESTS.search(collection_path.read_text(encoding="utf-8"))) or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks a test that takes ``device`` as ``gpu`` where there is one, and leaves out what is marked so elsewhere."""
    for item in items:
        if "deterministic" in getattr(item, "fixturenames", ()) and torch.cuda.is_available():
            item.add_marker(pytest.mark.gpu)
            for message in _WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(f"ignore:.*{message}"))
    if not torch.cuda.is_available():
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("gpu")])
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_collection_finish() -> None:
    gc.enable()


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


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No compiled code of another test; and without what takes a quarter of its time beside compiling.

    It collects garbage, and after each graph flushes the caches of the CPU to time the guards for a log, in 40 ms.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(20_000, 50, 100)
    monkeypatch.setattr(torch._dynamo.guards, "profile_guard_manager", lambda *_: 0.0, raising=False)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(run_gc_after_compile=False):
        yield
    torch._dynamo.reset()
    gc.set_threshold(*thresholds)


@pytest.fixture(autouse=True, scope="module")
def freeze_older_objects() -> None:
    """Spares the collector what was there before a test module: walking that takes longer than most tests."""
    _freeze()


@pytest.fixture(autouse=True)
def freeze_imported_objects() -> None:
    """Spares it what an earlier test of the module has imported: a part of Transformers has 100,000 objects."""
    if len(sys.modules) > _num_modules_at_freeze + 20:
        _freeze()


_num_modules_at_freeze = 0


def _freeze() -> None:
    global _num_modules_at_freeze  # noqa: PLW0603 - the collector is one for the process too
    _num_modules_at_freeze = len(sys.modules)
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def not_counted() -> Iterator[None]:
    """A plan asks whether objects are frozen, and to count them, as Python does, walks all of them.

    So does one that looks for wrappers of DDP. Those of a test are younger than what its module has frozen; that frozen
    ones are seen is tested in processes of ranks, without this plugin.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "get_freeze_count", lambda: 1)
        patch.setattr("graphckpt._compat_memory._all_objects", gc.get_objects)
        yield


@pytest.fixture(autouse=True, scope="session")
def seeded_without_stacks() -> Iterator[None]:
    """PyTorch formats the stack of each seed, for each kind of device that is absent: milliseconds within a test."""
    with pytest.MonkeyPatch.context() as patch:
        for device in (torch.cuda, torch.xpu, torch.mtia):
            patch.setattr(device, "traceback", SimpleNamespace(format_stack=list))
        yield


@pytest.fixture(autouse=True, scope="session")
def timed_once() -> Iterator[None]:
    """A step that is planned on the CPU is timed once: tests compare bytes, and no test compares seconds."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr("graphckpt.planning.steps._TIMED_RUNS", 1)
        yield
