"""Measures what moving kept tensors to host memory saves and costs on a CUDA device, beside other ways to do so.

Each variant runs in a process of its own: it builds the model (random weights, bfloat16), runs steps to warm up and
steps to time. A step is forward and backward, without an optimizer, whose state is the same in all variants.

    python benchmarks/stores_gpu.py [--models gpt2 gpt-1.3b] [--tokens 1024 2048 4096 8192] [--batch 1] [--steps 10]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from report import header, spread, table, write
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import graphckpt
from graphckpt.units import format_bytes, format_seconds

# Legend: B batch, T tokens

SHAPES: dict[str, dict[str, int]] = {
    "gpt2": {"n_embd": 768, "n_layer": 12, "n_head": 12},  # 124 million parameters
    "gpt-1.3b": {"n_embd": 2048, "n_layer": 24, "n_head": 16},
}
LAYERS = "transformer.h.*"


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


# ---- the variants: what is done to the model, and what is around its forward

Forward = Callable[[], AbstractContextManager[Any]]


def plain(model: nn.Module) -> Forward:
    """Nothing."""
    return nullcontext


def ours(**fields: Any) -> Callable[[nn.Module], Forward]:
    """The policy on every layer."""

    def set_up(model: nn.Module) -> Forward:
        graphckpt.apply(model, {LAYERS: fields})
        return nullcontext

    return set_up


def transformers_own(*, offload: bool) -> Callable[[nn.Module], Forward]:
    """Checkpointing as Transformers has it."""

    def set_up(model: Any) -> Forward:
        model.activation_checkpointing_enable(offload=offload)
        return nullcontext

    return set_up


def torch_save_on_cpu(model: nn.Module) -> Forward:
    """All that is saved goes to pinned memory."""
    return lambda: torch.autograd.graph.save_on_cpu(pin_memory=True)


VARIANTS: dict[str, Callable[[nn.Module], Forward]] = {
    "plain": plain,
    "full": ours(activation_checkpointing=True),
    "full, offload": ours(activation_checkpointing=True, offload=True),
    "offload all": ours(offload=True),
    "Transformers": transformers_own(offload=False),
    "Transformers, offload": transformers_own(offload=True),
    "torch save_on_cpu": torch_save_on_cpu,
}


def measure(name: str, variant: str, batch: int, tokens: int, warm_up: int, steps: int) -> dict[str, Any]:
    """Runs one variant in this process. Bytes are those of the allocators, seconds those of the wall."""
    registered = Registered(torch.cuda.cudart())
    torch.cuda.cudart = lambda: registered  # type: ignore[assignment]
    torch.manual_seed(0)
    config = GPT2Config(use_cache=False, loss_type="ForCausalLM", n_positions=tokens, **SHAPES[name])
    with torch.device("cuda"):
        model = GPT2LMHeadModel(config).to(torch.bfloat16).train()
        ids_BT = torch.randint(config.vocab_size, (batch, tokens))
    around = VARIANTS[variant](model)

    def forward() -> torch.Tensor:
        with around():
            loss: torch.Tensor = model(input_ids=ids_BT, labels=ids_BT).loss
        return loss

    for _ in range(warm_up):
        forward().backward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = forward()
    kept = torch.cuda.memory_allocated() - before
    loss.backward()
    seconds = []
    for _ in range(steps):
        torch.cuda.synchronize()
        begin = perf_counter()
        forward().backward()
        torch.cuda.synchronize()
        seconds.append(perf_counter() - begin)
    return {
        "model": name,
        "batch": batch,
        "tokens": tokens,
        "variant": variant,
        "kept_bytes": kept,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "pinned_bytes": registered.peak + torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0),
        "step_seconds": spread(seconds),
        "loss": loss.item(),
    }


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Runs ``measure`` in a process of its own; a variant that runs out of memory is a row as well."""
    done = subprocess.run(
        [sys.executable, __file__, "--job", json.dumps(job)], capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    if "OutOfMemoryError" in done.stderr:
        return {"model": job["name"], **{key: job[key] for key in ("batch", "tokens", "variant")}, "failed": "memory"}
    raise SystemExit(done.stderr)


def row(result: dict[str, Any]) -> list[str]:
    """Returns the cells of the table."""
    place = [result["variant"], result["model"], f"{result['batch']} x {result['tokens']}"]
    if "failed" in result:
        return [*place, "out of memory", "-", "-", "-"]
    sizes = [format_bytes(result[key]) for key in ("kept_bytes", "peak_bytes", "pinned_bytes")]
    return [*place, *sizes, format_seconds(result["step_seconds"]["median"])]


def main() -> None:
    """Runs all, in turn, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 2048, 4096, 8192])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job is not None:
        print(json.dumps(measure(**options.job)))
        return
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/stores_gpu.py: there is no CUDA device")
    results = [
        run(
            {
                "name": model, "variant": variant, "batch": options.batch, "tokens": tokens,
                "warm_up": options.warm_up, "steps": options.steps,
            }
        )
        for model in options.models
        for tokens in options.tokens
        for variant in options.variants
    ]  # fmt: skip
    columns = ["variant", "model", "batch x tokens", "kept", "peak", "pinned", "step"]
    text = (
        "kept: allocated between forward and backward. peak: most that was allocated, weights and gradients included. "
        "pinned: most host memory that was pinned. step: forward and backward, the median.\n\n"
    )
    device = torch.cuda.get_device_name()
    head = header(device=device, cuda=torch.version.cuda, steps=options.steps, warm_up=options.warm_up)
    write(f"{Path(__file__).stem}", head, results, text + table(columns, [row(result) for result in results]))


if __name__ == "__main__":
    main()
