"""What the tests of several processes share with those of the trainer."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "train"))  # small_run.py is imported by name, also by the ranks
