"""Random programmes of fixed seeds, in the processes that have them on the simulated device; see `tests/fuzz`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.one_schedule("each seed has a schedule of its own")]

RUN = Path(__file__).parents[1] / "fuzz" / "run.py"


@pytest.mark.parametrize("words", [("--seeds", "0:24"), ("--seeds", "28:34", "--captured")])
def test_fixed_seeds(words: tuple[str, ...]) -> None:
    command = [sys.executable, str(RUN), "--device", "simulated", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert " same" in done.stdout
