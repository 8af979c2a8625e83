"""Predictions of the simulated allocator on a real device: segments, and the least memory that is enough."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.subprocess_runner import run_script

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.real_gpu("the simulated device's allocator has no limit, and kernels without workspaces"),
]

SCRIPT = Path(__file__).parent / "reserved_script.py"
"""Runs steps in a process of its own, whose allocator is empty; prints what the allocator did as JSON."""


def measured(folder: Path, *words: str) -> dict[str, Any]:
    done = run_script(SCRIPT, *words, folder=folder)
    assert done.code == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("policy", ["keep", "full"])
def test_reserved_bytes_are_those_of_the_allocator(policy: str, tmp_path: Path) -> None:
    result = measured(tmp_path, policy)
    assert result["reserved_bytes"] == pytest.approx(result["predicted_reserved_bytes"], rel=0.02)
    assert result["peak_bytes"] == pytest.approx(result["predicted_peak_bytes"], rel=0.02)


@pytest.mark.parametrize("policy", ["keep", "full"])
def test_the_least_capacity_is_enough_and_less_is_not(policy: str, tmp_path: Path) -> None:
    assert measured(tmp_path, policy, "--share", "1.01")["num_late_retries"] == 0
    less = measured(tmp_path, policy, "--share", "0.97")
    assert less["is_out_of_memory"] or less["num_late_retries"] > 0
    assert torch.cuda.is_available()
