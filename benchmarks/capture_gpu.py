"""Measures what recording the step of GPT-2 124M as one CUDA graph saves, beside the same Graph without it.

Each pair runs in a process of its own: two models with equal weights, one captured, one not, whose steps are timed in
turn, so that clocks and temperature are the same for both. A step is forward, backward and AdamW under bfloat16
autocast. What counts is the ratio.

    python benchmarks/capture_gpu.py [--batches 1 4 32] [--tokens 1024] [--steps 20]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
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

    def __init__(self, model: GPT2LMHeadModel, policy: dict[str, Any], capture: str) -> None:
        super().__init__()
        self.model = model
        for block in self.model.transformer.h:
            block.config.update(policy)
        rate = torch.tensor(1e-4, device="cuda")
        self.add_optimizer(torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=True))
        self.config.enable_amp(dtype=torch.bfloat16)
        self.config.capture = capture

    def build(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Runs forward and backward."""
        loss: torch.Tensor = self.model(input_ids=ids_BT, labels=ids_BT).loss
        loss.backward()
        return loss


def model_of(tokens: int) -> nn.Module:
    """Builds GPT-2 124M, with the same weights at every call."""
    torch.manual_seed(0)
    config = GPT2Config(use_cache=False, loss_type="ForCausalLM", n_positions=tokens)
    with torch.device("cuda"):
        return GPT2LMHeadModel(config).train()


def measure(policy: str, batch: int, tokens: int, warm_up: int, steps: int) -> dict[str, Any]:
    """Runs one pair in this process. Seconds are those of the wall, bytes those of the allocator."""
    graphs, seconds, peaks = {}, {}, {}
    ids_BT = torch.randint(50257, (batch, tokens), device="cuda")
    for capture in ("eager", "cuda_graph"):
        before = torch.cuda.memory_allocated()
        graph = graphs[capture] = Step(model_of(tokens), POLICIES[policy], capture)
        for _ in range(warm_up):
            graph(ids_BT)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        graph(ids_BT)
        torch.cuda.synchronize()
        peaks[capture] = torch.cuda.max_memory_allocated() - before
        seconds[capture] = []
    pool_bytes = graphs["cuda_graph"]._step.recorded.captures.runner.pool_bytes()
    for _ in range(steps):
        for capture, graph in graphs.items():
            torch.cuda.synchronize()
            begin = perf_counter()
            graph(ids_BT)
            torch.cuda.synchronize()
            seconds[capture].append(perf_counter() - begin)
    plain, captured = (spread(seconds[capture]) for capture in ("eager", "cuda_graph"))
    return {
        "policy": policy,
        "batch": batch,
        "tokens": tokens,
        "eager_seconds": plain,
        "captured_seconds": captured,
        "ratio": captured["median"] / plain["median"],
        "eager_peak_bytes": peaks["eager"],
        "pool_bytes": pool_bytes,
        "capture": graphs["cuda_graph"].explain(show=False).capture,
    }


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Runs ``measure`` in a process of its own; a pair that runs out of memory is a row as well."""
    done = subprocess.run(
        [sys.executable, __file__, "--job", json.dumps(job)], capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    if "OutOfMemoryError" in done.stderr or "out of memory" in done.stderr:
        return {**{key: job[key] for key in ("policy", "batch", "tokens")}, "failed": "memory"}
    raise SystemExit(done.stderr)


def row(result: dict[str, Any]) -> list[str]:
    """Returns the cells of the table."""
    place = [result["policy"], f"{result['batch']} x {result['tokens']}"]
    if "failed" in result:
        return [*place, "out of memory", "-", "-", "-", "-"]
    times = [format_seconds(result[f"{kind}_seconds"]["median"]) for kind in ("eager", "captured")]
    sizes = [format_bytes(result[key]) for key in ("eager_peak_bytes", "pool_bytes")]
    return [*place, *times, f"{result['ratio']:.2f}", *sizes]


def main() -> None:
    """Runs all, in turn, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 32])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--warm-up", type=int, default=6)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job is not None:
        print(json.dumps(measure(**options.job)))
        return
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/capture_gpu.py: there is no CUDA device")
    results = [
        run(
            {
                "policy": policy, "batch": batch, "tokens": options.tokens,
                "warm_up": options.warm_up, "steps": options.steps,
            }
        )
        for batch in options.batches
        for policy in options.policies
    ]  # fmt: skip
    columns = ["policy", "batch x tokens", "eager", "captured", "captured / eager", "eager peak", "pool"]
    text = (
        "eager, captured: a step, the median. eager peak: most that was allocated in a step above what was before the "
        "model, weights and optimizer included. pool: what the recording holds, without these.\n\n"
    )
    device = torch.cuda.get_device_name()
    head = header(device=device, cuda=torch.version.cuda, steps=options.steps, warm_up=options.warm_up)
    write(f"{Path(__file__).stem}", head, results, text + table(columns, [row(result) for result in results]))


if __name__ == "__main__":
    main()
