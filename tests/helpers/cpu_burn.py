"""Work that takes a given time."""

from __future__ import annotations

import time


def be_busy(seconds: float) -> None:
    """Computes for that long by the clock of this process, however much else the machine does."""
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass
