"""Measures bytes per rank where a Llama is spread over 1, 2 and 4 ranks, and reckons those of 70B on 64 devices.

Ranks talk by gloo and share the cores of this machine: seconds say what communication costs here, and nothing of what
more machines would gain. What one layer keeps for backward is linear in the widths of its activations; the factors
are found in small layers, checked against every rank's measurement, and then used for the widths of 70B.

    python benchmarks/scale.py [--turns 5]
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
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from report import header, table, write
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import graphckpt
from graphckpt.train.parallel.data_parallel import apply_fsdp
from graphckpt.train.parallel.tensor_parallel import shard_model

# Legend: B samples, T tokens

B, T = 2, 256
LAYERS = "model.layers.*"
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 512,
}
BIG = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
}
POLICIES: dict[str, Any] = {
    "none": {},
    "selective": {LAYERS: "selective"},
    "full": {LAYERS: True},
    "full, partition": {LAYERS: {"activation_checkpointing": True, "partition": True}},
}
WAYS = {1: ["alone"], 2: ["fsdp2", "tp"], 4: ["fsdp2", "tp"]}


def llama(sizes: Mapping[str, int], dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, max_position_embeddings=T, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    return LlamaForCausalLM(config).to(dtype).train()


def step(model: nn.Module, tokens_BT: Tensor) -> None:
    model.zero_grad()
    model(input_ids=tokens_BT, labels=tokens_BT, use_cache=False).loss.backward()


def kept_bytes(model: nn.Module, policies: Mapping[str, Any], tokens_BT: Tensor, *, layers_alone: bool) -> int:
    """Returns the bytes that the blocks of a rank keep on it for backward: of the layers, or of the whole model."""
    rules = dict(policies) or {LAYERS: None}
    with graphckpt.apply(model, rules) as handle:
        step(model, tokens_BT)
        rows = handle.explain(show=False).rows
    return sum(row.bytes_after for row in rows if not layers_alone or row.block.startswith("model.layers"))


# ---- what one layer keeps, from the widths of its activations


def widths(sizes: Mapping[str, int], tensor_parallel: int = 1) -> list[float]:
    """Returns elements for each token in one rank's share of a layer: the terms that its bytes are made of."""
    head = sizes["head_dim"]
    heads, pairs = (sizes[name] / tensor_parallel for name in ("num_attention_heads", "num_key_value_heads"))
    return [sizes["hidden_size"], heads * head, pairs * head, sizes["intermediate_size"] / tensor_parallel, heads, 1.0]


def factors(policies: Mapping[str, Any]) -> tuple[list[float], float]:
    """Returns bytes for each of the ``widths``, and the largest error of the fit, as a share."""
    terms, seen = [], []
    for hidden, heads, pairs, middle in (
        *((64, 4, 2, 96), (96, 4, 2, 96), (64, 8, 2, 96), (64, 8, 4, 96), (64, 4, 2, 160)),
        *((128, 4, 4, 96), (64, 4, 4, 224), (96, 8, 8, 64)),
    ):
        for head_dim in (16, 32):
            sizes = {"hidden_size": hidden, "intermediate_size": middle, "num_attention_heads": heads}
            sizes |= {"num_key_value_heads": pairs, "head_dim": head_dim, "vocab_size": 64}
            tokens_BT = torch.randint(64, (B, T))
            of_two, of_three = (
                kept_bytes(llama({**sizes, "num_hidden_layers": n}), policies, tokens_BT, layers_alone=True)
                for n in (2, 3)
            )
            terms.append(widths(sizes))
            seen.append((of_three - of_two) / (B * T))
    found, *_ = np.linalg.lstsq(np.array(terms), np.array(seen), rcond=None)
    errors = np.abs(np.array(terms) @ found - seen) / np.array(seen)
    return [abs(round(float(value), 6)) for value in found], float(errors.max())


def layer_bytes(found: list[float], sizes: Mapping[str, int], tensor_parallel: int, *, num_tokens: int) -> float:
    return num_tokens * sum(f * w for f, w in zip(found, widths(sizes, tensor_parallel), strict=True))


# ---- one rank


