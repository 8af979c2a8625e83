"""Plans on a CUDA device: their peaks are the allocator's own, and within the budget, with compiled layers as well."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers.layer_stacks import residual_layers
from helpers.train_graphs import SquareGraph
from torch import nn

import graphckpt
from graphckpt import Graph
from graphckpt.errors import PlanError
from graphckpt.planning import Plan

pytestmark = pytest.mark.gpu
compiles = pytest.mark.real_gpu("it compiles layers for the device, or runs its models for minutes")

D = 512  # width
OFF = 0.05  # of the peak: what kernels take within an op


def peak_of(step: Callable[[], object]) -> int:
    """Returns the most bytes that the allocator has given in a second step."""
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


class Case:
    """Eight layers and a step."""

    def __init__(self, p: float = 0.1) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model = residual_layers(8, D, dropout=p).cuda()
        self.x = torch.randn(8192, D, device="cuda")

    def step(self) -> None:
        self.model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.model(self.x).float().square().mean()
        loss.backward()


@compiles
@pytest.mark.parametrize("share", [0.85, 0.7])
@pytest.mark.parametrize("wanted", [{}, {"offload": True}, {"compile": True}], ids=["near", "host", "compiled"])
@pytest.mark.filterwarnings("ignore")  # of the compiler and its libraries
def test_a_plan_keeps_its_budget(wanted: dict[str, Any], share: float) -> None:
    case = Case()
    plain = peak_of(case.step)
    found = graphckpt.plan(case.model, case.step, memory_budget=share, select="[0-7]", **wanted)
    with found.apply():
        peak = peak_of(case.step)
    assert peak <= found.budget_bytes
    assert peak < plain
    assert abs(peak - found.predicted_peak_bytes) <= OFF * found.predicted_peak_bytes
    assert any(row.option != "keep" for row in found.rows)


@compiles
@pytest.mark.filterwarnings("ignore")
def test_layers_that_save_less_when_compiled_draw_the_same_masks() -> None:
    """Other masks would be far off; what runs again may be fused, and so rounded, in another way."""
    gradients, peaks = [], []
    for share in (1.0, 0.5, 0.0):
        case = Case(p=0.5)
        with graphckpt.apply(case.model, {"[0-7]": {"compile": {"activation_memory_budget": share}}}):
            peaks.append(peak_of(case.step))
            torch.manual_seed(5)
            case.step()
        gradients.append([parameter.grad for parameter in case.model.parameters()])
    assert peaks[2] <= peaks[1] < peaks[0]
    for found in gradients[1:]:
        for one, other in zip(found, gradients[0], strict=True):
            assert one is not None
            assert other is not None
            assert torch.linalg.vector_norm(one - other) <= 0.05 * torch.linalg.vector_norm(other)


# --- a step whose weights and optimizer count

Planned = tuple[Plan, Callable[[], object]]


def bytes_of_others() -> int:
    """Returns the bytes on the device of other tests and of cuBLAS, whose workspaces are larger than a test's model."""
    gc.collect()
    layer = nn.Linear(8, 8).cuda()
    layer(
        torch.ones(8, 8, device="cuda", requires_grad=True)
    ).sum().backward()  # each thread makes one at its first use
    del layer
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def share_of(step: Callable[[], object], others: int) -> int:
    """Returns a budget of 80 % of what a step takes, beside the ``others`` that are on the device."""
    return others + int(0.8 * (peak_of(step) - others))


def planned_alone(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, others: int) -> Planned:
    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    plan = graphckpt.plan(model, step, memory_budget=share_of(step, others), select="[0-5]")
    plan.apply()
    return plan, step


def planned_graph(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, others: int) -> Planned:
    step = SquareGraph(model, optimizer=optimizer)
    step.config.capture = "eager"
    plan = step.plan(x, memory_budget=share_of(lambda: step(x), others), select="model.[0-5]")
    plan.apply()
    return plan, lambda: step(x)


@pytest.mark.serial
@pytest.mark.parametrize("planned", [planned_alone, planned_graph])
def test_the_predicted_peak_is_without_the_copies_that_planning_holds(planned: Any) -> None:
    before = bytes_of_others()
    model = residual_layers(6, 128, dropout=0.0).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    plan, step = planned(model, optimizer, torch.randn(512, 128, device="cuda"), before)
    peak = peak_of(step)
    assert abs(plan.predicted_peak_bytes - peak) <= 0.01 * (peak - before)
    assert peak <= plan.budget_bytes


