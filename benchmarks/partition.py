"""Measures what cutting kept tensors over ranks saves on each of them, and costs, beside DeepSpeed's own.

Four ranks on this machine talk by gloo. Each runs the same chain of blocks on the same input, as the ranks of a
tensor-parallel group see it between blocks. Variants take turns within one process; a step is forward and backward.
DeepSpeed's rows need `DS_BUILD_OPS=0 pip install deepspeed`, and are left out without it.

    python benchmarks/partition.py [--shapes 1024x512 2048x512 1023x511] [--turns 9]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
from report import header, table, write
from torch import Tensor, nn

import graphckpt
from graphckpt.ledger.live_memory import LiveBytes

# Legend: T tokens, D width

NUM_RANKS, NUM_BLOCKS = 4, 8
HAS_DEEPSPEED = find_spec("deepspeed") is not None
Forward = Callable[[Tensor], Tensor]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, width // 4), nn.Linear(width // 4, width)

    def forward(self, x_TD: Tensor) -> Tensor:
        return x_TD + self.down(nn.functional.gelu(self.up(self.norm(x_TD))))


class Chain(nn.Module):
    """Blocks in a row; ``call`` runs one of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.call: Callable[[nn.Module, Tensor], Tensor] = lambda block, x_TD: block(x_TD)
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(NUM_BLOCKS))

    def forward(self, x_TD: Tensor) -> Tensor:
        x_TD = self.first(x_TD)
        for block in self.blocks:
            x_TD = self.call(block, x_TD)
        return x_TD


# ---- the variants: each returns what is to be active while it runs


def ours(model: Chain, **flags: Any) -> Any:
    return graphckpt.apply(model, {"blocks.*": {"activation_checkpointing": True, **flags}})


def torch_checkpoint(model: Chain) -> Any:
    model.call = lambda block, x: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
    return nullcontext()


class Mpu:
    """The few words in which DeepSpeed asks for the tensor-parallel group: here all ranks."""

    get_model_parallel_rank = staticmethod(dist.get_rank)
    get_model_parallel_world_size = staticmethod(dist.get_world_size)
    get_model_parallel_group = staticmethod(lambda: dist.group.WORLD)
    get_data_parallel_rank = staticmethod(lambda: 0)
    get_data_parallel_world_size = staticmethod(lambda: 1)


def deepspeed_checkpoint(model: Chain, *, partition: bool, contiguous: bool = False) -> Any:
    from deepspeed.runtime.activation_checkpointing import checkpointing  # noqa: PLC0415 - slow, and may be missing

    def call(block: nn.Module, x: Tensor) -> Tensor:
        # set anew for each call: DeepSpeed has one setting for the whole process, and here variants take turns
        checkpointing.configure(
            Mpu, partition_activations=partition, contiguous_checkpointing=contiguous, num_checkpoints=NUM_BLOCKS
        )
        return checkpointing.checkpoint(block, x)

    model.call = call
    return nullcontext()


VARIANTS: dict[str, Callable[[Chain], Any]] = {
    "plain step": lambda model: nullcontext(),
    "torch checkpoint": torch_checkpoint,
    "graphckpt full": ours,
    "graphckpt full, partition": lambda model: ours(model, partition=True),
    "graphckpt full, partition, contiguous": lambda model: ours(model, partition=True, contiguous=True),
    "graphckpt full, partition, offload=disk": lambda model: ours(model, partition=True, offload="disk"),
}
if HAS_DEEPSPEED:
    VARIANTS |= {
        "DeepSpeed": lambda model: deepspeed_checkpoint(model, partition=False),
        "DeepSpeed, partition": lambda model: deepspeed_checkpoint(model, partition=True),
        "DeepSpeed, partition, contiguous": lambda model: deepspeed_checkpoint(model, partition=True, contiguous=True),
    }

# ---- one rank


def step(model: Chain, x_TD: Tensor) -> None:
    model.zero_grad()
    model(x_TD).square().mean().backward()


def bytes_of(model: Chain, x_TD: Tensor) -> tuple[int, int]:
    """Returns what forward leaves alive for backward, and the most alive at once; parameters are in neither."""
    model.zero_grad()
    with LiveBytes(record_timeline=False) as live:
        live.track([x_TD, *model.parameters()])
        before = live.live_bytes
        loss = model(x_TD).square().mean()
        kept = live.live_bytes - before
        loss.backward()
    return kept, live.peak_bytes - before


