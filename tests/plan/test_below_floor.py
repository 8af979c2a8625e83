"""Beneath the floor of one second run of each block, a Sequential is recomputed in halves of halves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphckpt
from graphckpt import Joined, PlanError
from graphckpt.ledger.live_memory import LiveBytes


def made():
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(64)))
    model = nn.Sequential(nn.Linear(16, 16), layers)
    x = torch.randn(512, 16)
    return model, lambda: model(x).square().mean().backward()


def test_a_long_stack_is_halved():
    model, step = made()
    floor = graphckpt.plan(model, step, memory_budget="min")
    found = graphckpt.plan(model, step, memory_budget=int(0.9 * floor.predicted_peak_bytes))
    assert [(row.block, row.option) for row in found.rows] == [("1", "segments(log)")]
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


def test_layers_are_joined_where_the_rules_say_so(monkeypatch):
    model, step = made()
    alone = graphckpt.plan(model, step, memory_budget="min", rules=["full"])
    joined = graphckpt.plan(model, step, memory_budget="min", rules=["full", "joined"])
    assert joined.predicted_peak_bytes < 0.7 * alone.predicted_peak_bytes
    assert {row.option for row in alone.rows} <= {"keep", "full"}
    assert "joined" in {row.option for row in joined.rows}
    monkeypatch.setattr(Joined, "check", lambda *_: "units of FSDP2 cannot")
    assert graphckpt.plan(model, step, memory_budget="min").predicted_peak_bytes == alone.predicted_peak_bytes
