"""These tests need the device, which `-p simulated_cuda.plugin` loads: see `make simulated-gpu`."""

from __future__ import annotations

import sys

collect_ignore_glob = [] if "simulated_cuda.plugin" in sys.modules else ["*.py"]
