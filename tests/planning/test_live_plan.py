"""A training loop whose batches grow is planned on its own steps, and never breaks."""

from __future__ import annotations

import pytest
import torch
from helpers.layer_stacks import ReLULayer
from helpers.peaks import tracked_peak
from torch import nn

from graphckpt.errors import ConfigError
from graphckpt.planning.live_plan import LivePlan
from graphckpt.planning.options import PlanOptions


class Loop:
    """A training loop, whose updates are planned for."""

    def __init__(self, budget):
        self.model = nn.Sequential(*(ReLULayer() for _ in range(4)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        self.lines = []
        self.live = LivePlan(self.model, budget, PlanOptions(candidates=["full"], progress=False), self.lines.append)

    def step(self, size):
        self.model(torch.ones(size, 16)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def updates(self, *sizes):
        """Runs one update of each size, and returns which of them ended with a new plan."""
        planned = []
        for size in sizes:
            self.live.begin_step()
            self.step(size)
            planned.append(self.live.end_step())
            self.handle = self.live.handle  # which callbacks keep alive, until they see another one
        return planned

    def peak(self, size):
        return tracked_peak(self.model, lambda: self.step(size), [self.optimizer])


def test_larger_batches_one_after_the_other_recompute_every_block_and_are_planned_for():
    loop = Loop("min")
    assert loop.updates(256, 256, 256) == [False, True, False]
    first = loop.live.plan
    assert loop.updates(512) == [True], "the fourth update"
    assert loop.updates(512, 1024, 1024) == [False, False, False], "each larger than planned for"
    assert loop.live.handle is not None, "the policies of the plan until a batch is too large for them"
    assert loop.updates(1024) == [True], "the eighth"
    assert loop.lines == ["planned again, for the largest batch so far"] * 2
    assert first.predicted_peak_bytes < loop.peak(1024) <= loop.live.plan.predicted_peak_bytes
    loop.live.close()


def test_a_step_without_a_backward_is_not_planned_for():
    loop = Loop("min")

    def skip(size):
        loop.live.begin_step()
        if size:
            loop.model(torch.ones(size, 16))
        loop.optimizer.step()
        return loop.live.end_step()

    assert loop.updates(8) == [False]
    assert not skip(0)
    assert not skip(8)
    assert loop.updates(8) == [True], "the next step"
    assert loop.updates(8, 16) == [False, False]
    larger = loop.live._recorded
    assert not skip(32)
    assert loop.live._recorded is larger, "that of the smaller batch is planned for"
    assert loop.live.handle is not None
    assert loop.updates(8) == [True], "the eighth update"
    assert loop.peak(16) <= loop.live.plan.predicted_peak_bytes
    loop.live.close()


@pytest.mark.parametrize("block", [0, 2])
@pytest.mark.parametrize("is_ended", [False, True])
def test_a_step_that_fails_in_a_block_does_not_end_the_training(block, is_ended):
    loop = Loop("min")

    def fail(size):
        loop.live.begin_step()
        hook = loop.model[block].down.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loop.step(size)
        hook.remove()
        if is_ended:
            loop.live.end_step()

    loop.updates(8)
    fail(8)
    loop.updates(8, 8, 8)
    fail(16)
    assert loop.live.plan is not None
    loop.updates(*[8] * 8)
    assert loop.live.handle is not None
    loop.live.close()


def test_parameters_that_are_not_full_are_one_error():
    class Odd(nn.Parameter):
        pass

    model = nn.Sequential(ReLULayer(), ReLULayer())
    model[1].up.weight = Odd(model[1].up.weight.detach())
    with pytest.raises(ConfigError, match=r"expected full parameters, got \w+ in 1 · fix: rule='full', or plan before"):
        LivePlan(model, "min", PlanOptions(), print)
