"""Every policy gives the bits of the plain step, eager and captured, under every schedule."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from helpers.captured_steps import Train
from torch import Tensor, nn

from simulated_cuda.library import use_schedule
from simulated_cuda.steps import RULES, STORES, bits_of_steps, is_same

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:offload to 'disk' saves")]

SCHEDULES = ["lazy", "eager", *(f"random:{seed}" for seed in range(10))]


@cache
def plain_bits(*then: str) -> list[Tensor]:
    use_schedule("eager")
    return bits_of_steps(then=then)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("rule", RULES)
def test_bits_of_the_plain_step(rule: str, store: str) -> None:
    expected = plain_bits()
    for schedule in SCHEDULES:
        use_schedule(schedule)
        assert is_same(bits_of_steps(rule, store), expected), schedule
    torch.cuda.synchronize()


@pytest.mark.parametrize("store", [store for store in STORES if store != "disk"])
@pytest.mark.parametrize("rule", RULES)
def test_bits_of_captured_steps(rule: str, store: str) -> None:
    """Replays run under all schedules, warm-up and capture under a third of them: with each policy another one."""
    expected = plain_bits("eager", "eager")
    first = list(RULES).index(rule) + list(STORES).index(store)
    for number in range(first, first + 4):
        schedule, *then = (SCHEDULES[(number + more) % 12] for more in (0, 4, 8))
        use_schedule(schedule)
        assert is_same(bits_of_steps(rule, store, is_captured=True, then=then), expected), (schedule, then)
    torch.cuda.synchronize()


def test_outputs_of_warm_up_calls_may_be_dropped_before_they_are_read() -> None:
    """They were allocated on the stream of the capture, and are read on another one."""

    def losses(schedule: str) -> list[float]:
        use_schedule(schedule)
        torch.manual_seed(0)
        model, x = nn.Linear(8, 8).cuda(), torch.ones(4, 8).cuda()
        step = Train(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True))
        copies = [step(x).detach().clone() for _ in range(5)]  # each output is freed before its copy has run
        return torch.stack(copies).tolist()

    expected = losses("eager")
    assert [losses(f"random:{seed}") for seed in range(40, 60)] == [expected] * 20
