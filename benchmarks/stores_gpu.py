"""Measures what moving kept tensors to host memory saves and costs on a CUDA device, beside other ways to do so.

Each variant runs in a process of its own: it builds the model (random weights, bfloat16), runs steps to warm up and
steps to time. A step is forward and backward, without an optimizer, whose state is the same in all variants.

    python benchmarks/stores_gpu.py [--models gpt2 gpt-1.3b] [--tokens 1024 4096] [--batch 1] [--steps 10]
        [--minutes 9] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from device import Cuda, device_for
from jobs import Jobs, arguments, cell
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
        if offload or hasattr(model, "activation_checkpointing_enable"):  # 5.17 has neither name nor places
            model.activation_checkpointing_enable(offload=offload)
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return nullcontext

    return set_up


def torch_save_on_cpu(model: nn.Module) -> Forward:
    """All that is saved goes to pinned memory."""
    return lambda: torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())


VARIANTS: dict[str, Callable[[nn.Module], Forward]] = {
    "plain": plain,
    "full": ours(activation_checkpointing=True),
    "full, offload": ours(activation_checkpointing=True, offload=True),
    "offload all": ours(offload=True),
    "Transformers": transformers_own(offload=False),
    "Transformers, offload": transformers_own(offload=True),
    "torch save_on_cpu": torch_save_on_cpu,
}


def measure(
    model: str, variant: str, batch: int, tokens: int, warm_up: int, steps: int, sizes: dict[str, int], device: Cuda
) -> dict[str, Any]:
    """Runs one variant in this process. Bytes are those of the allocators, seconds those of the wall."""
    registered = Registered(torch.cuda.cudart()) if device.kind == "cuda" else None
    if registered is not None:
        torch.cuda.cudart = lambda: registered  # type: ignore[assignment]
    torch.manual_seed(0)
    config = GPT2Config(use_cache=False, loss_type="ForCausalLM", n_positions=tokens, **(sizes or SHAPES[model]))
    with torch.device(device.kind):
        network = GPT2LMHeadModel(config).to(torch.bfloat16).train()
        ids_BT = torch.randint(config.vocab_size, (batch, tokens))
    around = VARIANTS[variant](network)

    def forward() -> torch.Tensor:
        with around():
            loss: torch.Tensor = network(input_ids=ids_BT, labels=ids_BT).loss
        return loss

    def step() -> None:
        forward().backward()

    for _ in range(warm_up):
        step()
    before = device.allocated()
    loss = forward()
    after = device.allocated()
    loss.backward()
    peak = device.peak_of(step, 0)
    seconds = []
    for _ in range(steps):
        device.synchronize()
        begin = perf_counter()
        step()
        device.synchronize()
        seconds.append(perf_counter() - begin)
    row = {"model": model, "batch": batch, "tokens": tokens, "variant": variant}
    row |= {"kept_bytes": None, "peak_bytes": peak, "pinned_bytes": None}
    if before is not None and after is not None:
        row["kept_bytes"] = after - before
    if registered is not None:
        row["pinned_bytes"] = registered.peak + torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)
    return {**row, "step_seconds": spread(seconds), "loss": loss.item()}


def row(result: dict[str, Any]) -> list[str]:
    """Returns the cells of the table."""
    place = [result["variant"], result["model"], f"{result['batch']} x {result['tokens']}"]
    if "failed" in result:
        return [*place, f"failed: {result['failed']}", *["-"] * 3]
    sizes = [cell(result[key], format_bytes) for key in ("kept_bytes", "peak_bytes", "pinned_bytes")]
    return [*place, *sizes, format_seconds(result["step_seconds"]["median"])]


def main() -> None:
    """Runs all, in turn, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 4096])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    arguments(parser, minutes=9)
    options = parser.parse_args()
    device = device_for(is_dry=options.dry_run)
    if options.job is not None:
        print(json.dumps(measure(**options.job, device=device)))
        return
    sizes: dict[str, int] = {}
    if options.dry_run:
        options.models, options.tokens, options.warm_up, options.steps = ["gpt2"], [8], 2, 2
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2}
    head = header(**device.header(), steps=options.steps, warm_up=options.warm_up)
    jobs = Jobs(__file__, options, head)
    for tokens in options.tokens:
        for model in options.models:
            for variant in options.variants:
                shape = {"batch": options.batch, "tokens": tokens, "sizes": sizes}
                times = {"warm_up": options.warm_up, "steps": options.steps}
                jobs.run({"model": model, "variant": variant, **shape, **times})
    columns = ["variant", "model", "batch x tokens", "kept", "peak", "pinned", "step"]
    text = (
        "kept: allocated between forward and backward. peak: most that was allocated, weights and gradients included. "
        "pinned: most host memory that was pinned. step: forward and backward, the median.\n\n"
    )
    write(
        Path(__file__).stem, head, jobs.rows, text + table(columns, [row(result) for result in jobs.rows]), options.out
    )


if __name__ == "__main__":
    main()
