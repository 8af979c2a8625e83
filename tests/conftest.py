"""What all tests share."""

from __future__ import annotations

import gc
import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS is not deterministic; read at its start
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test needs the hub, and one that finds no network asks for 20 seconds

import pytest
import torch

pytest_plugins = ["pytester"]
collect_ignore = ["rules/op_samples.py"]  # its imports take 20 seconds and change settings of the process
collect_ignore_glob = [] if torch.cuda.is_available() else ["gpu/*"]

torch.set_num_threads(1)  # two workers on two cores


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs the tests of several processes first, and all on one worker: one set of ranks fills two cores."""
    items.sort(key=lambda item: item.get_closest_marker("multi_process") is None)
    for item in items:
        if item.get_closest_marker("multi_process") is not None:
            item.add_marker(pytest.mark.xdist_group("ranks"))


@pytest.fixture(autouse=True, scope="module")
def freeze_older_objects() -> None:
    """Spares the collector what was there before a test module: walking that takes longer than most tests."""
    gc.collect()
    gc.freeze()
