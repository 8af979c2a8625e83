"""Programmes in processes of their own on the simulated device: random ones of `tests/fuzz`, and one that ends soon."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.one_schedule("each seed has a schedule of its own")]

TESTS = Path(__file__).parents[1]
RUN = TESTS / "fuzz" / "run.py"
ENDS_DURING_COPIES = """
import torch, graphckpt
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).cuda()
graphckpt.apply(model, {"0": {"offload": True}})
y = model(torch.randn(64, 64).cuda())
"""


@pytest.mark.parametrize("words", [("--seeds", "0:24"), ("--seeds", "28:34", "--captured")])
def test_fixed_seeds(words: tuple[str, ...]) -> None:
    command = [sys.executable, str(RUN), "--device", "simulated", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert " same" in done.stdout


def test_host_memory_stays_pinned_at_exit_until_its_copies_are_over() -> None:
    """Finalizers run at exit in reverse order: the memory is younger than the store that waits for the copies."""
    paths = (TESTS / "simulated_cuda" / "site", TESTS, TESTS.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-c", ENDS_DURING_COPIES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
