"""Measures what recording the step of GPT-2 124M as one CUDA graph saves, beside the same Graph without it.

Each pair runs in a process of its own: first the eager steps, then, when their model is gone, the captured ones, so
that each has the whole memory. A step is forward, backward and AdamW under bfloat16 autocast. What counts is the ratio.

    python benchmarks/capture_gpu.py [--batches 1 8 16] [--tokens 1024] [--steps 20] [--minutes 9] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from device import Cuda, device_for
from jobs import Jobs, arguments, cell
from report import header, spread, table, write
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from graphckpt import Graph, Selective
from graphckpt.units import format_bytes, format_seconds

# Legend: B batch, T tokens

POLICIES: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"activation_checkpointing": True},
    "selective": {"activation_checkpointing": Selective("matmul+attention")},
    "full, offload": {"activation_checkpointing": True, "offload": True},
}


class Step(Graph):
    """One training step."""

    def __init__(self, model: Any, policy: dict[str, Any], capture: str, kind: str) -> None:
        super().__init__()
        self.model = model
        for block in self.model.transformer.h:
            block.config.update(policy)
        rate = torch.tensor(1e-4, device=kind)
        self.add_optimizer(torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=kind == "cuda"))
        self.config.enable_amp(dtype=torch.bfloat16)
        self.config.capture = capture

    def build(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Runs forward and backward."""
        loss: torch.Tensor = self.model(input_ids=ids_BT, labels=ids_BT).loss
        loss.backward()
        return loss


def model_of(tokens: int, device: Cuda, **sizes: int) -> nn.Module:
    """Builds GPT-2 124M, or one of other sizes, with the same weights at every call."""
    torch.manual_seed(0)
    config = GPT2Config(use_cache=False, loss_type="ForCausalLM", n_positions=tokens, **sizes)
    with torch.device(device.kind):
        return GPT2LMHeadModel(config).train()


def measure(
    policy: str, batch: int, tokens: int, warm_up: int, steps: int, sizes: dict[str, int], device: Cuda
) -> dict[str, Any]:
    """Runs one pair in this process. Seconds are those of the wall, bytes those of the allocator."""
    ids_BT = torch.randint(sizes.get("vocab_size", 50257), (batch, tokens), device=device.kind)
    row: dict[str, Any] = {"policy": policy, "batch": batch, "tokens": tokens}
    for name, capture in {"eager": "eager", "captured": "cuda_graph" if device.kind == "cuda" else "auto"}.items():
        before = device.allocated()
        graph = Step(model_of(tokens, device, **sizes), POLICIES[policy], capture, device.kind)
        for _ in range(warm_up):
            graph(ids_BT)
        peak = device.peak_of(partial(graph, ids_BT), before)
        seconds = []
        for _ in range(steps):
            device.synchronize()
            begin = perf_counter()
            graph(ids_BT)
            device.synchronize()
            seconds.append(perf_counter() - begin)
        row[f"{name}_seconds"] = spread(seconds)
        if name == "eager":
            row["eager_peak_bytes"] = peak
            now = device.allocated()
            row["static_bytes"] = now - before if now is not None and before is not None else None
        else:
            runner = graph._step.recorded.captures.backend if device.kind == "cuda" else None
            row["pool_bytes"] = None if runner is None else runner.pool_bytes()
            row["capture"] = graph.explain(show=False).capture
        del graph
        device.release()
    return {**row, "ratio": row["captured_seconds"]["median"] / row["eager_seconds"]["median"]}


def row(result: dict[str, Any]) -> list[str]:
    """Returns the cells of the table."""
    place = [result["policy"], f"{result['batch']} x {result['tokens']}"]
    if "failed" in result:
        return [*place, f"failed: {result['failed']}", *["-"] * 5]
    times = [format_seconds(result[f"{kind}_seconds"]["median"]) for kind in ("eager", "captured")]
    sizes = [cell(result[key], format_bytes) for key in ("eager_peak_bytes", "static_bytes", "pool_bytes")]
    return [*place, *times, f"{result['ratio']:.2f}", *sizes]


def main() -> None:
    """Runs all, in turn, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 16])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--warm-up", type=int, default=6)
    parser.add_argument("--steps", type=int, default=20)
    arguments(parser, minutes=9)
    options = parser.parse_args()
    device = device_for(is_dry=options.dry_run)
    if options.job is not None:
        print(json.dumps(measure(**options.job, device=device)))
        return
    sizes: dict[str, int] = {}
    if options.dry_run:
        options.batches, options.tokens, options.warm_up, options.steps = [1], 8, 1, 2
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2}
    head = header(**device.header(), steps=options.steps, warm_up=options.warm_up)
    jobs = Jobs(__file__, options, head)
    for batch in options.batches:
        for policy in options.policies:
            times = {"warm_up": options.warm_up, "steps": options.steps}
            jobs.run({"policy": policy, "batch": batch, "tokens": options.tokens, **times, "sizes": sizes})
    columns = ["policy", "batch x tokens", "eager", "captured", "captured / eager", "eager peak", "static", "pool"]
    text = (
        "eager, captured: a step, the median. eager peak: most that was allocated in a step above what was before the "
        "model. static: what of it stays between steps, weights and optimizer. pool: what the recording holds beside "
        "that.\n\n"
    )
    write(
        Path(__file__).stem, head, jobs.rows, text + table(columns, [row(result) for result in jobs.rows]), options.out
    )


if __name__ == "__main__":
    main()
