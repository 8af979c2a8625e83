"""Measures CPU time and memory of plans for clusters, each in a process of its own.

OMP_NUM_THREADS=1 python benchmarks/cluster_cost.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from report import header, table, write
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

import graphckpt
from graphckpt.units import format_bytes

SIZES = {  # hidden, intermediate, layers, heads, key heads
    "8B": (4096, 14336, 32, 32, 8),
    "70B": (8192, 28672, 80, 64, 8),
}
CASES = {  # size, data-parallel ranks, tensor-parallel ranks, samples of a rank
    "8B, FSDP2 8": ("8B", 8, 1, 2),
    "70B, FSDP2 8 x TP 8": ("70B", 8, 8, 1),
}
LENGTH = 8192


def make(size: str, tensor_parallel: int, batch: int) -> tuple[nn.Module, Callable[[], None]]:
    hidden, intermediate, num_layers, heads, key_heads = SIZES[size]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        vocab_size=128256,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    sizes = dist.get_world_size() // tensor_parallel, tensor_parallel
    mesh = init_device_mesh("cuda", sizes, mesh_dim_names=("dp", "tp"))
    if tensor_parallel > 1:
        plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        for layer in model.model.layers:
            parallelize_module(layer, mesh["tp"], plan)
    precision = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh["dp"], mp_policy=precision)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(batch, LENGTH, dtype=torch.long)

    def step() -> None:
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def plan(case: str) -> None:
    size, data_parallel, tensor_parallel, batch = CASES[case]
    ranks = data_parallel * tensor_parallel
    found = graphckpt.plan(
        lambda: make(size, tensor_parallel, batch), device="h200", world_size=ranks, memory_budget="max", progress=False
    )
    print(f"{format_bytes(found.predicted_peak_bytes)}; {format_bytes(found.predicted_reserved_bytes)}")


def main() -> None:
    head = header(n="one run each; CPU time, user and system, with imports")
    rows = []
    for case in CASES:
        process = subprocess.Popen([sys.executable, __file__, case], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        peak, _, reserved = process.stdout.read().strip().partition("; ")
        _, status, used = os.wait4(process.pid, 0)
        assert status == 0, case
        seconds, memory = used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20
        rows.append({"case": case, "cpu_seconds": seconds, "GiB": memory, "peak": peak, "reserved": reserved})
    cells = [[r["case"], f"{r['cpu_seconds']:.1f}", f"{r['GiB']:.2f}", r["peak"], r["reserved"]] for r in rows]
    text = (
        f'Llama 3.1 in float32, gathered in bfloat16, {LENGTH} tokens, AdamW fused, `memory_budget="max"` on h200.\n\n'
    )
    columns = ["plan", "CPU seconds", "resident GiB", "peak of a rank", "reserved"]
    write("cluster_cost", head, rows, text + table(columns, cells))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        plan(sys.argv[1])
    else:
        main()