@pytest.mark.parametrize("ends", ["before", "after", "never"])
def test_gradients_of_the_step_before_count_once(ends: str) -> None:
    """Planning restores them at its end. Until then the step frees them, or adds to them, as it does without a plan."""
    others = bytes_of_others()
    model, x = residual_layers(6, 256, dropout=0.0).cuda(), torch.randn(1024, 256, device="cuda")

    def step() -> None:
        if ends == "before":
            model.zero_grad()
        model(x).square().mean().backward()
        if ends == "after":
            model.zero_grad()

    plain = peak_of(step)
    gradients = [None if each.grad is None else each.grad.cpu() for each in model.parameters()]
    how: dict[str, Any] = {"candidates": ["full"], "progress": False}
    plan = graphckpt.plan(model, step, memory_budget=1.0, check=False, **how)
    assert plan.plain_peak_bytes - plain == pytest.approx(0, abs=0.02 * (plain - others)), "before any run under it"
    plan = graphckpt.plan(model, step, memory_budget="max", **how)
    assert plan.plain_peak_bytes - plain == pytest.approx(0, abs=0.01 * (plain - others))
    for each, before in zip(model.parameters(), gradients, strict=True):
        assert (each.grad is None) == (before is None)
        assert before is None or torch.equal(each.grad.cpu(), before)
    plan = graphckpt.plan(model, step, memory_budget=others + int(0.8 * (plain - others)), progress=False)
    with plan.apply():
        peak = peak_of(step)
    assert plan.predicted_peak_bytes - peak == pytest.approx(0, abs=0.01 * (peak - others))
    assert peak <= plan.budget_bytes


@pytest.mark.parametrize("where", ["attribute", "variable", "item"])
@pytest.mark.parametrize("is_graph", [False, True])
def test_tensors_that_a_step_replaces_count_once(where: str, is_graph: bool) -> None:
    """Planning holds those of before, to put them back: outputs that are stored, averages that are computed anew."""
    others = bytes_of_others()
    model, x = residual_layers(6, 64, dropout=0.0).cuda(), torch.randn(512, 64, device="cuda")
    output = torch.zeros(2**22, device="cuda")
    outputs: Any = {"average": output}

    def build(x: torch.Tensor) -> torch.Tensor:
        nonlocal output
        loss: torch.Tensor = model(x).square().mean()
        outputs["average"] = outputs["average"] + 1 if where == "item" else None
        if where == "attribute":
            model[0].output = torch.ones(2**22, device="cuda")
        if where == "variable":
            output = torch.ones(2**22, device="cuda")
        loss.backward()
        return loss

    how: dict[str, Any] = {"memory_budget": "max", "candidates": ["full"], "progress": False}
    if is_graph:
        graph = OfFunction(model, build)
        graph.config.capture = "eager"
        step = partial(graph, x)
        plain = peak_of(step)
        plan = graph.plan(x, **how)
    else:

        def step() -> None:
            build(x)

        plain = peak_of(step)
        plan = graphckpt.plan(model, step, **how)
    assert plan.plain_peak_bytes - plain == pytest.approx(0, abs=0.01 * (plain - others))


class OfFunction(Graph):
    def __init__(self, model: nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        self.function = function

    def build(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def test_other_tensors_of_the_process_count_in_shares_and_in_what_fits() -> None:
    """As workspaces of cuBLAS do: the step does not show them, and the allocator counts them."""
    gc.collect()
    other = torch.zeros(2**24, dtype=torch.uint8, device="cuda")
    model, x = residual_layers(6, 64, dropout=0.0).cuda(), torch.randn(512, 64, device="cuda")

    def step() -> None:
        model(x).square().mean().backward()
        model.zero_grad()

    plain = peak_of(step)
    alive = torch.cuda.memory_allocated()
    how: dict[str, Any] = {"candidates": ["full"], "progress": False}
    plan = graphckpt.plan(model, step, memory_budget=0.5 + alive / plain / 2, **how)
    assert plan.plain_peak_bytes == pytest.approx(plain, rel=0.01)
    assert len(plan.policies) > 0
    with pytest.raises(PlanError, match="workspaces, other tensors") as caught:
        graphckpt.plan(model, step, memory_budget=0.9 * alive / plain, **how)
    least = re.search(r"larger budget: '([^']+)'", str(caught.value))
    assert least is not None
    plan = graphckpt.plan(model, step, memory_budget=least[1], **how)
    with plan.apply():
        peak = peak_of(step)
    assert alive < plan.predicted_peak_bytes == pytest.approx(peak, rel=0.01)
    assert peak <= plan.budget_bytes
    del other


def test_reserved_bytes_are_predicted_and_measured() -> None:
    others = bytes_of_others()
    model = residual_layers(6, 256).cuda()
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(2048, 256, device="cuda")

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    plan = graphckpt.plan(model, step, memory_budget=share_of(step, others), candidates=["full"], progress=False)
    assert plan.measured_peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=0.01)
    assert plan.measured_reserved_bytes >= plan.measured_peak_bytes
    assert plan.predicted_reserved_bytes >= plan.measured_peak_bytes
    if torch.cuda.get_device_name() != "Simulated CUDA device":  # its allocator has other rules
        assert plan.predicted_reserved_bytes == pytest.approx(plan.measured_reserved_bytes, rel=OFF)
    assert "measured in a step under the plan" in str(plan)