def measure(rank: int, port: int, num_ranks: int, way: str, turns: int, folder: str) -> None:
    """Runs on each rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=num_ranks)
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("tp" if way == "tp" else "dp",))
    tokens_BT = torch.randint(64, (B, T), generator=torch.Generator().manual_seed(0 if way == "tp" else rank))
    found = {}
    for name, policies in POLICIES.items():
        if "partition" in name and way != "tp":
            continue
        model: nn.Module = llama(SMALL)
        if way == "tp":
            shard_model(model, mesh)
        elif way == "fsdp2":
            layers = [f"model.layers.{n}" for n in range(SMALL["num_hidden_layers"])]
            apply_fsdp(model, mesh, layers, stage=3)
        weights = sum((p.to_local() if hasattr(p, "to_local") else p).nbytes for p in model.parameters())
        kept = kept_bytes(model, policies, tokens_BT, layers_alone=True)
        all_kept = kept_bytes(model, policies, tokens_BT, layers_alone=False)
        seconds = []
        with graphckpt.apply(model, policies or {LAYERS: None}):
            step(model, tokens_BT)
            for _ in range(turns):
                dist.barrier()
                started = time.perf_counter()
                step(model, tokens_BT)
                dist.barrier()
                seconds.append(time.perf_counter() - started)
        found[name] = {"weights": weights, "layers_kept": kept, "kept": all_kept, "seconds": seconds}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    while len(list(Path(folder).iterdir())) < num_ranks:  # gloo can abort a process whose peer has left
        time.sleep(0.05)
    os._exit(0)


# ---- all ranks


def run(num_ranks: int, way: str, turns: int) -> list[dict[str, Any]]:
    """Returns a row for each policy; bytes are the most of any rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure, (port, num_ranks, way, turns, folder), nprocs=num_ranks)
        ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).iterdir())]
    return [
        {"ranks": num_ranks, "way": way, "policy": name, "step_seconds": ranks[0][name]["seconds"]}
        | {key: max(rank[name][key] for rank in ranks) for key in ("weights", "layers_kept", "kept")}
        for name in ranks[0]
    ]


def predicted(found: Mapping[str, list[float]], row: Mapping[str, Any]) -> float:
    """Returns what the layers of a rank should keep."""
    cut = row["ranks"] if row["way"] == "tp" else 1
    policy = row["policy"].partition(",")[0]
    total = SMALL["num_hidden_layers"] * layer_bytes(found[policy], SMALL, cut, num_tokens=B * T)
    return total / (cut if "partition" in row["policy"] else 1)


# ---- on paper: 70B on 64 devices


def num_parameters(sizes: Mapping[str, int]) -> int:
    hidden, head = sizes["hidden_size"], sizes["head_dim"]
    queries, pairs = sizes["num_attention_heads"] * head, sizes["num_key_value_heads"] * head
    layer = 2 * hidden * queries + 2 * hidden * pairs + 3 * hidden * sizes["intermediate_size"] + 2 * hidden
    return sizes["num_hidden_layers"] * layer + 2 * sizes["vocab_size"] * hidden + hidden


def on_paper(found: Mapping[str, list[float]], *, tokens: int, tensor: int) -> list[dict[str, Any]]:
    """Returns bytes of one rank at a micro-batch of one sample, by policy and place."""
    layers = BIG["num_hidden_layers"]
    one = {name: layer_bytes(found[name], BIG, tensor, num_tokens=tokens) for name in found}
    rows = []
    for policy, place, share in (
        *(("none", "device", 1), ("selective", "device", 1), ("full", "device", 1), ("full", "host or disk", 1)),
        *(("full", "part, on the device", tensor), ("full", "part, on host or disk", tensor)),
    ):
        kept = layers * one[policy] / share
        away = kept if "disk" in place else 0
        again = one["none"] if policy != "none" else 0
        rows.append({"policy": policy, "place": place, "device": kept - away, "away": away, "again": again})
    return rows


