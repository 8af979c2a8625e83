"""The peak that is predicted for one simulated rank, in one process, is that of real ranks, by a counter of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import launch
from helpers.thinning import slow_unless
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

import graphckpt
from tests.parallel.test_live_bytes import Meter

pytestmark = pytest.mark.multi_process

LAYERS = 4
ATTEMPTS = 5
"""gloo's threads may free what they have sent a little late, in any of the steps that are compared."""
CANDIDATES: list[Any] = ["full", {"rule": "selective", "save": "matmul"}]


def sharded(model: Any, mesh: DeviceMesh | None = None, **how: Any) -> None:
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh, **how)


def tensor_parallel(model: Any, mesh: DeviceMesh | None = None) -> None:
    plan: dict[str, Any] = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, mesh or init_device_mesh("cpu", (dist.get_world_size(),)), plan)


def on_two_dimensions(model: Any) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    tensor_parallel(model, mesh["tp"])
    sharded(model, mesh["dp"])


WAYS: dict[str, tuple[int, Callable[[Any], None]]] = {
    "fsdp2": (2, sharded),
    "fsdp2, uneven": (3, sharded),
    "fsdp2, not resharded": (2, lambda model: sharded(model, reshard_after_forward=False)),
    "fsdp2, bfloat16": (
        2,
        lambda model: sharded(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)),
    ),
    "tp": (2, tensor_parallel),
    "fsdp2 x tp": (4, on_two_dimensions),
}


class Case:
    """A Llama that is spread over the ranks in one way, and its step."""

    def __init__(self, way: str) -> None:
        torch.manual_seed(0)
        sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": LAYERS, "vocab_size": 512}
        config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, use_cache=False)
        self.model: Any = LlamaForCausalLM(config)
        WAYS[way][1](self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        self.tokens_BT = torch.zeros(2, 128, dtype=torch.long)

    def step(self) -> None:
        self.model(self.tokens_BT, labels=self.tokens_BT).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> list[Tensor]:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*self.model.parameters(), *self.model.buffers(), *moments]

    def metered(self) -> int:
        with Meter(self.state()) as meter:
            self.step()
        return meter.peak


def make(way: str) -> tuple[nn.Module, Callable[[], None]]:
    case = Case(way)
    return case.model, case.step


def planned(way: str, budget: Any) -> graphckpt.Plan:
    return graphckpt.plan(
        lambda: make(way),
        device="cpu",
        world_size=WAYS[way][0],
        memory_budget=budget,
        candidates=CANDIDATES,
        progress=False,
    )


def peaks_agree(rank: int, way: str, plans: list[tuple[Mapping[str, Any], int]]) -> None:
    del rank
    case = Case(way)
    for policies, predicted in plans:
        with graphckpt.apply(case.model, policies):
            for _ in range(2):
                case.step()
            peak = min(case.metered() for _ in range(ATTEMPTS))
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, peak)
        assert max(everywhere) == everywhere[0] == predicted, (way, dict(policies), predicted, everywhere)


@pytest.mark.parametrize("way", [pytest.param(way, marks=slow_unless(way == "fsdp2")) for way in WAYS])
def test_a_predicted_peak_is_that_of_real_ranks(tmp_path: Path, way: str) -> None:
    """Everything kept, the lowest peak, and a plan between them."""
    lowest = planned(way, "min")
    plans = [lowest, planned(way, (lowest.predicted_peak_bytes + lowest.plain_peak_bytes) // 2)]
    rows = [(plan.policies, plan.predicted_peak_bytes) for plan in plans]
    launch(peaks_agree, WAYS[way][0], tmp_path, way, [({}, lowest.plain_peak_bytes), *rows])
    assert plans[1].policies not in ({}, plans[0].policies)
