"""Measures a present device, and writes the profile that :func:`graphckpt.planning.device.profile.machine` reads."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from graphckpt.errors import ConfigError
from graphckpt.planning.device.benchmarks import CudaBenchmark, DeviceBenchmark
from graphckpt.planning.device.profile import DeviceProfile
from graphckpt.units import format_bytes, format_seconds

_MIB = 2**20
_SECONDS_OF_A_COPY = 0.1


def profile(
    device: str | torch.device | None = None,
    *,
    name: str | None = None,
    seconds: float = 0.5,
    folder: str | Path | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> DeviceProfile:
    """Measures a device, with nothing else running on it.

    Args:
        device: The device; by default the accelerator if there is one, else the CPU.
        name: The name of the profile; by default that of the device.
        seconds: The least time for which each rate is measured.
        folder: A folder on the disk to measure; by default that of temporary files.
        report: Called with a line of text after each measurement.

    Raises:
        ConfigError: There is no such device, or it cannot be measured.
    """
    place = _device(device)
    bench = _bench(place, seconds)
    flops = {}
    for dtype in bench.dtypes:
        flops[dtype] = bench.matmul(dtype)
        report(f"{dtype} matrix products: {flops[dtype] / 1e12:.3g} TFLOP/s")
    bandwidth = bench.bandwidth()
    report(f"memory: {format_bytes(int(bandwidth))}/s")
    copy_out, copy_in = bench.host_copies()
    report(f"to the host: {format_bytes(int(copy_out))}/s, back: {format_bytes(int(copy_in))}/s")
    disk_write, disk_read = _disk(Path(folder or tempfile.gettempdir()), bench.disk_bytes)
    report(f"disk: writes {format_bytes(int(disk_write))}/s, reads {format_bytes(int(disk_read))}/s")
    launch = bench.launch()
    report(f"an op costs {format_seconds(launch)} at least")
    efficiency = bench.efficiency(flops)
    report(", ".join(f"{kind}: {share:.0%} of the rate of matrix products" for kind, share in efficiency.items()))
    workspace = bench.workspace()
    attention = bench.attention()
    report(f"attention: {', '.join(attention)}; workspace: {format_bytes(workspace)}")
    return DeviceProfile(
        name=name or bench.name,
        kind=place.type,
        memory_bytes=bench.memory_bytes,
        flops=flops,
        memory_bandwidth=bandwidth,
        efficiency=efficiency,
        copy_out=copy_out,
        copy_in=copy_in,
        disk_write=disk_write,
        disk_read=disk_read,
        rounding=bench.rounding,
        workspace_bytes=workspace,
        launch_seconds=launch,
        attention=attention,
        capability=bench.capability,
    )


def write_profile(path: str | Path, device: str | torch.device | None = None, **options: Any) -> DeviceProfile:
    """Measures a device and writes a profile file; ``options`` are those of :func:`profile`."""
    path = Path(path)
    if not path.parent.is_dir():  # before the minutes that measuring takes
        raise ConfigError(f"profile: there is no folder {path.parent} · fix: create it, or name another one")
    measured = profile(device, **options)
    measured.save(path, comment=f"Measured by `graphckpt profile-device`, torch {torch.__version__}.")
    return measured


def copy_rates(device: str | torch.device, tier: str) -> tuple[float, float]:
    """Measures the rates of copies from a device to a tier and back, in bytes per second.

    Args:
        device: The device.
        tier: ``"host"`` or ``"disk"``.
    """
    bench = _bench(_device(device), _SECONDS_OF_A_COPY)
    return bench.host_copies() if tier == "host" else _disk(Path(tempfile.gettempdir()), bench.disk_bytes)


def _bench(device: torch.device, seconds: float) -> DeviceBenchmark:
    return CudaBenchmark(device, seconds) if device.type == "cuda" else DeviceBenchmark(device, seconds)


def _device(device: str | torch.device | None) -> torch.device:
    found = torch.accelerator.current_accelerator()
    place = torch.device(device) if device is not None else found or torch.device("cpu")
    if place.type not in ("cpu", "cuda"):
        raise ConfigError(f"profile: expected a CUDA device or the CPU, got {place} · fix: use 'cuda' or 'cpu'")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("profile: expected a CUDA device, found none · fix: run this on a CUDA machine, or use 'cpu'")
    return place


def _disk(folder: Path, num_bytes: int) -> tuple[float, float]:
    """Returns bytes per second written to the disk and synchronized, and read back from it."""
    data = os.urandom(_MIB) * (num_bytes // _MIB)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        begin = perf_counter()
        file.write(data)
        os.fsync(file.fileno())
        written = perf_counter() - begin
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # otherwise the page cache is read
        file.seek(0)
        begin = perf_counter()
        while file.read(8 * _MIB):
            pass
        return num_bytes / written, num_bytes / (perf_counter() - begin)
