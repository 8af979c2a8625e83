"""What several tests of the ledger share."""

from __future__ import annotations

import pytest
from torch.profiler import ProfilerActivity, profile


def _allocator_bytes(run) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as prof:
        kept = run()
    taken = sum(e.nbytes() for e in prof.profiler.kineto_results.events() if e.name() == "[memory]")
    del kept
    return taken


@pytest.fixture
def allocator_bytes():
    """Counts the bytes that a call takes and does not give back, as the CPU allocator reports."""
    return _allocator_bytes
