"""Models that are spread over ranks in one way each, and the peaks that real ranks of gloo have; not a test itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import graphckpt
from graphckpt.budget import Budget
from tests.parallel.test_live_bytes import Meter

LAYERS = 4
ATTEMPTS = 5
"""gloo's threads may free what they have sent a little late, in any of the steps that are compared."""
CANDIDATES: list[str | dict[str, str]] = ["full", {"rule": "selective", "save": "matmul"}]


def sharded(model: LlamaForCausalLM, mesh: DeviceMesh | None = None, **how: Any) -> None:
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh, **how)


def tensor_parallel(model: LlamaForCausalLM, mesh: DeviceMesh | None = None) -> None:
    plan: dict[str, ParallelStyle] = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, mesh or init_device_mesh("cpu", (dist.get_world_size(),)), plan)


def with_sharded_logits(model: LlamaForCausalLM) -> None:
    """Has the logits sharded by token, for a loss within ``loss_parallel()``."""
    tensor_parallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model.lm_head, mesh, ColwiseParallel(output_layouts=Shard(-1), use_local_output=False))


def on_two_dimensions(model: LlamaForCausalLM) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    tensor_parallel(model, mesh["tp"])
    sharded(model, mesh["dp"])


def hybrid(model: LlamaForCausalLM) -> None:
    """HSDP: shards in each half of the ranks, and has the halves alike."""
    sharded(model, init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard")))


def with_mlps_apart(model: LlamaForCausalLM) -> None:
    for layer in model.model.layers:
        fully_shard(layer.mlp)
    sharded(model)


class Statistics(nn.Module):
    """A layer with buffers that change, which DDP sends to the other ranks in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(128)

    def forward(self, x_BTD: Tensor, **_: object) -> Tensor:
        return x_BTD + self.norm(x_BTD.flatten(0, 1)).view_as(x_BTD)


def ddp(model: nn.Module, **how: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, **how)


def with_statistics(model: LlamaForCausalLM) -> LlamaForCausalLM:
    model.model.layers.append(Statistics())
    model.config.num_hidden_layers += 1
    return model


def with_unused(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Has parameters that no gradient reaches, in the midst of others."""
    model.model.layers[1].unused = nn.Linear(128, 96)
    return model


class Way(NamedTuple):
    num_ranks: int
    spread: Callable[[LlamaForCausalLM], nn.Module | None]
    """Spreads a model; returns the module to call, or ``None`` if that is the model."""
    num_micro_batches: int = 1
    within: Callable[[], AbstractContextManager[None]] = nullcontext
    """What forward and backward run in."""


WAYS: dict[str, Way] = {
    "fsdp2": Way(2, sharded),
    "fsdp2, uneven": Way(3, sharded),
    "fsdp2 on 4": Way(4, sharded),
    "fsdp2, not resharded": Way(2, lambda model: sharded(model, reshard_after_forward=False)),
    "fsdp2, resharded to 2": Way(4, lambda model: sharded(model, reshard_after_forward=2)),
    "fsdp2, bfloat16": Way(
        2, lambda model: sharded(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32))
    ),
    "fsdp2, mlps apart": Way(2, with_mlps_apart),
    "hsdp": Way(4, hybrid),
    "tp": Way(2, tensor_parallel),
    "tp on 4": Way(4, tensor_parallel),
    "tp, loss parallel": Way(2, with_sharded_logits, within=loss_parallel),
    "fsdp2 x tp": Way(4, on_two_dimensions),
    "ddp": Way(2, ddp),
    "ddp, views": Way(2, lambda model: ddp(model, gradient_as_bucket_view=True)),
    "ddp, small buckets": Way(2, lambda model: ddp(model, bucket_cap_mb=1)),
    "ddp, buffers": Way(2, lambda model: ddp(with_statistics(model))),
    "ddp, unused": Way(2, lambda model: ddp(with_unused(model), find_unused_parameters=True)),
    "ddp, static": Way(2, lambda model: ddp(with_unused(model), static_graph=True)),
    "ddp, accumulated": Way(2, ddp, 2),
    "ddp, views, accumulated": Way(2, lambda model: ddp(model, gradient_as_bucket_view=True), 2),
}


class Case:
    """A Llama that is spread over the ranks in one way, and its step."""

    def __init__(self, way: str) -> None:
        torch.manual_seed(0)
        sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": LAYERS, "vocab_size": 512}
        config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, use_cache=False)
        self.model = LlamaForCausalLM(config)
        self.num_micro_batches = WAYS[way].num_micro_batches
        self.within = WAYS[way].within
        self.wrapper: Any = WAYS[way].spread(self.model) or self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        self.tokens_BT = torch.zeros(2, 128, dtype=torch.long)

    def step(self) -> None:
        for _ in range(self.num_micro_batches - 1):
            with self.wrapper.no_sync():
                self._micro_batch()
        self._micro_batch()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _micro_batch(self) -> None:
        with self.within():
            self.wrapper(self.tokens_BT, labels=self.tokens_BT).loss.backward()


