"""The device on which a benchmark for a GPU runs; a dry run takes tiny sizes, and the CPU where there is no GPU."""

from __future__ import annotations

import gc
import itertools
import os
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from processes import FORKS, run

from graphckpt.graph.capture import Capture, CaptureBackend


class Bytes(NamedTuple):
    """Bytes in use by the allocator's count, and as they were requested, before the allocator rounded them up."""

    allocated: int = 0
    requested: int = 0


class Cuda:
    """The first CUDA device."""

    kind = "cuda"
    capture: Any = "cuda_graph"
    """For ``Graph.config.capture``."""

    def __init__(self, *, is_dry: bool) -> None:
        self.is_dry = is_dry

    def header(self) -> dict[str, Any]:
        """Describes the device in the header of a report."""
        return {"device": self.name() + ", a dry run" * self.is_dry, "cuda": torch.version.cuda}

    def name(self) -> str:
        """Returns the name of the device; see :func:`name_of_device`."""
        return name_of_device()

    def synchronize(self) -> None:
        """Waits for the device."""
        torch.cuda.synchronize()

    def stats(self) -> dict[str, int]:
        """Returns the counts of the allocator."""
        return torch.cuda.memory_stats()

    def reset_peaks(self) -> None:
        """Lets peaks begin at the present counts."""
        torch.cuda.reset_peak_memory_stats()

    def bytes_now(self) -> Bytes:
        """Returns the bytes in use."""
        gc.collect()
        self.synchronize()
        stats = self.stats()
        return Bytes(*(stats[f"{count}_bytes.all.current"] for count in Bytes._fields))

    def peak_of(self, call: Callable[[], object], before: Bytes, name: str = "peak", times: int = 1) -> dict[str, int]:
        """Returns the peaks of some calls above ``before``, and the bytes that were free but in pieces.

        The allocator gives out blocks: one that it cannot split counts in full. What was requested tells errors of a
        prediction from this rounding.
        """
        self.bytes_now()
        self.reset_peaks()
        for _ in range(times):
            call()
        self.synchronize()
        stats = self.stats()
        return {
            f"{name}_bytes": stats["allocated_bytes.all.peak"] - before.allocated,
            f"{name}_requested_bytes": stats["requested_bytes.all.peak"] - before.requested,
            f"{name}_inactive_split_bytes": stats["inactive_split_bytes.all.peak"],
        }

    def seconds_of(self, call: Callable[[], object], times: int) -> list[float]:
        """Returns the time of each of some calls by the wall clock."""
        seconds = []
        for _ in range(times):
            self.synchronize()
            begin = perf_counter()
            call()
            self.synchronize()
            seconds.append(perf_counter() - begin)
        return seconds

    def count_pinned(self) -> Callable[[], int]:
        """Begins to count pinned host memory; what is returned gives the most that was pinned so far."""
        registered = Registered(torch.cuda.cudart())
        torch.cuda.cudart = lambda: registered  # type: ignore[assignment]
        return lambda: registered.peak + torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)

    def save_snapshot(self, call: Callable[[], object], path: Path) -> None:
        """Records what a call allocates, for https://pytorch.org/memory_viz; a row counts without it too."""
        memory = torch.cuda.memory
        try:
            memory._record_memory_history(context="alloc", stacks="python", max_entries=20_000)
            call()
            memory._dump_snapshot(str(path))
            memory._record_memory_history(enabled=None)
        except Exception:
            traceback.print_exc()

    def release(self) -> None:
        """Gives back what nothing uses."""
        gc.collect()
        torch.cuda.empty_cache()


class Registered:
    """CUDA's runtime, with the sum of the host memory that is registered by hand; PyTorch does not count that."""

    def __init__(self, runtime: Any) -> None:
        self.runtime = runtime
        self.sizes: dict[int, int] = {}
        self.peak = 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> Any:
        self.sizes[address] = num_bytes
        self.peak = max(self.peak, sum(self.sizes.values()))
        return self.runtime.cudaHostRegister(address, num_bytes, flags)

    def cudaHostUnregister(self, address: int) -> Any:
        self.sizes.pop(address, None)
        return self.runtime.cudaHostUnregister(address)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runtime, name)


# ---- without a device: every line of a benchmark runs, and no figure of it counts


class Rerun(Capture):
    """Runs the step at each replay."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self.step = step

    def replay(self) -> None:
        self.output = self.step()

    def release(self) -> None:
        self.output = None


class RerunBackend(CaptureBackend):
    """Captures nothing, but goes the way of a capture."""

    name = "rerun"

    def warmup(self) -> AbstractContextManager[None]:
        return nullcontext()

    def pass_on(self, output: Any) -> None:
        pass

    def capture(self, step: Callable[[], Any]) -> Capture:
        return Rerun(step)

    def pool_bytes(self) -> int:
        return 1


class Cpu(Cuda):
    """The CPU; its bytes are a count of the questions, so that differences and ratios of them are defined."""

    kind = "cpu"

    def __init__(self) -> None:
        super().__init__(is_dry=True)
        self.capture = RerunBackend()
        self.counter = itertools.count(1)

    def name(self) -> str:
        return "none"

    def synchronize(self) -> None:
        pass

    def stats(self) -> dict[str, int]:
        names = [
            f"{count}_bytes.all.{kind}" for count in (*Bytes._fields, "inactive_split") for kind in ("current", "peak")
        ]
        return dict.fromkeys(names, next(self.counter))

    def reset_peaks(self) -> None:
        pass

    def count_pinned(self) -> Callable[[], int]:
        return lambda: 1

    def save_snapshot(self, call: Callable[[], object], path: Path) -> None:
        call()

    def release(self) -> None:
        gc.collect()


def name_of_device() -> str:
    """Returns the name that a process of its own prints when it has used the device.

    This process does not use it, so that others can be forked from it, which spares each the imports: about ten
    seconds. They are forked from here on if the one that prints the name could be.

    Raises:
        SystemExit: The device cannot be used.
    """
    if name := os.environ.get(_NAME):
        return name
    for forks in ("1", "0"):
        if forks == "1" and torch.cuda.is_initialized():
            continue
        done = run([__file__], _NAME_SECONDS, is_forked=forks == "1")
        if done.code == 0:
            os.environ |= {_NAME: done.stdout.splitlines()[-1], FORKS: forks}
            return os.environ[_NAME]
    raise SystemExit(f"the CUDA device cannot be used\n{done.stderr}")


_NAME = "BENCHMARKS_DEVICE"
_NAME_SECONDS = 120


def device_for(*, is_dry: bool) -> Cuda:
    """Returns the device to run on.

    Raises:
        SystemExit: There is no CUDA device, and this is not a dry run.
    """
    if torch.cuda.is_available():
        return Cuda(is_dry=is_dry)
    if is_dry:
        return Cpu()
    raise SystemExit("there is no CUDA device; --dry-run runs everything on the CPU, in tiny sizes")


if __name__ == "__main__":
    torch.ones(1, device="cuda").sum().item()
    print(torch.cuda.get_device_name())
