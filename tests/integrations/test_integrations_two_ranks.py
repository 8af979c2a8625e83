"""The callbacks on two ranks, under DDP and FSDP2: the same bits as without them, and bytes that fall, on each rank."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "parallel"))  # ranks.py is imported by name, also by the ranks

from ranks import run_on_ranks
from two_ranks import train


@pytest.mark.multi_process
@pytest.mark.slow
def test_callbacks_on_two_ranks_change_no_bit(tmp_path: Path) -> None:
    run_on_ranks(train, tmp_path, joins=False)
