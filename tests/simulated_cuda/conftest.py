"""These tests need the device, which `-p simulated_cuda.plugin` loads: see `make simulated-gpu`."""

from __future__ import annotations

import sys

import pytest
import torch

from simulated_cuda.library import use_schedule

collect_ignore_glob = [] if "simulated_cuda.plugin" in sys.modules else ["*.py"]


@pytest.fixture(params=["lazy", "eager", *(f"random:{seed}" for seed in range(6))])
def schedule(request: pytest.FixtureRequest) -> str:
    """The schedule of the device, which runs a test under each."""
    use_schedule(request.param)
    return str(request.param)


@pytest.fixture
def side() -> torch.cuda.Stream:
    return torch.cuda.Stream()
