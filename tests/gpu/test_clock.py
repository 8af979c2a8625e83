"""A step on CUDA is timed by events: nothing waits for the device before the step has ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.layer_stacks import linear_layers
from torch import nn

from graphckpt.planning.intervals import Phase
from graphckpt.planning.plan_step import find_blocks
from graphckpt.planning.step_clock import Blocks, StepClock
from graphckpt.planning.steps import RealStep

pytestmark = pytest.mark.gpu


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What has waited for the device, by name."""
    names: list[str] = []

    def note(owner: Any, function: Callable[..., Any]) -> None:
        monkeypatch.setattr(
            owner, "synchronize", lambda *args, **more: names.append(str(owner)) or function(*args, **more)
        )

    for owner in (torch.cuda, torch.accelerator, torch.cuda.Event, torch.cuda.Stream):
        note(owner, owner.synchronize)
    return names


@pytest.fixture
def model() -> nn.Sequential:
    return linear_layers(3).cuda()


def test_intervals_are_timed_without_waiting(model: nn.Sequential, waits: list[str]) -> None:
    x = torch.randn(8, 16, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clock = StepClock(x.device)
    waits.clear()  # of the set-up
    with clock.metering(Blocks(find_blocks(model, "*"))):
        model(x).sum().backward()
        optimizer.step()
    assert waits == []
    phases = {interval.phase for interval in clock.seconds}
    assert waits
    assert {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER} <= phases
    assert min(clock.seconds.values()) >= 0
    assert sum(clock.seconds.values()) == pytest.approx(clock.total, rel=1e-3, abs=1e-5)


def test_ops_are_timed_without_waiting_for_each(model: nn.Sequential, waits: list[str]) -> None:
    x = torch.randn(8, 16, device="cuda")
    counts = []

    def step() -> None:
        model(x).sum().backward()
        counts.append(len(waits))

    blocks = Blocks(find_blocks(model, "*"))
    ops = RealStep(model, step).ops(blocks)
    assert counts[-1] == 0
    assert all(len(call.seconds) >= 2 and min(call.seconds) >= 0 for calls in ops for call in calls)
    assert sum(second > 0 for calls in ops for call in calls for second in call.seconds) > 0
