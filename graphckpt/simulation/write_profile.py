"""Measures the rates of a device, and writes its profile."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from math import prod
from pathlib import Path
from statistics import median
from threading import Timer
from time import perf_counter
from typing import Any, final

import torch
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from graphckpt.errors import ConfigError
from graphckpt.simulation.op_costs import attention_kernel
from graphckpt.simulation.profile import DeviceProfile
from graphckpt.units import format_bytes, format_seconds

_MIB = 2**20
_MIN_RUNS = 3
_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# Of 256 x 256 in float16: a simulated or very slow device, on which one of 4096 x 4096 would take 4 s.
_SLOW_PRODUCT_SECONDS = 1e-3
_MAX_PRODUCTS = 64  # beside a copy, however slow it is
_CONTEXT_SECONDS = 120.0
_IN_CONTEXT = """
import sys, torch
device = torch.device(sys.argv[1])
x = torch.ones(1, 1, device=device)
x @ x
torch.cuda.synchronize(device)
print(torch.cuda.memory_reserved(device), flush=True)
sys.stdin.readline()  # its memory is in use until the end of this line
"""
"""A process with a separate context, which prints the bytes that its allocator has reserved."""


class DeviceBenchmark:
    """Measures the rates of a CPU, in units per second; a subclass measures CUDA devices."""

    name = "cpu"
    dtypes: tuple[str, ...] = ("float32", "float64", "bfloat16", "float16")
    sizes: tuple[int, ...] = (256, 512, 1024)
    block_bytes = 64 * _MIB
    disk_bytes = 64 * _MIB
    rounding = 1
    capability: tuple[int, int] | None = None

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device = device
        self.memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._seconds = seconds

    def matmul(self, dtype: str) -> float:
        best = 0.0
        for size in self.sizes:
            a = torch.zeros(size, size, dtype=getattr(torch, dtype), device=self.device)
            took = self.time(lambda a=a: a @ a)  # type: ignore[misc]
            best = max(best, 2 * size**3 / took)
            # No fast units for the dtype: the next size would take eight times as long.
            if took > self._seconds:
                break
        return best

    def bandwidth(self) -> float:
        one = torch.zeros(self.block_bytes, dtype=torch.uint8, device=self.device)
        other = torch.zeros_like(one)
        return 2 * self.block_bytes / self.time(lambda: other.copy_(one))

    def host_copies(self) -> tuple[float, float]:
        # From memory to memory: the bandwidth counts what is read and what is written.
        return (self.bandwidth() / 2,) * 2

    def launch(self) -> float:
        x = torch.zeros(1, device=self.device)
        return self.time(lambda: [x.add_(1) for _ in range(1000)]) / 1000

    def efficiency(self, flops: dict[str, float]) -> dict[str, float]:
        dtype = "bfloat16" if self.device.type == "cuda" else "float32"
        query = torch.zeros(2, 8, 4 * self.sizes[0], 64, dtype=getattr(torch, dtype), device=self.device)
        image = torch.zeros(8, 64, 56, 56, dtype=getattr(torch, dtype), device=self.device)
        weight = torch.zeros(64, 64, 3, 3, dtype=image.dtype, device=self.device)
        rates = {
            "attention": self._rate(lambda: F.scaled_dot_product_attention(query, query, query)),
            "convolution": self._rate(lambda: F.conv2d(image, weight, padding=1)),
        }
        for name, backend in _BACKENDS.items() if self.device.type == "cuda" else ():
            with contextlib.suppress(RuntimeError), sdpa_kernel(backend):  # a device may lack some
                rates[name] = self._rate(lambda: F.scaled_dot_product_attention(query, query, query))
        return {kind: min(1.0, rate / flops[dtype]) for kind, rate in rates.items() if rate}

    def workspace(self) -> int:
        return 0

    def context(self) -> int | None:
        """Returns the bytes of a process besides its tensors, ``None`` if they cannot be measured."""
        return 0

    def attention(self) -> tuple[str, ...]:
        """Returns the kernels of attention in the order in which PyTorch prefers them."""
        return ("flash", "math")

    def time(self, run: Callable[[], Any]) -> float:
        # Once before: the first run loads kernels and chooses among them. The median leaves out what others disturb.
        run()
        self.wait()
        times: list[float] = []
        while len(times) < _MIN_RUNS or sum(times) < self._seconds:
            begin = perf_counter()
            run()
            self.wait()
            times.append(perf_counter() - begin)
        return median(times)

    def wait(self) -> None: ...  # the host computes

    def _rate(self, run: Callable[[], Any]) -> float:
        with _flop_counter() as counter:
            run()
        return float(counter.get_total_flops() / self.time(run))


@final
class CudaBenchmark(DeviceBenchmark):
    dtypes = ("float32", "tf32", "float64", "bfloat16", "float16")
    sizes: tuple[int, ...] = (2048, 4096, 8192)
    block_bytes = 512 * _MIB
    disk_bytes = 512 * _MIB
    rounding = 512

    def __init__(self, device: torch.device, seconds: float) -> None:
        super().__init__(device, seconds)
        properties = torch.cuda.get_device_properties(device)
        self.name = re.sub(r"[^a-z0-9]+", "-", properties.name.lower()).strip("-")
        self.capability = (properties.major, properties.minor)
        self.memory_bytes = int(properties.total_memory)
        small = torch.zeros(256, 256, dtype=torch.float16, device=device)
        if self.time(lambda: small @ small) > _SLOW_PRODUCT_SECONDS:
            self.sizes, self.block_bytes, self.disk_bytes = super().sizes, super().block_bytes, super().disk_bytes

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)

    def matmul(self, dtype: str) -> float:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
        try:
            return super().matmul("float32" if dtype == "tf32" else dtype)
        finally:
            torch.set_float32_matmul_precision(before)

    def host_copies(self) -> tuple[float, float]:
        there = torch.zeros(self.block_bytes, dtype=torch.uint8, device=self.device)
        here = torch.zeros(self.block_bytes, dtype=torch.uint8, pin_memory=True)
        a = torch.zeros(self.sizes[1], self.sizes[1], dtype=torch.float16, device=self.device)
        # The rates of copies that overlap with computation, as in a step: kernels and copies share the memory of the
        # device.
        copies = torch.cuda.Stream(self.device)
        # Products for twice the time of a copy alone, as it takes longer beside them.
        copy_seconds = self.time(lambda: here.copy_(there, non_blocking=True))
        num_products = min(_MAX_PRODUCTS, 1 + int(2 * copy_seconds / self.time(lambda: a @ a)))
        rates = []
        for target, source in ((here, there), (there, here)):
            times = []
            for _ in range(_MIN_RUNS + 1):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                self.wait()
                for _ in range(num_products):
                    a @ a  # keeps the device busy
                with torch.cuda.stream(copies):
                    begin.record()
                    target.copy_(source, non_blocking=True)
                    end.record()
                self.wait()
                times.append(begin.elapsed_time(end) / 1000)
            rates.append(self.block_bytes / median(times[1:]))
        return rates[0], rates[1]

    def workspace(self) -> int:
        # cuBLAS allocates its workspace at the first product of each stream, so that a new stream shows it.
        a = torch.zeros(256, 256, dtype=torch.float16, device=self.device)
        out = torch.empty_like(a)
        self.wait()
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            before = torch.cuda.memory_allocated(self.device)
            torch.mm(a, a, out=out)
            self.wait()
            return torch.cuda.memory_allocated(self.device) - before

    def context(self) -> int | None:
        """Measures how much less is free while another process has a context, with one tensor and cuBLAS.

        What other processes hold meanwhile cancels out, as long as it stays the same.
        """
        command = [sys.executable, "-c", _IN_CONTEXT, str(self.device)]
        before = torch.cuda.mem_get_info(self.device)[0]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
            timer = Timer(_CONTEXT_SECONDS, process.kill)
            timer.start()
            try:
                assert process.stdout is not None
                reserved = process.stdout.readline()
                during = torch.cuda.mem_get_info(self.device)[0]
                process.communicate("\n")
            finally:
                timer.cancel()
        if not reserved.strip().isdigit():  # as where the device admits one process
            return None
        num_bytes = before - during - int(reserved)
        return num_bytes if num_bytes > 0 else None  # others have freed more meanwhile

    def attention(self) -> tuple[str, ...]:
        """Returns the kernel of the plain call first, then those of calls that it does not support."""
        query = torch.zeros(2, 4, 128, 64, dtype=torch.float16, device=self.device, requires_grad=True)
        mask = torch.zeros(2, 1, 128, 128, dtype=torch.float16, device=self.device)
        wide = query.detach().float().requires_grad_()
        # Each call excludes the kernels before: flash has no mask, and neither it nor cuDNN computes in float32.
        order: dict[str, None] = {}
        for tensor, bias in ((query, None), (query, mask), (wide, None)):
            with _flop_counter() as counter:
                F.scaled_dot_product_attention(tensor, tensor, tensor, attn_mask=bias)
            kernels = map(attention_kernel, counter.get_flop_counts()["Global"])
            order.update(dict.fromkeys(kernel for kernel in kernels if kernel is not None))
        rest = (kernel for kernel in ("flash", "efficient") if kernel not in order)
        return (*order, *rest, "math")


def _flop_counter() -> FlopCounterMode:
    on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # which PyTorch does not count

    def count(query: torch.Size, key: torch.Size, *_: object, **__: object) -> int:
        return 4 * prod(query) * key[-2]

    return FlopCounterMode(display=False, custom_mapping={on_cpu: count})


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
        ConfigError: The device does not exist, or cannot be measured.
    """
    place = present_device(device, "profile: device")
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
    context = bench.context()
    report(f"context of a process: {'could not be measured' if context is None else format_bytes(context)}")
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
        context_bytes=context,  # type: ignore[arg-type]  # None: the default
        launch_seconds=launch,
        attention=attention,
        capability=bench.capability,
    )


