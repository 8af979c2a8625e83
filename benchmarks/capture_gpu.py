"""Measures what capturing the step of GPT-2 124M as one CUDA graph saves, beside the same Graph without it.

Each pair of steps runs in a process of its own, the second when the model of the first is gone, so that each has the
whole memory. The first pair is that of the goal: eager steps without recomputation, and captured ones that recompute
every layer. A step is forward, backward and AdamW under bfloat16 autocast. What counts is the ratio.

    python benchmarks/capture_gpu.py [--batches 8 1] [--policies none full] [--tokens 1024] [--steps 20] [--minutes 9]
        [--out FOLDER] [--name NAME]
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from device import Cuda, device_for
from jobs import ERROR_LINES, Jobs, answer, arguments, cell
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


TINY = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
"""GPT-2 of dry runs; with 32 tokens the input of a layer is large enough to be offloaded."""


class Step(Graph):
    """One training step of GPT-2."""

    def __init__(self, model: Any, policy: dict[str, Any], capture: Any, *, autocast: bool = True) -> None:
        super().__init__()
        self.model = model
        for block in self.model.transformer.h:
            block.config.update(policy)
        rate = torch.tensor(1e-4, device=model.device)
        is_capturable = model.device.type == "cuda"
        self.add_optimizer(torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=is_capturable))
        if autocast:
            self.config.enable_amp(dtype=torch.bfloat16)
        self.config.capture = capture

    def build(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Runs forward and backward."""
        loss: torch.Tensor = self.model(input_ids=ids_BT, labels=ids_BT).loss
        self.after_forward()
        loss.backward()
        return loss

    def after_forward(self) -> None:
        """Called between forward and backward."""


def model_of(tokens: int, device: Cuda, **sizes: int) -> nn.Module:
    """Builds GPT-2 124M, or one of other sizes, with the same weights at every call."""
    torch.manual_seed(0)
    config = GPT2Config(use_cache=False, loss_type="ForCausalLM", n_positions=tokens, **sizes)
    with torch.device(device.kind):
        return GPT2LMHeadModel(config).train()


def captures_of(graph: Graph) -> dict[str, Any]:
    """Returns how a Graph's step runs, as cells of a row; it need not have run."""
    captured = graph._step.captured
    text = {"capture": graph._step.capture_text}
    if captured is None:
        return text
    return {**text, "notes": captured.notes, "pool_bytes": captured.backend.pool_bytes()}


def failure(error: Exception) -> dict[str, Any]:
    """Returns what a row says of an error: its first line, and more lines with where it was raised."""
    lines = [f"{type(one).__name__}: {one}" for one in (error, error.__cause__) if one is not None]
    lines += traceback.format_exception(error)
    split = [line for text in lines for line in text.splitlines()]
    return {"failed": split[0], "error": split[:ERROR_LINES]}


GOAL = [("none", "eager"), ("full", "captured")]


def pairs_of(policies: list[str]) -> list[list[tuple[str, str]]]:
    """Returns which policies and kinds of steps are measured together, the pair of the goal first."""
    has_goal = {"none", "full"}.issubset(policies)
    rest = [[(policy, kind) for kind in ("eager", "captured")] for policy in policies]
    if not has_goal:
        return rest
    return [GOAL, [each for pair in rest for each in pair if each not in GOAL and each[0] in ("none", "full")]] + [
        pair for pair in rest if pair[0][0] not in ("none", "full")
    ]


def measure(
    pair: list[tuple[str, str]],
    batch: int,
    tokens: int,
    warm_up: int,
    steps: int,
    sizes: dict[str, int],
    device: Cuda,
) -> Iterator[dict[str, Any]]:
    """Runs one pair in this process. Seconds are those of the wall, bytes those of the allocator."""
    ids_BT = torch.randint(sizes.get("vocab_size", 50257), (batch, tokens), device=device.kind)
    for policy, kind in pair:
        capture = device.capture if kind == "captured" else "eager"
        row = {"policy": policy, "batch": batch, "tokens": tokens, "kind": kind}
        before = device.bytes_now()
        graph = Step(model_of(tokens, device, **sizes), POLICIES[policy], capture)
        try:
            for _ in range(warm_up):
                graph(ids_BT)
            row |= device.peak_of(partial(graph, ids_BT), before)
            row["seconds"] = spread(device.seconds_of(partial(graph, ids_BT), steps))
            row["static_bytes"] = device.bytes_now().allocated - before.allocated
        except Exception as error:  # the other half of the pair still counts
            row |= failure(error)
        yield {**row, **captures_of(graph)}
        del graph
        device.release()


def row(result: dict[str, Any]) -> list[str]:
    """Returns the cells of the table."""
    of_job = [", ".join(each) for each in zip(*result.get("pair", []), strict=True)]  # of one that has failed
    policy, kind = of_job or (result["policy"], result["kind"])
    place = [policy, f"{result['batch']} x {result['tokens']}", kind]
    if "failed" in result:
        return [*place, f"failed: {result['failed']}", *["-"] * 4]
    sizes = [cell(result.get(key), format_bytes) for key in ("peak_bytes", "static_bytes", "pool_bytes")]
    return [*place, format_seconds(result["seconds"]["median"]), *sizes, result["capture"] or "-"]


def main() -> None:
    """Runs all, in turn, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--batches", nargs="+", type=int, default=[8, 1, 16])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--warm-up", type=int, default=6)
    parser.add_argument("--steps", type=int, default=20)
    arguments(parser, minutes=9)
    options = parser.parse_args()
    device = device_for(is_dry=options.dry_run)
    if options.job is not None:
        answer(measure(**options.job, device=device))
        return
    sizes: dict[str, int] = {}
    if options.dry_run:
        options.batches, options.tokens, options.warm_up, options.steps = [1], 32, 4, 2
        sizes = TINY
    head = header(**device.header(), steps=options.steps, warm_up=options.warm_up)
    jobs = Jobs(__file__, options, head)
    for batch in options.batches:
        for pair in pairs_of(options.policies):
            times = {"warm_up": options.warm_up, "steps": options.steps}
            jobs.run({"pair": pair, "batch": batch, "tokens": options.tokens, **times, "sizes": sizes})
    columns = ["policy", "batch x tokens", "step", "time", "peak", "static", "pool", "capture"]
    text = (
        "time: a step, the median. peak: most that was allocated in a step above what was before the model; of "
        "captured steps, beside the pool. static: what stays between steps. pool: the memory of captures.\n\n"
    )
    write(jobs.name, head, jobs.rows, text + table(columns, [row(result) for result in jobs.rows]), options.out)


if __name__ == "__main__":
    main()
