"""Fixtures of the tests of the ledger."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
from torch.profiler import ProfilerActivity, profile


def _allocator_bytes(run: Callable[[], object]) -> int:
    gc.collect()
    gc.disable()  # tensors of an earlier test, freed by a collection in between, would be subtracted
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as prof:
            kept = run()
    finally:
        gc.enable()
    taken = sum(e.nbytes() for e in prof.profiler.kineto_results.events() if e.name() == "[memory]")
    del kept
    return taken


@pytest.fixture
def allocator_bytes() -> Callable[[Callable[[], object]], int]:
    """Counts the bytes that a call takes and does not give back, as the CPU allocator reports."""
    return _allocator_bytes
