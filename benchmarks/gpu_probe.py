"""Answers what the code for CUDA relies on, on the machine at hand; each probe is a row.

python benchmarks/gpu_probe.py [--minutes 2] [--out FOLDER] [--dry-run]
"""

from __future__ import annotations

import argparse
import json
import mmap
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from device import Cuda, device_for
from jobs import Jobs, answer, arguments
from report import header, table, write
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

MIB = 2**20


def machine(device: Cuda) -> dict[str, Any]:
    """What the device is."""
    found = torch.cuda.get_device_properties(0)
    return {
        "memory_bytes": found.total_memory,
        "multiprocessors": found.multi_processor_count,
        "cuda": torch.version.cuda,
    }


def registered_memory(device: Cuda) -> dict[str, Any]:
    """Whether pages that CUDA is asked to pin are pinned; a sandbox may refuse, or accept and do nothing."""
    flat = torch.frombuffer(mmap.mmap(-1, 4 * MIB), dtype=torch.uint8)
    torch.cuda.init()
    cudart: Any = torch.cuda.cudart()
    code = int(cudart.cudaHostRegister(flat.data_ptr(), flat.numel(), 1))
    is_pinned = flat.is_pinned()
    if code == 0:
        cudart.cudaHostUnregister(flat.data_ptr())
    return {"code": code, "is_pinned": is_pinned}


def capture_with_dropout(device: Cuda) -> dict[str, Any]:
    """Whether replays of a step that recomputes dropout have the bits of the same steps in eager."""
    ends = {}
    for is_captured in (False, True):
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 256)).cuda()
        optimizer = torch.optim.AdamW(block.parameters(), lr=1e-3, fused=True, capturable=True)
        x = torch.randn(32, 256, device="cuda")

        def step(block: Any = block, optimizer: Any = optimizer, x: Any = x) -> None:
            checkpoint(block, x, use_reentrant=False).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        if is_captured:
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                step()
        with torch.cuda.stream(side):
            for _ in range(5):
                graph.replay() if is_captured else step()
        torch.cuda.synchronize()
        ends[is_captured] = [p.detach().clone() for p in block.parameters()]
    return {"same_bits": all(torch.equal(a, b) for a, b in zip(ends[False], ends[True], strict=True))}


def attention(device: Cuda) -> dict[str, Any]:
    """Which kernel attention takes."""
    kernels = {}
    for dtype in (torch.bfloat16, torch.float32):
        for dropout in (0.0, 0.1):
            q = torch.randn(2, 8, 512, 64, device="cuda", dtype=dtype, requires_grad=True)
            with profile(activities=[ProfilerActivity.CPU]) as seen:
                F.scaled_dot_product_attention(q, q, q, dropout_p=dropout, is_causal=True)
            names = {e.key.removeprefix("aten::") for e in seen.key_averages() if "attention" in e.key}
            kernels[f"{dtype}, dropout {dropout}"] = sorted(names - {"scaled_dot_product_attention"})
    return kernels


def copy_rates(device: Cuda) -> dict[str, Any]:
    """Bytes a second between the device and pinned memory, while the device is idle and while it computes."""
    num_bytes, side = (MIB, 64) if device.is_dry else (256 * MIB, 8192)
    far = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    near = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    a = torch.randn(side, side, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    rates = {}
    for load in ("idle", "busy"):
        for way, to, source in (("out", far, near), ("back", near, far)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            to.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            for _ in range(40 if load == "busy" else 0):
                a @ a
            with torch.cuda.stream(stream):
                start.record(stream)
                for _ in range(3):
                    to.copy_(source, non_blocking=True)
                end.record(stream)
            torch.cuda.synchronize()
            rates[f"{way}_{load}_bytes_per_second"] = 3 * num_bytes / (start.elapsed_time(end) * 1e-3)
    begin = perf_counter()
    torch.empty(4 * num_bytes, dtype=torch.uint8, pin_memory=True)
    return {**rates, "pinned_bytes": 4 * num_bytes, "pin_seconds": perf_counter() - begin}


def cpu(device: Cuda) -> dict[str, Any]:
    """What a dry run asks instead."""
    return {"threads": torch.get_num_threads()}


PROBES: dict[str, Callable[[Cuda], dict[str, Any]]] = {
    probe.__name__: probe for probe in (machine, copy_rates, registered_memory, capture_with_dropout, attention, cpu)
}


def main() -> None:
    """Asks each in a process of its own: one may abort."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments(parser, minutes=2)
    options = parser.parse_args()
    device = device_for(is_dry=options.dry_run)
    if options.job is not None:
        answer([{**options.job, "answer": PROBES[options.job["probe"]](device)}])
        return
    head = header(**device.header())
    jobs = Jobs(__file__, options, head)
    for name in PROBES:
        if (name == "cpu") == (device.kind == "cpu"):
            jobs.run({"probe": name})
    cells = [[row["probe"], row.get("failed", json.dumps(row.get("answer")))] for row in jobs.rows]
    write(jobs.name, head, jobs.rows, table(["probe", "answer"], cells), options.out)


if __name__ == "__main__":
    main()
