"""A chain cut into stages that pass micro-batches on: each with its own policies, and the bits of none."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.layer_stacks import D, ResidualLayer, residual_layers
from helpers.ranks import launch
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B

from graphckpt import Graph, Selective
from graphckpt.errors import ConfigError
from graphckpt.integrations.pipelining import pipeline_part, stages_of

SAMPLES, MICRO_BATCHES, STEPS = 32, 4, 50


def chain() -> nn.Sequential:
    torch.manual_seed(1)
    return residual_layers(6)


STAGES: dict[Any, Any] = {"1": {"stage_id": 1}, "3": {"stage_id": 2}, "4": {"stage_id": 3}}
POLICIES: dict[Any, Any] = {
    "0": {"activation_checkpointing": True},
    "1": {"activation_checkpointing": Selective("matmul"), "contiguous": True, "min_elements": 1},
    "2": {"activation_checkpointing": True},
    "2.down": {"activation_checkpointing": False},
    "3": {"activation_checkpointing": True, "offload": "disk", "min_elements": 1},
}


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def train(rank: int, model: Any, policies: dict[Any, Any]) -> tuple[list[Tensor], Any]:
    """Returns what this rank saw of the losses, and its weights, after 50 steps."""
    part = pipeline_part(model, policies, device=torch.device("cpu"))
    schedule = Schedule1F1B(part.stage, MICRO_BATCHES, loss_of)
    optimizer = torch.optim.AdamW(part.module.parameters(), lr=1e-3)
    torch.manual_seed(7 + rank)
    samples = torch.Generator().manual_seed(3)
    seen: list[Tensor] = []
    for number in range(STEPS):
        x, target = torch.randn(2, SAMPLES, D, generator=samples)
        losses: list[Tensor] = []
        with part.handle.measure() if number == 1 else nullcontext():  # the very first forward asks for shapes alone
            if rank == 0:
                schedule.step(x)
            elif rank == dist.get_world_size() - 1:
                schedule.step(target=target, losses=losses)
            else:
                schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        seen += [loss.detach() for loss in losses]
    rows = part.handle.explain(show=False).rows
    part.handle.remove()
    return [*seen, *(p.detach() for p in part.module.parameters())], rows


class Described(Graph):
    """As OneFlow's users say it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = chain()
        for number, stage in ((0, 0), (1, 1), (3, 2), (4, 3)):
            self.model[number].config.set_stage(stage)
        self.model[0].config.activation_checkpointing = True


def compare(rank: int) -> None:
    plain, _ = train(rank, chain(), STAGES)
    merged = {key: {**POLICIES.get(key, {}), **STAGES.get(key, {})} for key in [*POLICIES, "4"]}
    ours, rows = train(rank, chain(), merged)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    reruns, on_disk = sum(row.reruns for row in rows), sum(row.bytes_disk for row in rows)
    assert (reruns > 0, on_disk > 0) == {0: (True, False), 1: (True, False), 2: (True, True), 3: (False, False)}[rank]
    described, rows = train(rank, Described().model, {})
    assert all(torch.equal(a, b) for a, b in zip(described, plain, strict=True))
    assert (sum(row.reruns for row in rows) > 0) == (rank == 0)
    if rank == 3:
        losses = torch.stack(plain[: STEPS * MICRO_BATCHES]).view(STEPS, MICRO_BATCHES).mean(1)
        assert losses[-1] < losses[0]
    near_one_process(rank)


def near_one_process(rank: int) -> None:
    """Without dropout, the gradients are those of the whole chain on the whole batch."""
    model = chain().eval()
    part = pipeline_part(model, {**STAGES, "0": True}, device=torch.device("cpu"))
    x, target = torch.randn(2, SAMPLES, D, generator=torch.Generator().manual_seed(3))
    schedule = Schedule1F1B(part.stage, MICRO_BATCHES, loss_of)
    arguments: dict[str, Any] = {"target": target} if rank == 3 else {}
    schedule.step(*([x] if rank == 0 else []), **arguments)
    grads = {name: p.grad for name, p in part.module.named_parameters()}
    alone = chain().eval()
    loss_of(alone(x), target).backward()
    for name, parameter in alone.named_parameters():
        if name in grads:
            torch.testing.assert_close(grads[name], parameter.grad)
    assert 0 < len(grads) < len(list(alone.parameters()))


@pytest.mark.slow
@pytest.mark.multi_process
def test_each_stage_has_its_policies_and_the_bits_of_none(tmp_path: Path) -> None:
    launch(compare, 4, tmp_path)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"1": {"stage_id": 2}}, "1.stage_id: 2 after 0 · fix: use 0 or 1, in the order of blocks"),
        ({"1": {"stage_id": 1}, "2": {"stage_id": 0}}, "2.stage_id: 0 after 1 · fix: use 1 or 2, in the order"),
        ({"1": {"stage_id": 1}, "2.up": {"stage_id": 1}}, "2.up.stage_id: expected a block of the chain · fix: set it"),
        ({}, "stage_id: expected one stage for each of 2 ranks, got 1 · fix: config.set_stage(i) on the first block"),
    ],
)
def test_stages_that_cannot_be(fields: dict[str, dict[str, Any]], fault: str) -> None:
    with pytest.raises(ConfigError) as raised:
        stages_of(["0", "1", "2"], fields, num_stages=2)
    assert fault in str(raised.value)


def test_a_model_that_is_not_a_sequential_is_an_error() -> None:
    message = r"expected an nn.Sequential, got ResidualLayer · fix: put its blocks into an nn.Sequential"
    with pytest.raises(ConfigError, match=message):
        pipeline_part(ResidualLayer(), device=torch.device("cpu"))
