"""Beneath the floor of block-wise recompute, runs of a Sequential's children are recomputed together."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphckpt
from graphckpt import PlanError
from graphckpt.ledger.live import LiveBytes


def made():
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(36)))
    model = nn.Sequential(nn.Linear(16, 16), layers)
    x = torch.randn(512, 16)
    return model, lambda: model(x).square().mean().backward()


def test_fewer_inputs_are_kept_than_there_are_blocks():
    model, step = made()
    floor = graphckpt.plan(model, step, memory_budget="min")
    found = graphckpt.plan(model, step, memory_budget=int(0.75 * floor.predicted_peak_bytes))
    assert [(row.block, row.option[:9]) for row in found.rows] == [("1", "segments(")]
    assert found.predicted_peak_bytes <= found.budget_bytes < floor.predicted_peak_bytes
    with found.apply():
        step()
        live = LiveBytes(record_timeline=False)
        live.track([*model.parameters(), *(p.grad for p in model.parameters())])
        with live:
            step()
    assert live.peak_bytes == found.predicted_peak_bytes


def test_below_that_it_is_an_error():
    model, step = made()
    with pytest.raises(PlanError, match="no plan fits"):
        graphckpt.plan(model, step, memory_budget=1000)
