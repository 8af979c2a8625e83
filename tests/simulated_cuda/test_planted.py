"""Faults planted in graphckpt are seen: a device that shows none of them would prove nothing."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable

import pytest
import torch

from graphckpt.errors import GraphckptError
from simulated_cuda.library import call, load, use_schedule
from simulated_cuda.planted import FAULTS, plain_bits

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

SCHEDULES = ["lazy", *(f"random:{seed}" for seed in range(4)), "eager"]


def is_right(check: Callable[[], bool]) -> bool:
    try:
        result = check()
        torch.cuda.synchronize()
    except (AttributeError, TypeError, NameError, AssertionError):
        raise  # of the fault itself: what it replaces is not there any more
    except (RuntimeError, GraphckptError):
        return False
    return result


def settle() -> None:
    """Ends what a fault has left behind."""
    load().captures_abort()
    torch.cuda.set_stream(torch.cuda.default_stream())
    gc.collect()
    for _ in range(3):
        with contextlib.suppress(torch.AcceleratorError):
            call("synchronize_all")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault: str) -> None:
    plant, check = FAULTS[fault]
    plain_bits()
    schedules = []
    for schedule in SCHEDULES:
        use_schedule(schedule)
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            if not is_right(check):
                schedules.append(schedule)
        settle()
    assert schedules, "no schedule has shown it"
    use_schedule("lazy")
    assert is_right(check), "without the fault"