def measure(rank: int, port: int, shape: tuple[int, int], turns: int, folder: str) -> None:
    """Runs on each rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=NUM_RANKS)
    if HAS_DEEPSPEED:
        import deepspeed  # noqa: PLC0415 - slow, and may be missing

        deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(1)
    x_TD = torch.randn(shape)
    width = shape[1]
    models: dict[str, Any] = {}
    found: dict[str, dict[str, Any]] = {}
    for name, make in VARIANTS.items():
        torch.manual_seed(0)
        model = Chain(width)
        active = make(model)
        try:
            step(model, x_TD)
        except AssertionError as error:
            found[name] = {"fails": f"{type(error).__name__}: {error}"}
            continue
        models[name] = model, active
        kept, peak = bytes_of(model, x_TD)
        grads = [p.grad.clone() for p in model.parameters()]
        plain = found["plain step"]["grads"] if found else grads
        same = all(torch.equal(a, b) for a, b in zip(grads, plain, strict=True))
        found[name] = {"kept": kept, "peak": peak, "same_bits": same, "grads": grads, "wall": [], "cpu": []}
    for _ in range(turns):
        for name, (model, _) in models.items():
            dist.barrier()
            wall, cpu = perf_counter(), process_time()
            step(model, x_TD)
            cpu = process_time() - cpu
            dist.barrier()
            found[name]["wall"].append(perf_counter() - wall)
            found[name]["cpu"].append(cpu)
    for row in found.values():
        row.pop("grads", None)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    while len(list(Path(folder).iterdir())) < NUM_RANKS:  # gloo can abort a process whose peer has left
        time.sleep(0.05)
    os._exit(0)


# ---- all ranks


def run(shape: tuple[int, int], turns: int) -> list[dict[str, Any]]:
    """Returns a row for each variant; bytes are the most of any rank, seconds of one step of all ranks together."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure, (port, shape, turns, folder), nprocs=NUM_RANKS)
        ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).iterdir())]
    rows = []
    for name, first in ranks[0].items():
        row: dict[str, Any] = {"shape": list(shape), "variant": name, "input_bytes": shape[0] * shape[1] * 4}
        if "fails" in first:
            rows.append(row | {"fails": first["fails"]})
            continue
        all_ranks = [rank[name] for rank in ranks]
        row |= {
            "kept_bytes": max(rank["kept"] for rank in all_ranks),
            "peak_bytes": max(rank["peak"] for rank in all_ranks),
            "same_bits": all(rank["same_bits"] for rank in all_ranks),
            "wall_seconds": first["wall"],
            "cpu_seconds": [sum(rank["cpu"][turn] for rank in all_ranks) for turn in range(turns)],
        }
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> str:
    head = [
        "variant",
        "kept MiB a rank",
        "peak MiB a rank",
        "wall ms",
        "min",
        "CPU ms, 4 ranks",
        "min",
        "bits of plain",
    ]
    parts = []
    for tokens, width in dict.fromkeys(tuple(row["shape"]) for row in rows):
        lines = []
        fails: dict[str, None] = {}
        for row in rows:
            if row["shape"] != [tokens, width]:
                continue
            if "fails" in row:
                lines.append([row["variant"], *["-"] * 6, "fails"])
                fails[row["fails"]] = None
                continue
            times = [f(row[key]) * 1e3 for key in ("wall_seconds", "cpu_seconds") for f in (median, min)]
            sizes = [f"{row[key] / 2**20:.2f}" for key in ("kept_bytes", "peak_bytes")]
            lines.append([row["variant"], *sizes, *(f"{t:.0f}" for t in times), "yes" if row["same_bits"] else "no"])
        parts += [f"## {NUM_BLOCKS} blocks, inputs of {tokens} x {width} float32", "", table(head, lines), ""]
        parts += [f"fails: `{text}`\n" for text in fails]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["1024x512", "2048x512", "1023x511"])
    parser.add_argument("--turns", type=int, default=9)
    args = parser.parse_args()
    head = header(
        n=f"{args.turns} turns of one step for each variant, after two to warm up; {NUM_RANKS} ranks by gloo",
        deepspeed=version("deepspeed") if HAS_DEEPSPEED else "not installed",
        kept="what forward leaves alive for backward, without parameters; the most of any rank",
    )
    shapes = [tuple(map(int, shape.split("x"))) for shape in args.shapes]
    rows = [row for tokens, width in shapes for row in run((tokens, width), args.turns)]
    write("partition", head, rows, show(rows))


if __name__ == "__main__":
    sys.exit(main())