def write_profile(path: str | Path, device: str | torch.device | None = None, **options: Any) -> DeviceProfile:
    """Measures a device and writes a profile file; ``options`` are those of :func:`profile`."""
    path = Path(path)
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"profile: expected a file that ends in .yaml, got {path} · fix: use {path.stem}.yaml")
    if not path.parent.is_dir():  # before the minutes that measuring takes
        raise ConfigError(f"profile: the folder {path.parent} does not exist · fix: create it, or name another one")
    measured = profile(device, **options)
    measured.save(path, comment=f"Measured by `graphckpt profile-device`, torch {torch.__version__}.")
    return measured


def copy_rates(device: str | torch.device, tier: str) -> tuple[float, float]:
    bench = _bench(torch.device(device), seconds=0.1)
    return bench.host_copies() if tier == "host" else _disk(Path(tempfile.gettempdir()), bench.disk_bytes)


def _bench(device: torch.device, seconds: float) -> DeviceBenchmark:
    return CudaBenchmark(device, seconds) if device.type == "cuda" else DeviceBenchmark(device, seconds)


def present_device(device: str | torch.device | None, where: str) -> torch.device:
    """Returns the device to measure: by default the accelerator if there is one, else the CPU.

    Raises:
        ConfigError: It is another one than a CUDA device that is present, or the CPU; it begins with ``where``.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        place = accelerator if device is None else torch.device(device)
    except RuntimeError:  # a word that torch does not know
        place = torch.device("meta")
    if place.type not in ("cpu", "cuda") or (place.type == "cuda" and not torch.cuda.is_available()):
        what = f"expected cuda, cuda:1, ... where there is one, or cpu, got {device}"
        raise ConfigError(f"{where}: {what} · fix: leave it out")
    return torch.device("cuda", torch.cuda.current_device()) if place == torch.device("cuda") else place


def _disk(folder: Path, num_bytes: int) -> tuple[float, float]:
    # Random, as some file systems and disks compress.
    data = os.urandom(_MIB) * (num_bytes // _MIB)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        begin = perf_counter()
        file.write(data)
        os.fsync(file.fileno())
        written = perf_counter() - begin
        # Otherwise the page cache would be read, at the rate of memory.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        begin = perf_counter()
        while file.read(8 * _MIB):
            pass
        return num_bytes / written, num_bytes / (perf_counter() - begin)
