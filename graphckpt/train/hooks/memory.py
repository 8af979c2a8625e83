"""Current and peak memory of the process and of a CUDA device."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import torch

if sys.platform == "darwin":
    import resource


def device_memory(device: torch.device) -> dict[str, int]:
    """Returns the bytes that PyTorch holds on a CUDA device, as metrics; nothing for any other device.

    ``cuda_bytes`` are those of tensors. ``cuda_reserved_bytes`` are those taken from the device: the caching
    allocator's free blocks and the memory pools of captured steps count too. Peaks are since the statistics were reset.
    """
    if device.type != "cuda":
        return {}
    return {
        "cuda_bytes": torch.cuda.memory_allocated(device),
        "peak_cuda_bytes": torch.cuda.max_memory_allocated(device),
        "cuda_reserved_bytes": torch.cuda.memory_reserved(device),
        "peak_cuda_reserved_bytes": torch.cuda.max_memory_reserved(device),
    }


def device_used_bytes(device: torch.device) -> int | None:
    """Returns the bytes in use on a CUDA device, by all processes, as ``nvidia-smi`` reports.

    ``None`` for any other device, and without ``nvidia-ml-py``, which asks the driver.
    """
    if device.type != "cuda" or find_spec("pynvml") is None:
        return None
    return int(torch.cuda.device_memory_used(device))


def process_memory() -> dict[str, int]:
    """Returns this process's bytes of resident memory, now and at the peak, as metrics; 0 if they are not reported."""
    status = Path("/proc/self/status")
    if status.exists():
        fields = dict(line.split(":", 1) for line in status.read_text(encoding="utf-8").splitlines() if ":" in line)
        now, peak = (int(fields.get(name, "0 kB").split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
        return {"rss_bytes": now, "peak_rss_bytes": max(now, peak)}
    peak = 0
    if sys.platform == "darwin":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"rss_bytes": peak, "peak_rss_bytes": peak}
