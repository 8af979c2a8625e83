"""The device on which a benchmark for a GPU runs; a dry run takes the CPU, where bytes are not counted."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch


class Cuda:
    """The first CUDA device."""

    kind = "cuda"

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise SystemExit("there is no CUDA device; --dry-run runs everything on the CPU, in tiny sizes")

    def header(self) -> dict[str, Any]:
        """Returns what the header of a report says of the device."""
        return {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}

    def synchronize(self) -> None:
        """Waits for the device."""
        torch.cuda.synchronize()

    def allocated(self) -> int | None:
        """Returns the bytes that are allocated now."""
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    def peak_of(self, call: Callable[[], object], before: int | None, times: int = 1) -> int | None:
        """Returns the most that was allocated in some calls above ``before``."""
        self.allocated()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(times):
            call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - (before or 0)

    def release(self) -> None:
        """Gives back what nothing uses."""
        gc.collect()
        torch.cuda.empty_cache()


class Cpu(Cuda):
    """The CPU, for a dry run: nothing of it is a figure of a GPU."""

    kind = "cpu"

    def __init__(self) -> None:
        pass

    def header(self) -> dict[str, Any]:
        return {"device": "none: a dry run on the CPU"}

    def synchronize(self) -> None:
        pass

    def allocated(self) -> int | None:
        return None

    def peak_of(self, call: Callable[[], object], before: int | None, times: int = 1) -> int | None:
        for _ in range(times):
            call()
        return None

    def release(self) -> None:
        gc.collect()


def device_for(*, is_dry: bool) -> Cuda:
    """Returns the device to run on.

    Raises:
        SystemExit: There is no CUDA device, and it is no dry run.
    """
    return Cpu() if is_dry else Cuda()
