"""A pytest plugin that runs every backward in a fresh context, as CUDA's thread for it does; not a test itself.

On a CPU, backward runs in the thread that calls it and sees its context variables. On CUDA, autograd has a thread of
its own, where each of them has its default. Code that reads one of the caller's fails there, and under

    PYTHONPATH=tests pytest -p helpers.fresh_context
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

import pytest
import torch

NAME = "_engine_run_backward"


def in_fresh_context(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function whose every call has a context of its own, without any variable set.

    A backward within a backward keeps the context: the device's thread runs it itself.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() != -1:
            return function(*args, **kwargs)
        return contextvars.Context().run(function, *args, **kwargs)

    return call


def pytest_configure(config: pytest.Config) -> None:
    """Replaces what Tensor.backward, autograd.grad and autograd.backward call, before a test module can import it."""
    for holder in (torch.autograd, torch.autograd.graph):
        setattr(holder, NAME, in_fresh_context(getattr(holder, NAME)))


def pytest_report_header() -> str:
    return "every backward runs in a fresh context"
