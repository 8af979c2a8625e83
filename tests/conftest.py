"""What all tests share."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS is not deterministic; read at its start
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test needs the hub, and one that finds no network asks for 20 seconds

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # tests/architectures.py and tests/zoo.py are imported by name

torch.set_num_threads(1)  # two workers on two cores


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what the machine cannot run."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):  # not `keywords`, which hold the names of folders too
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish() -> None:
    """Spares the collector what is imported and collected: walking it takes longer than most tests."""
    gc.collect()
    gc.freeze()
