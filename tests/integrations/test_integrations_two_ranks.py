"""The callbacks on two ranks, under DDP and FSDP2: the same bits as without them, and bytes that fall, on each rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.ranks import run_on_ranks
from helpers.two_ranks import train


@pytest.mark.multi_process
@pytest.mark.slow
def test_callbacks_on_two_ranks_change_no_bit(tmp_path: Path) -> None:
    run_on_ranks(train, tmp_path, joins=False)