def states_on_paper(tensor: int, data: int) -> list[dict[str, Any]]:
    """Returns bytes of one rank for weights, gradients and Adam's two moments in float32, by stage of ZeRO."""
    share = num_parameters(BIG) * 4 / tensor
    cut = {0: (1, 1, 1), 1: (1, 1, data), 2: (1, data, data), 3: (data, data, data)}
    return [
        {"stage": stage, "weights": share / w, "gradients": share / g, "moments": 2 * share / m}
        for stage, (w, g, m) in cut.items()
    ]


GIB, MIB = 2**30, 2**20


def show(rows: list[dict[str, Any]], paper: Mapping[str, Any], fits: Mapping[str, Any]) -> str:
    head = ["ranks", "way", "policy", "weights MiB", "kept MiB", "of that layers", "predicted", "step ms", "min"]
    lines = [
        [str(row["ranks"]), row["way"], row["policy"]]
        + [f"{row[key] / MIB:.3f}" for key in ("weights", "kept", "layers_kept", "predicted")]
        + [f"{f(row['step_seconds']) * 1e3:.0f}" for f in (median, min)]
        for row in rows
    ]
    terms = ["hidden", "queries", "keys", "middle", "heads", "1"]
    devices = paper["tensor"] * paper["data"]
    for row in paper["states"]:
        row["all"] = row["weights"] + row["gradients"] + row["moments"]
    parts = [
        f"## Measured: {SMALL['num_hidden_layers']} layers of {SMALL['hidden_size']}, {B} x {T} tokens a rank",
        "",
        "bfloat16; bytes of one rank, the most of any. `fsdp2` cuts weights (stage 3), each rank has its own samples;",
        "`tp` cuts matrices, all ranks have the same samples. Step: forward and backward, all ranks on two cores.",
        "",
        table(head, lines),
        "",
        "What the layers keep beyond the prediction is the table of rotary positions. Autograd also holds the weights",
        "that FSDP2 gathers, but not their memory, which is freed after each layer's forward.",
        "",
        "## Bytes that one layer keeps for each token, per element of",
        "",
        table(
            ["policy", *terms, "largest error of the fit"],
            [[name, *(f"{v:.1f}" for v in fit["factors"]), f"{fit['error']:.2%}"] for name, fit in fits.items()],
        ),
        "",
        f"## On paper: {num_parameters(BIG):,} parameters on {devices} devices",
        "",
        f"Llama 3 70B's sizes, tp {paper['tensor']} x dp {paper['data']}; {paper['tokens']} tokens in a micro-batch.",
        "Not measured; bfloat16, GiB of one rank.",
        "`again`: what one layer takes beside that while it runs a second time. Head and loss are not in it.",
        "",
        table(
            ["policy", "place", "on the device", "elsewhere", "again"],
            [
                [row["policy"], row["place"], *(f"{row[key] / GIB:.2f}" for key in ("device", "away", "again"))]
                for row in paper["kept"]
            ],
        ),
        "",
        "Weights, gradients and Adam's moments in float32:",
        "",
        table(
            ["stage of ZeRO", "weights", "gradients", "moments", "all"],
            [
                [str(row["stage"]), *(f"{row[key] / GIB:.2f}" for key in ("weights", "gradients", "moments", "all"))]
                for row in paper["states"]
            ],
        ),
    ]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    head = header(n=f"{args.turns} turns of one step after three to warm up; ranks by gloo, all on this machine")
    fits = {}
    for name in ("none", "selective", "full"):
        found, error = factors(POLICIES[name])
        fits[name] = {"factors": found, "error": error}
    coefficients = {name: fit["factors"] for name, fit in fits.items()}
    rows = [row for num_ranks, ways in WAYS.items() for way in ways for row in run(num_ranks, way, args.turns)]
    for row in rows:
        row["predicted"] = predicted(coefficients, row)
    paper: dict[str, Any] = {"tokens": 8192, "tensor": 8, "data": 8}
    paper["kept"] = on_paper(coefficients, tokens=paper["tokens"], tensor=paper["tensor"])
    paper["states"] = states_on_paper(paper["tensor"], paper["data"])
    text = show(rows, paper, fits)
    write("scale", head, [*rows, {"factors": fits}, {"on_paper": paper}], text)


if __name__ == "__main__":
    sys.exit(main())
