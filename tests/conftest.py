"""What all tests share."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS is not deterministic; read at its start
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test needs the hub, and one that finds no network asks for 20 seconds

import torch

sys.path.insert(0, str(Path(__file__).parent))  # tests/architectures.py and tests/zoo.py are imported by name

pytest_plugins = ["pytester"]
collect_ignore = ["rules/op_samples.py"]  # its imports take 20 seconds and change settings of the process
collect_ignore_glob = [] if torch.cuda.is_available() else ["gpu/*"]

torch.set_num_threads(1)  # two workers on two cores


def pytest_collection_finish() -> None:
    """Spares the collector what is imported and collected: walking it takes longer than most tests."""
    gc.collect()
    gc.freeze()
