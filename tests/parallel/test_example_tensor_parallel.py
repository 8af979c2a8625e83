"""The example of tensor parallelism runs, and each mode keeps less than the one before it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "05_tensor_parallel.py"
SIZES = ["--layers", "3", "--width", "64", "--heads", "4", "--vocab", "128", "--batch", "8", "--length", "32"]
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}


@pytest.mark.multi_process
@pytest.mark.slow
def test_each_mode_keeps_less_and_changes_no_bit() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [*launcher, str(EXAMPLE), *SIZES]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert "equal in every bit" in done.stdout
    found = re.findall(r"^(keep all|checkpoint.*): rank (\d): ([\d.]+) (\w+) after forward, ", done.stdout, re.M)
    assert [rank for _, rank, _, _ in found] == ["0", "1"] * 3
    first = [float(number) * UNITS[unit] for _, rank, number, unit in found if rank == "0"]
    assert first[0] > 2 * first[1] > 2 * first[2]
    assert re.search(r"^transformer\.h\.0-2 \(3x\) +full +slab part ", done.stdout, re.M)
