"""How many functions of the package a forward of a recomputed block calls."""

from __future__ import annotations

import sys
from contextvars import Context
from itertools import pairwise
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn

import graphckpt
from graphckpt import thread_state
from graphckpt.engine import frame
from graphckpt.engine.saved import joined_blocks

PACKAGE = Path(graphckpt.__file__).parent


def functions_of_a_forward() -> list[tuple[str, str]]:
    """Returns file and name of each function in the order of calls, of the forward of several that calls the fewest."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    x = torch.ones(2, 8, requires_grad=True)
    functions: list[tuple[str, str]] = []

    def log(frame: FrameType, event: str, _: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(PACKAGE):
            functions.append((str(file), frame.f_code.co_qualname))

    with graphckpt.apply(model, {"": True}):
        for _ in range(3):  # values are compared in these
            model(x).sum().backward()
        calls = []
        for _ in range(5):  # the collector may free objects of other steps in one of them
            functions.clear()
            sys.setprofile(log)
            try:
                output = model(x)  # freeing its graph calls functions too
            finally:
                sys.setprofile(None)
            assert output.requires_grad
            calls.append(functions.copy())
    return min(calls, key=lambda each: len(set(each)))


def test_a_forward_of_a_recomputed_block_calls_few_functions_of_few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader who follows it reads each of them, and turns from file to file."""
    monkeypatch.setattr(joined_blocks, "may_exist", False)  # other tests may have joined blocks
    monkeypatch.setattr(thread_state, "_calls", {})  # or have run blocks in other threads, or left one
    monkeypatch.setattr(frame, "num_other_threads", lambda: 0)
    functions = Context().run(functions_of_a_forward)  # a context variable that a test runner sets is copied
    assert len(set(functions)) <= 40
    looks_for_devices = torch.accelerator.current_accelerator() is not None  # a build for CUDA
    assert sum(one[0] != other[0] for one, other in pairwise(functions)) <= (20 if looks_for_devices else 18)
