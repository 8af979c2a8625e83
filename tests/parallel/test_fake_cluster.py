"""The peak that is predicted for one simulated rank, in one process, is that of real ranks, by a counter of its own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.ranks import launch
from helpers.simulated_ranks import WAYS, Case, PipelineCase, peaks, planned, planned_evenly, planned_stage
from helpers.thinning import slow_unless

pytestmark = pytest.mark.multi_process

FAST = ("fsdp2", "ddp", "tp, loss parallel", "fsdp2, resharded to 2")


def peaks_agree(rank: int, way: str, plans: list[tuple[Mapping[str, Any], int]]) -> None:
    del rank
    case = Case(way)
    differences = []
    for policies, predicted in plans:
        everywhere = peaks(case, policies, predicted)
        if not max(everywhere) == everywhere[0] == predicted:
            differences.append((way, dict(policies), predicted, everywhere))
    assert not differences


@pytest.mark.parametrize("way", [pytest.param(way, marks=slow_unless(way in FAST)) for way in WAYS])
def test_a_predicted_peak_is_that_of_real_ranks(tmp_path: Path, way: str) -> None:
    """Everything kept, the lowest peak, and plans between them."""
    plans = planned_evenly(partial(planned, way), 3)  # benchmarks/cluster.py compares six
    launch(peaks_agree, WAYS[way].num_ranks, tmp_path, way, plans)
    assert plans[2][0] not in ({}, plans[1][0])


def peaks_of_stages_agree(rank: int, schedule: str, plans: list[list[tuple[Mapping[str, Any], int]]]) -> None:
    case = PipelineCase(schedule)
    differences = []
    for policies, predicted in plans[rank]:
        if (peak := peaks(case, policies, predicted)[rank]) != predicted:
            differences.append((rank, dict(policies), predicted, peak))
    assert not differences, differences


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "num_stages"), [("1F1B", 2), ("1F1B", 4), ("GPipe", 2)])
def test_a_predicted_peak_is_that_of_a_real_stage(tmp_path: Path, schedule: str, num_stages: int) -> None:
    """The stages wait for each other, and each has a plan of its own."""
    num_plans = 3 if num_stages == 2 else 2  # of each stage; benchmarks/cluster.py compares more
    plans = [
        planned_evenly(partial(planned_stage, schedule, num_stages, rank), num_plans) for rank in range(num_stages)
    ]
    launch(peaks_of_stages_agree, num_stages, tmp_path, schedule, plans)
    assert all(len({str(policies) for policies, _ in of_stage}) > 1 for of_stage in plans)
