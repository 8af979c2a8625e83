"""Weights that are gathered for a forward and freed behind it, as by FSDP, below a block whose store moves tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.layer_stacks import stack_of
from helpers.ranks import launch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import graphckpt
from graphckpt.stores import TensorGroup
from graphckpt.stores.placement import placement_of
from graphckpt.stores.tensor_store import TensorStore

# Legend: N rows, D width
N, D = 16, 64

pytestmark = pytest.mark.filterwarnings("ignore:offload to 'disk' saves")  # where the temporary folder is in memory

KEEP, FULL, SELECTIVE = False, True, "selective"
STORES: dict[str, dict[str, Any]] = {
    "disk": {"offload": "disk", "min_elements": 1},
    "host": {"offload": True, "min_elements": 1},
    "slab": {"contiguous": True, "min_elements": 1},
}


class _SavesDetached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x_ND, weight.detach())
        return x_ND @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x_ND, weight = ctx.saved_tensors
        return gradients[0] @ weight, gradients[0].t() @ x_ND


def by_halves(x_ND: Tensor, weight: Tensor) -> Tensor:
    return torch.cat([x_ND @ half.t() for half in weight.chunk(2)], 1)


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear, which saves its transpose": F.linear,
    "an alias without history": _SavesDetached.apply,
    "views of a part": by_halves,
    "a view of a view": lambda x_ND, weight: x_ND @ weight[None].transpose(1, 2)[0],
}


class _Shard(nn.Parameter):
    """A parameter of a class of its own, in the place of the gathered one."""


class Sharded(nn.Module):
    """Has its weight within forward, and from its own backward on."""

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.product = product
        values = torch.randn(D, D) / 8
        self.weight = _Shard(values)
        self.gathered = [nn.Parameter(values.clone())]  # not one of its parameters

    def fill(self, *_: object) -> None:
        storage = self.gathered[0].untyped_storage()
        if not storage.nbytes():
            storage.resize_(D * D * 4)
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(self.gathered[0]):
                self.gathered[0].copy_(self.weight)
        self._parameters["weight"], self.shard = self.gathered[0], [self._parameters["weight"]]

    def free(self) -> None:
        self._parameters["weight"] = self.shard[0]
        if not self.weight.is_cuda:  # the simulated device cannot; what counts there is what is moved
            self.gathered[0].untyped_storage().resize_(0)

    def forward(self, x_ND: Tensor) -> Tensor:
        self.fill()
        y_ND = self.product(x_ND, self.weight)
        self.free()
        if y_ND.requires_grad:
            y_ND.register_hook(self.fill)
        return y_ND


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("product", PRODUCTS)
def test_no_view_of_a_gathered_weight_is_moved(
    product: str, store: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[torch.UntypedStorage] = []
    new_piece = TensorStore._new_piece

    def record(self: TensorStore, tensor: Tensor, storage: torch.UntypedStorage, *more: Any) -> Any:
        moved.append(storage)
        return new_piece(self, tensor, storage, *more)

    monkeypatch.setattr(TensorStore, "_new_piece", record)

    def step(policy: dict[str, Any] | None) -> list[Tensor]:
        torch.manual_seed(0)
        child = Sharded(PRODUCTS[product]).to(device)
        child.gathered = [nn.Parameter(child.weight.detach().clone())]
        model = nn.Sequential(nn.Sequential(nn.Linear(D, D), child, nn.GELU()), nn.Linear(D, 2)).to(device)
        if policy is not None:
            graphckpt.apply(model, {"0": policy})
        freed = child.gathered[0].untyped_storage()
        x_ND = torch.randn(N, D, device=device)
        loss = model(x_ND).square().mean()
        assert not any(storage is freed for storage in moved)
        assert bool(moved) == (policy is not None and (store != "host" or device == "cuda")), "the activations are"
        loss.backward()
        weights = [*model[0][0].parameters(), *model[1].parameters(), *child.gathered]  # type: ignore[index]
        gradients = [weight.grad for weight in weights]
        moved.clear()
        return [gradient for gradient in gradients if gradient is not None]

    plain = step(None)
    ours = step({"activation_checkpointing": False, **STORES[store]})
    assert len(plain) == len(ours) == 5
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


@pytest.mark.parametrize("store", STORES)
def test_a_view_of_a_parameter_of_another_module_stays(store: str) -> None:
    """As of an embedding whose weight is an argument of the head."""
    keeper = placement_of(STORES[store]).store
    group = keeper.open_group(TensorGroup("block", list, lambda _: None))
    weight = nn.Parameter(torch.randn(D, D))
    for view in (weight.t(), weight[:8], weight.view(-1)[D:]):
        kept = keeper.put(view, group)
        assert isinstance(kept, Tensor)
        assert kept.data_ptr() == view.data_ptr()
    is_moved = not isinstance(keeper.put(torch.randn(D, D), group), Tensor)
    assert is_moved == (store != "host"), "tensors of the CPU are in host memory already"


# --- FSDP2 itself, on two and four ranks of gloo


class Layer(nn.Module):
    def __init__(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(3 * D, D)
        self.product = product
        if product is not F.linear:
            self.up.forward = lambda x_ND: product(x_ND, self.up.weight) + self.up.bias  # type: ignore[method-assign]

    def forward(self, x_ND: Tensor) -> Tensor:
        return x_ND + self.down(F.gelu(self.up(self.norm(x_ND))))


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WAYS: dict[str, dict[str, Any]] = {
    "resharded": {"reshard_after_forward": True},
    "not resharded": {"reshard_after_forward": False},
    "mixed precision": {"mp_policy": HALF},
    "mixed precision, not resharded": {"mp_policy": HALF, "reshard_after_forward": False},
    "saved without history": {},
    "tensor parallel": {},
}


def train(way: str, policy: Any) -> list[Tensor]:
    torch.manual_seed(0)
    product = _SavesDetached.apply if way == "saved without history" else F.linear
    model = stack_of(lambda: Layer(product), 3).append(nn.Linear(D, 4))
    if way == "tensor parallel":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for layer in model[:3]:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = mesh["dp"]
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model[:3]:
        for module in (layer.up, layer.down, layer):
            fully_shard(module, mesh=mesh, **WAYS[way])
    fully_shard(model, mesh=mesh, **WAYS[way])
    if policy is not None:
        graphckpt.apply(model, {"[0-2]": policy})
    torch.manual_seed(1 + (0 if way == "tensor parallel" else dist.get_rank()))
    for _ in range(3):
        model(torch.randn(N, D)).square().mean().backward()
    return [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]  # type: ignore[misc]


def compare(_: int, ways: list[str]) -> None:
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # the bias of a colwise product
    for way in ways:
        plain = train(way, None)
        for rule in (KEEP, FULL, SELECTIVE):
            for store in ({}, STORES["disk"], STORES["slab"]):
                ours = train(way, {"activation_checkpointing": rule, **store})
                assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True)), (way, rule, store)


@pytest.mark.multi_process
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_child_that_fsdp_shards_apart(tmp_path: Path, num_ranks: int) -> None:
    launch(compare, num_ranks, tmp_path, [way for way in WAYS if (num_ranks == 4) == (way == "tensor parallel")])
