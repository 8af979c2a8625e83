"""Under FSDP2 and DDP on two ranks: the same bits as that run without policies, in either order of wrapping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.hard_modules import chain
from helpers.ranks import launch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import graphckpt
from graphckpt import Segments, Selective

RULES: dict[str, dict[str, Any]] = {
    "full": {"[123]": True},
    "selective": {"[123]": Selective("matmul")},
    "holes": {"[123]": True, "[123].down": False},
    "segments": {"": Segments(2)},
    "all that is saved, on disk": {"[123]": {"offload": "disk", "min_elements": 1}},
    "inputs and matmuls' results, in a slab": {
        "[123]": {"activation_checkpointing": Selective("matmul"), "contiguous": True, "min_elements": 1}
    },
}


def train(kind: str, rules: dict[str, Any], *, apply_first: bool) -> list[torch.Tensor]:
    """Trains three steps on this rank's own data and returns losses and full parameters."""
    model: nn.Module = chain("mlp")
    inner = model
    if apply_first:
        handle = graphckpt.apply(inner, rules)
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    if not apply_first:
        handle = graphckpt.apply(inner, rules)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(dist.get_rank())
    losses = []
    for _ in range(3):
        loss = model(torch.randn(6, 16)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if rules:
        rows = handle.explain(show=False).rows
        assert sum(row.reruns for row in rows) > 0 or sum(row.bytes_disk for row in rows) > 0
    return [*losses, *(p.full_tensor() if kind == "fsdp" else p.detach() for p in model.parameters())]


def compare(rank: int) -> None:
    """Runs on each rank."""
    del rank
    for kind in ("fsdp", "ddp"):
        plain = train(kind, {}, apply_first=True)
        for name, rules in RULES.items():
            for apply_first in (True, False):
                ours = train(kind, rules, apply_first=apply_first)
                same = all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
                assert same, f"{kind}, {name}, apply first: {apply_first}"


@pytest.mark.multi_process
def test_same_bits_on_two_ranks(tmp_path: Path) -> None:
    launch(compare, 2, tmp_path)
