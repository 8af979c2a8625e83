"""The peak that is predicted for one simulated rank, in one process, is that of real ranks, by a counter of its own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.ranks import launch
from helpers.simulated_ranks import WAYS, Case, peaks, planned, planned_evenly
from helpers.thinning import slow_unless

pytestmark = pytest.mark.multi_process

FAST = ("fsdp2", "ddp")


def peaks_agree(rank: int, way: str, plans: list[tuple[Mapping[str, Any], int]]) -> None:
    del rank
    case = Case(way)
    differences = []
    for policies, predicted in plans:
        everywhere = peaks(case, policies)
        if not max(everywhere) == everywhere[0] == predicted:
            differences.append((way, dict(policies), predicted, everywhere))
    assert not differences


@pytest.mark.parametrize("way", [pytest.param(way, marks=slow_unless(way in FAST)) for way in WAYS])
def test_a_predicted_peak_is_that_of_real_ranks(tmp_path: Path, way: str) -> None:
    """Everything kept, the lowest peak, and plans between them."""
    plans = planned_evenly(partial(planned, way), 6 if "ddp, " in way else 3)
    launch(peaks_agree, WAYS[way].num_ranks, tmp_path, way, plans)
    assert plans[2][0] not in ({}, plans[1][0])
