"""What all tests share: :mod:`helpers.runner`, in each process that runs tests."""

from __future__ import annotations

import importlib
import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS is not deterministic; read at its start
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test needs the hub, and one that finds no network asks for 20 seconds

import pytest

pytest_plugins = ["pytester"]
collect_ignore = ["rules/op_samples.py"]  # its imports take 20 seconds and change settings of the process


def pytest_configure(config: pytest.Config) -> None:
    """Loads what runs tests. With ``-n`` the first process starts workers alone, and is spared seconds of imports."""
    if config.getoption("dist", "no") == "no" or hasattr(config, "workerinput"):
        config.pluginmanager.register(importlib.import_module("helpers.runner"), "helpers.runner")
