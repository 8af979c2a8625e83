"""Kept bytes with micro-batches: those alive at one time, not the sum over all micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.hard_modules import chain
from helpers.train_graphs import SquareGraph
from torch import Tensor, nn

import graphckpt
from graphckpt import Selective
from graphckpt.ledger.live_memory import LiveBytes

SAMPLES = 32
POLICIES: dict[str, dict[str, Any]] = {
    "keep": {},
    "full": {"[1-4]": True},
    "selective": {"[1-4]": Selective("matmul")},
    "joined": {"1": True, "[234]": "joined"},
}


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).pow(2).mean()


def bytes_after_forward(model: nn.Module, x: Tensor) -> int:
    """Bytes that the forward of one micro-batch adds, by weak references to every storage, without its output."""
    loss_of(model, x).backward()  # a first call learns
    model.zero_grad()
    with LiveBytes() as live:
        live.track([*model.parameters(), x])
        before = live.live_bytes
        loss = loss_of(model, x)
        added = live.live_bytes - before - loss.untyped_storage().nbytes()
    loss.backward()
    return added


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_parts", [1, 2, 8])
def test_a_loop_with_micro_batches_keeps_what_one_of_them_keeps(policy: str, num_parts: int) -> None:
    parts = torch.randn(SAMPLES, 16).chunk(num_parts)
    plain = bytes_after_forward(chain("mlp", 4), parts[0].clone())
    model = chain("mlp", 4)
    with graphckpt.apply(model, POLICIES[policy]) as handle:
        ours = bytes_after_forward(model, parts[0].clone())
        with handle.measure():
            for part in parts:
                loss_of(model, part.clone()).backward()
        seen = handle.explain(show=False)
    assert seen.bytes_before == plain
    assert seen.bytes_after == ours
    assert sum(row.bytes_before for row in seen.rows) == plain
    assert sum(row.bytes_after for row in seen.rows) == ours
    assert seen.peak_bytes is not None
    assert seen.bytes_after <= seen.peak_bytes


def test_bytes_on_disk_are_those_of_one_micro_batch_too() -> None:
    model, parts = chain("mlp", 4), torch.randn(SAMPLES, 16).chunk(4)
    with graphckpt.apply(model, {"[1-4]": {"offload": "disk", "min_elements": 1}}) as handle:
        seen = []
        for used in (parts[:1], parts):
            with handle.measure():
                for part in used:
                    loss_of(model, part.clone()).backward()
            seen.append(handle.explain(show=False))
    assert seen[0].bytes_disk == seen[1].bytes_disk == sum(row.bytes_disk for row in seen[1].rows) > 0


@pytest.mark.parametrize("num_parts", [1, 2, 8])
def test_a_graph_with_micro_batches_keeps_what_one_of_them_keeps(num_parts: int) -> None:
    x = torch.randn(SAMPLES, 16)
    graph = SquareGraph(chain("mlp", 4), dict.fromkeys("1234", True))
    graph.config.set_gradient_accumulation_steps(num_parts)
    for _ in range(2):
        graph(x)
    seen = graph.explain(show=False)
    assert seen.bytes_before == bytes_after_forward(chain("mlp", 4), x[: SAMPLES // num_parts].clone())
    assert seen.bytes_after <= seen.peak_bytes


def test_micro_batches_between_forward_and_backward_add_up_as_in_a_pipeline() -> None:
    model, parts = chain("mlp", 4), torch.randn(SAMPLES, 16).chunk(4)
    with graphckpt.apply(model, {"[1-4]": True}) as handle:
        with handle.measure():
            loss_of(model, parts[0]).backward()
        one = handle.explain(show=False)
        with handle.measure():
            losses = [loss_of(model, part) for part in parts[:2]]  # two are in flight
            losses.pop(0).backward()
            losses.append(loss_of(model, parts[2]))
            for loss in losses:
                loss.backward()
        seen = handle.explain(show=False)
    assert seen.bytes_before == 2 * one.bytes_before
    assert seen.bytes_after == 2 * one.bytes_after
