"""The callbacks under DDP, started by torchrun: the same bits as without them, and bytes that fall, on each rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.multi_process
@pytest.mark.slow
def test_callbacks_under_torchrun_change_no_bit(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = str(Path(__file__).parent / "two_ranks.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, script, str(tmp_path)], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    told = {path.name: path.read_text() for path in tmp_path.glob("rank *")}
    assert told == dict.fromkeys(("rank 0", "rank 1"), "differ: [], fell: [True, True]")
