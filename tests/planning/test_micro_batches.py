"""Steps that accumulate gradients over many micro-batches are traced with two of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.layer_stacks import mlp_layers

from graphckpt.planning.options import PlanOptions
from graphckpt.planning.plan import Plan
from graphckpt.planning.plan_group import PlanGroup
from graphckpt.planning.plan_step import find_blocks, plan_step
from graphckpt.planning.steps import FakeStep
from graphckpt.simulation.fake_device import FakeDevice
from graphckpt.simulation.profile import load_profile

D, MICRO_BATCHES = 64, 5


def planned(num_traced: int, num_micro_batches: int = 0) -> tuple[Plan, list[int]]:
    """Returns the plan of a step, and the micro-batches that each of its runs has traced."""
    counts: list[int] = []
    device = FakeDevice(load_profile("h100"))
    with device:
        model = mlp_layers(4, D)
        optimizer, x = torch.optim.AdamW(model.parameters()), torch.zeros(4096, D)

        def step() -> None:
            for _ in range(num_traced):
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            counts.append(num_traced)

        fake = FakeStep(device, model, step, optimizer, num_micro_batches=num_micro_batches)
    blocks = find_blocks(model, None)
    return plan_step(fake, model, blocks, 0.9, PlanOptions(progress=False), PlanGroup()), counts


@pytest.fixture(scope="module")
def plans() -> tuple[Plan, Plan]:
    two, counts = planned(2, MICRO_BATCHES)
    assert set(counts) == {2}
    return planned(MICRO_BATCHES)[0], two


@pytest.mark.parametrize(
    "value",
    [
        lambda plan: plan.predicted_peak_bytes,
        lambda plan: plan.plain_peak_bytes,
        lambda plan: plan.floor_bytes,
        lambda plan: plan.predicted_reserved_bytes,
        lambda plan: plan.policies,
    ],
)
def test_bytes_and_policies_are_those_of_all_micro_batches(
    value: Callable[[Plan], object], plans: tuple[Plan, Plan]
) -> None:
    every, two = plans
    assert value(two) == value(every)


@pytest.mark.parametrize(
    "value", [lambda plan: plan.predicted_step_seconds, lambda plan: plan.plain_step_seconds, lambda plan: plan.rows]
)
def test_seconds_are_those_of_all_micro_batches(value: Callable[[Plan], object], plans: tuple[Plan, Plan]) -> None:
    def seconds(plan: Plan) -> list[float]:
        result = value(plan)
        return [row.extra_seconds for row in result] if isinstance(result, tuple) else [float(result)]  # type: ignore[arg-type]

    every, two = plans
    # Adding gradients, which the first micro-batch does not, takes a part of the time of a step as small as this one.
    assert seconds(two) == pytest.approx(seconds(every), rel=0.1)