def step_peaks(case: Case | PipelineCase) -> Iterator[int]:
    """Yields the peaks of steps: what outlives a step, such as DDP's buckets, counts from the start of the next."""
    with Meter([*case.model.parameters(), *case.model.buffers()]) as first:
        case.step()
    while True:
        meter = Meter(())
        for reference in first.ends:
            if (storage := reference()) is not None:
                meter.count(storage)
        storage = None
        with meter:
            case.step()
        yield meter.peak


def planned(way: str, budget: Budget) -> graphckpt.Plan:
    def make() -> tuple[nn.Module, Callable[[], None]]:
        case = Case(way)
        return case.model, case.step

    return graphckpt.plan(
        make,
        device="cpu",
        world_size=WAYS[way].num_ranks,
        memory_budget=budget,
        candidates=CANDIDATES,
        progress=False,
    )


def planned_evenly(plan: Callable[[str], graphckpt.Plan], num_plans: int) -> list[tuple[Mapping[str, Any], int]]:
    """Returns policies and predicted peaks: everything kept, the lowest peak, and budgets evenly between them."""
    lowest = plan("min")
    spread = lowest.plain_peak_bytes - lowest.predicted_peak_bytes
    budgets = [lowest.predicted_peak_bytes + spread * i // (num_plans - 1) for i in range(1, num_plans - 1)]
    front = lowest.front()  # of the one measurement, from the lowest peak to the highest
    fitting = [[each for each in front if each.predicted_peak_bytes <= budget] for budget in budgets]
    plans = [lowest, *(each[-1] for each in fitting)]
    return [({}, lowest.plain_peak_bytes), *((each.policies, each.predicted_peak_bytes) for each in plans)]


def peaks(
    case: Case | PipelineCase, policies: Mapping[str, Any], predicted: int, attempts: int = ATTEMPTS
) -> list[int]:
    """Returns the lowest peak under ``policies`` on each rank, over steps until it is at most ``predicted``.

    ``attempts`` is the most; ``predicted`` may differ between ranks.
    """
    lowest = sys.maxsize
    everywhere: list[Any] = [None] * dist.get_world_size()
    with graphckpt.apply(case.model, policies):
        for _ in range(2):
            case.step()
        for _, peak in zip(range(attempts), step_peaks(case), strict=False):
            lowest = min(lowest, peak)
            dist.all_gather_object(everywhere, (lowest, lowest <= predicted))
            if all(is_reached for _, is_reached in everywhere):
                break
    return [peak for peak, _ in everywhere]


# ---- pipelines

NUM_MICRO_BATCHES = 8


class Stage(nn.Module):
    """The layers of one stage of a Llama; the first has the embedding, the last the head."""

    def __init__(self, number: int, num_stages: int) -> None:
        super().__init__()
        sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 8, "vocab_size": 512}
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, use_cache=False))
        size = 8 // num_stages
        self.embed = model.model.embed_tokens if number == 0 else None
        self.layers = model.model.layers[number * size : (number + 1) * size]
        self.rotary = model.model.rotary_emb
        self.head = nn.Sequential(model.model.norm, model.lm_head) if number == num_stages - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        x_BTD = x if self.embed is None else self.embed(x)
        position_ids = torch.arange(x_BTD.shape[1]).unsqueeze(0)
        position_embeddings = self.rotary(x_BTD, position_ids)
        for layer in self.layers:
            x_BTD = layer(x_BTD, position_ids=position_ids, position_embeddings=position_embeddings)
        out: Tensor = x_BTD if self.head is None else self.head(x_BTD)
        return out


class PipelineCase:
    """One stage of a pipeline, and its step."""

    def __init__(self, schedule: str) -> None:
        torch.manual_seed(0)
        self.rank, self.num_stages = dist.get_rank(), dist.get_world_size()
        self.model = Stage(self.rank, self.num_stages)
        tokens_BT = torch.zeros(1, 128, dtype=torch.long)
        hidden_BTD, logits_BTV = (torch.empty(1, 128, n, device="meta", requires_grad=True) for n in (128, 512))
        stage = PipelineStage(
            self.model,
            self.rank,
            self.num_stages,
            torch.device("cpu"),
            input_args=tokens_BT if self.rank == 0 else hidden_BTD,
            output_args=logits_BTV if self.rank == self.num_stages - 1 else hidden_BTD,
        )
        kind = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}[schedule]
        self.schedule = kind(stage, NUM_MICRO_BATCHES, loss_fn=self._loss)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        self.tokens_BT = torch.zeros(NUM_MICRO_BATCHES, 128, dtype=torch.long)

    @staticmethod
    def _loss(logits_BTV: Tensor, tokens_BT: Tensor) -> Tensor:
        return F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT.flatten())

    def step(self) -> None:
        inputs = (self.tokens_BT,) if self.rank == 0 else ()
        target = {"target": self.tokens_BT} if self.rank == self.num_stages - 1 else {}
        self.schedule.step(*inputs, **target, return_outputs=False)
        self.optimizer.step()
        self.optimizer.zero_grad()


def planned_stage(schedule: str, num_stages: int, rank: int, budget: Budget) -> graphckpt.Plan:
    def make() -> tuple[nn.Module, Callable[[], None]]:
        case = PipelineCase(schedule)
        return case.model, case.step

    return graphckpt.plan(
        make,
        device="cpu",
        world_size=num_stages,
        rank=rank,
        memory_budget=budget,
        candidates=CANDIDATES,
        progress=False,
    )
