"""Fixtures of all tests: :mod:`helpers.runner` where tests run, :mod:`helpers.workers` where workers are started."""

from __future__ import annotations

import importlib
import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS is not deterministic; read at its start
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test needs the hub, and one that finds no network asks for 20 seconds

import pytest

pytest_plugins = ["pytester"]
collect_ignore = ["rules/op_samples.py"]  # its imports take 20 seconds and change settings of the process


def pytest_configure(config: pytest.Config) -> None:
    """Loads one of the two. With ``-n`` the first process runs no test, and is spared the import of PyTorch."""
    starts_workers = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    name = "helpers.workers" if starts_workers else "helpers.runner"
    config.pluginmanager.register(importlib.import_module(name), name)
