"""Policies under every way to spread a model over ranks, and products of these ways: 50 losses, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.layer_stacks import stack_of
from helpers.modules import as_module
from helpers.ranks import launch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import graphckpt
from graphckpt import Segments, Selective

# Legend: B samples, T tokens, D width
B, T, D = 2, 8, 16
STEPS = 50
"""Learned in each run; the test that is not slow takes fewer."""


@as_module(lambda: {"up": nn.Linear(D, 2 * D), "down": nn.Linear(2 * D, D)})
def Mlp(self: Any, x_BTD: Tensor) -> Tensor:
    return self.down(torch.nn.functional.gelu(self.up(x_BTD)))


@as_module(lambda: {"norm": nn.LayerNorm(D), "mlp": Mlp(), "drop": nn.Dropout(0.1), "idle": nn.Identity()})
def Block(self: Any, x_BTD: Tensor) -> Tensor:
    return x_BTD + self.drop(self.mlp(self.norm(x_BTD)))


def chain() -> nn.Sequential:
    torch.manual_seed(1)
    return stack_of(Block, 4)


POLICIES: dict[Any, Any] = {
    "0": True,
    "1": {"activation_checkpointing": Selective("matmul"), "contiguous": True, "min_elements": 1},
    "2": {"activation_checkpointing": True, "offload": "disk", "min_elements": 1},
    "3": {"activation_checkpointing": True},
    "3.mlp": {"activation_checkpointing": False},
}
IN_EITHER_ORDER: list[dict[Any, Any]] = [POLICIES, {"": Segments(2)}, {"[123]": {"offload": "disk", "min_elements": 1}}]
"""Put on before and after wrapping with DDP and FSDP2."""

# ---- ways to spread: each gets the chain and returns what to call


def ddp(model: nn.Sequential) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def ddp_with_unused(model: nn.Sequential) -> nn.Module:
    for block in model:
        block.idle = nn.Linear(D, D)  # never called
    return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)


def sharded(model: nn.Sequential, mesh: DeviceMesh | None = None, **how: Any) -> nn.Module:
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh, **how)
    return fully_shard(model, mesh=mesh, **how)


def in_half_precision(model: nn.Sequential) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return sharded(model, mp_policy=policy, reshard_after_forward=True)


def tensor_parallel(model: nn.Sequential, mesh: DeviceMesh | None = None) -> nn.Sequential:
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    for block in model:
        parallelize_module(block, mesh, {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()})
    return model


def sequence_parallel(model: nn.Sequential, mesh: DeviceMesh | None = None) -> nn.Sequential:
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    plan: dict[str, Any] = {
        "norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Shard(1)),
        "mlp.up": ColwiseParallel(input_layouts=Shard(1)),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    for block in model:
        parallelize_module(block, mesh, plan)
    return model


def square() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def fsdp_and_tensor_parallel(model: nn.Sequential) -> nn.Module:
    mesh = square()
    return sharded(tensor_parallel(model, mesh["tp"]), mesh["dp"], reshard_after_forward=True)


def fsdp_and_sequence_parallel(model: nn.Sequential) -> nn.Module:
    mesh = square()
    return sharded(sequence_parallel(model, mesh["tp"]), mesh["dp"], reshard_after_forward=True)


def resharding(*, after_forward: bool) -> Callable[[nn.Sequential], nn.Module]:
    return lambda model: sharded(model, reshard_after_forward=after_forward)


ON_TWO: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "ddp": ddp,
    "fsdp2, resharded": resharding(after_forward=True),
    "fsdp2, not resharded": resharding(after_forward=False),
    "fsdp2, on the host": lambda model: sharded(model, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "fsdp2, mixed precision": in_half_precision,
    "tp": tensor_parallel,
    "tp + sp": sequence_parallel,
}
ON_FOUR: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "ddp, unused parameters": ddp_with_unused,
    "fsdp2 x tp": fsdp_and_tensor_parallel,
    "fsdp2 x tp + sp": fsdp_and_sequence_parallel,
}
# Policies are put on after wrapping; before it elsewhere.
AFTER = {"fsdp2, not resharded", "tp + sp", "fsdp2 x tp", "fsdp2 x tp + sp"}
SAME_AS_BEFORE = {"fsdp2, not resharded", "fsdp2, on the host"}  # how weights are held changes no bit either
SAME_ON_TP = {"tp": 2, "fsdp2 x tp": 2}  # so many ranks hold equal tensors, which may be cut over them


def batches(name: str, steps: int) -> Iterator[Tensor]:
    """Yields what this rank learns from: ranks that share matrices see one batch, or one part of its tokens each."""
    num_alike = 2 if "tp" in name.split() else 1
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank // num_alike)
    for _ in range(steps):
        x_BTD = torch.randn(B, T, D, generator=generator)
        yield x_BTD.chunk(num_alike, dim=1)[rank % num_alike].contiguous() if "sp" in name.split() else x_BTD


def train(name: str, policies: dict[Any, Any], steps: int, *, is_after: bool = False) -> tuple[list[Tensor], Any]:
    """Returns the losses and this rank's weights, and what the policies kept."""
    inner = chain()
    handle = None if is_after or name in AFTER else graphckpt.apply(inner, policies)
    model = (ON_TWO | ON_FOUR)[name](inner)
    handle = handle or graphckpt.apply(inner, policies)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(dist.get_rank() // SAME_ON_TP.get(name, 1))
    seen: list[Tensor] = []
    for x_BTD in batches(name, steps):
        loss = model(x_BTD).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    rows = handle.explain(show=False).rows
    handle.remove()
    return seen + [p.to_local() if isinstance(p, DTensor) else p.detach() for p in model.parameters()], rows


def compare(rank: int, names: list[str], steps: int) -> None:
    del rank
    plain: list[Tensor] = []
    for name in names:
        policies = dict(POLICIES)
        if name in SAME_ON_TP:
            mesh = square()["tp"] if name == "fsdp2 x tp" else True
            policies["0"] = {"activation_checkpointing": True, "partition": mesh, "min_elements": 1}
        if name not in SAME_AS_BEFORE:
            plain, _ = train(name, {}, steps)
        ours, rows = train(name, policies, steps)
        assert len(plain) > steps
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True)), name
        assert plain[steps - 1] < plain[0] / (2 if steps == STEPS else 1), name
        assert sum(row.reruns for row in rows) >= 3, name
        assert sum(row.bytes_disk for row in rows) > 0, name
        kept, before = (sum(getattr(row, field) for row in rows) for field in ("bytes_after", "bytes_before"))
        assert kept < before, name
        in_either_order = IN_EITHER_ORDER if name in {"ddp", "fsdp2, resharded"} else []
        for rules, is_after in product(in_either_order, (False, True)):
            ours, rows = train(name, rules, steps, is_after=is_after)
            assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True)), name
            assert sum(row.reruns + row.bytes_disk for row in rows) > 0, name


@pytest.mark.multi_process
@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "ways"), [(2, ON_TWO), (4, ON_FOUR)])
def test_fifty_losses_are_those_without_policies(tmp_path: Path, num_ranks: int, ways: dict[str, Any]) -> None:
    launch(compare, num_ranks, tmp_path, list(ways), STEPS)


@pytest.mark.multi_process
def test_the_first_losses_are_those_without_policies(tmp_path: Path) -> None:
    launch(compare, 2, tmp_path, ["ddp", "fsdp2, resharded", "tp"], 8)
