"""The clock and the meter of a real step: what counts as a block's own time, and what a sampled run holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
import torch
from helpers.cpu_burn import be_busy
from helpers.layer_stacks import linear_layers
from helpers.modules import as_module
from torch import nn

from graphckpt.planning import measured_stores
from graphckpt.planning.candidates import KEEP, Option
from graphckpt.planning.intervals import Interval, Phase, StepReadings
from graphckpt.planning.plan_step import find_blocks
from graphckpt.planning.step_clock import Blocks, StepClock
from graphckpt.planning.steps import RealStep
from graphckpt.rules import Keep

BUSY = 0.05  # seconds


@as_module(lambda: {"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)})
def Slow(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Takes long in backward, once the gradient of its second layer is whole."""
    x = self.first(x)
    if x.requires_grad:
        x.register_hook(lambda _: be_busy(BUSY))
    return self.second(x)


def timed(model: nn.Module, x: torch.Tensor, *, after: Callable[[], object], steps: int = 0) -> StepClock:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clock = StepClock(x.device)
    with clock.metering(Blocks(find_blocks(model, "*"))):
        model(x).sum().backward()
        after()
        for _ in range(steps):
            optimizer.step()
    return clock


@pytest.mark.parametrize("wants_gradient", [False, True], ids=["data", "of-a-stem"])
def test_time_after_the_backward_of_the_first_block_is_not_its_own(wants_gradient: bool) -> None:
    """Processes wait for each other there, to average their gradients."""
    x = torch.ones(2, 4, requires_grad=wants_gradient) * 1
    clock = timed(nn.Sequential(Slow(), Slow()), x, after=lambda: be_busy(BUSY))
    backward = [clock.seconds[Interval(Phase.BACKWARD, call)] for call in (0, 1)]
    assert min(backward) >= BUSY
    assert max(backward) < 2 * BUSY
    assert clock.seconds[Interval(Phase.AFTER_BACKWARD, 0)] >= BUSY
    assert sum(clock.seconds.values()) == pytest.approx(clock.total)


def test_time_before_the_optimizer_is_not_the_first_blocks() -> None:
    clock = timed(nn.Sequential(Slow()), torch.ones(2, 4), after=lambda: be_busy(BUSY), steps=1)
    assert BUSY <= clock.seconds[Interval(Phase.BACKWARD, 0)] < 2 * BUSY
    assert clock.seconds[Interval(Phase.AFTER_BACKWARD, 0)] >= BUSY
    assert any(interval.phase is Phase.OPTIMIZER for interval in clock.seconds)


def test_a_first_block_without_gradients_of_its_own_keeps_the_time() -> None:
    """All its parameters are frozen: its backward goes through to a tensor that it has beside its arguments."""
    model = nn.Sequential(Slow())
    shift = torch.zeros(4, requires_grad=True)
    model[0].first.register_forward_hook(lambda module, args, output: output + shift)
    model.requires_grad_(False)
    clock = StepClock(torch.device("cpu"))
    with clock.metering(Blocks(find_blocks(model, "*"))):
        model(torch.ones(2, 4)).sum().backward()
    assert clock.seconds[Interval(Phase.BACKWARD, 0)] >= BUSY


def test_the_hooks_are_taken_off() -> None:
    model = nn.Sequential(Slow())
    timed(model, torch.ones(2, 4), after=lambda: None)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_levels_in_words_are_the_same_levels() -> None:
    model, x = nn.Sequential(Slow(), Slow()), torch.ones(2, 4)
    levels = (
        RealStep(model, lambda: model(x).sum().backward()).sample(Blocks(find_blocks(model, "*")), [KEEP] * 2).levels
    )
    levels = replace(levels, far_bytes={1: 7}, dropped=frozenset({0}))
    said = StepReadings.from_message(json.loads(json.dumps(levels.to_message())))
    assert said.to_message() == levels.to_message()
    assert (said.levels, said.dropped, said.joinable) == (levels.levels, levels.dropped, levels.joinable)
    assert said.far_bytes == {1: 7}


def test_a_meter_does_not_keep_its_step() -> None:
    """It ends with the tensors that it has seen, and a step ends with its copies of weights and gradients."""
    step = RealStep(nn.Linear(2, 2), list)
    meter, alive = step.new_meter(), ref(step)
    del step
    assert meter is not None
    assert alive() is None


class Sparse(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(torch.eye(len(x)).to_sparse(), super().forward(x))


def test_tensors_without_a_storage_are_saved_as_they_are() -> None:
    model, x = nn.Sequential(Sparse(4, 4), Sparse(4, 4)), torch.ones(3, 4)
    step = RealStep(model, lambda: model(x).sum().backward())
    assert step.sample(Blocks(find_blocks(model, "*")), [KEEP, KEEP]).peak_bytes > 0


def test_no_clock_sees_the_copies_of_the_run_whose_levels_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are synchronous, and to pageable memory; what a plan's own copies take follows from the device's rates."""
    copied = []

    class Slowly(measured_stores._OffloadedStorage):
        def __init__(self, tensor: torch.Tensor) -> None:
            super().__init__(tensor)
            copied.append(tensor)
            be_busy(BUSY)

    monkeypatch.setattr(measured_stores, "_OffloadedStorage", Slowly)
    model = linear_layers(2, 32, nn.GELU)
    x = torch.ones(64, 32)
    step = RealStep(model, lambda: model(x).sum().backward())
    far = Option("keep + host", {"activation_checkpointing": False, "offload": True}, Keep(), is_far=True)
    sample = step.sample(Blocks(find_blocks(model, "*")), [far, far])
    assert len(copied) == 4, "the input and the linear layer's result, in each of two blocks, once"
    assert sum(sample.levels.far_bytes.values()) == 4 * x.nbytes
    assert sum(sample.seconds.values()) < BUSY
