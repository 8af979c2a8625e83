"""The example of tensor parallelism runs, and each mode keeps less than the one before it."""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
from helpers.ranks import run_on_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "05_tensor_parallel.py"
SIZES = ["--layers", "3", "--width", "64", "--heads", "4", "--vocab", "128", "--batch", "8", "--length", "32"]
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}


def run_example(rank: int, folder: Path) -> None:
    """Runs on each rank, as ``torchrun`` does."""
    os.environ["COLUMNS"] = "200"
    sys.argv = [str(EXAMPLE), *SIZES]
    with (folder / f"output of {rank}.txt").open("w") as output, contextlib.redirect_stdout(output):
        runpy.run_path(str(EXAMPLE), run_name="__main__")


@pytest.mark.multi_process
@pytest.mark.slow
def test_each_mode_keeps_less_and_changes_no_bit(tmp_path: Path) -> None:
    run_on_ranks(run_example, tmp_path, joins=False)
    output = (tmp_path / "output of 0.txt").read_text()
    assert "equal in every bit" in output
    found = re.findall(r"^(keep all|checkpoint.*): rank (\d): ([\d.]+) (\w+) after forward, ", output, re.M)
    assert [rank for _, rank, _, _ in found] == ["0", "1"] * 3
    first = [float(number) * UNITS[unit] for _, rank, number, unit in found if rank == "0"]
    assert first[0] > 2 * first[1] > 2 * first[2]
    assert re.search(r"^transformer\.h\.0-2 \(3x\) +full \+ slab part ", output, re.M)
    assert not (tmp_path / "output of 1.txt").read_text()
