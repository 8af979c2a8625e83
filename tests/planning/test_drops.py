"""Plans of steps that drop a graph without a backward, that step the optimizer in backward, and of refuted plans."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from helpers.layer_stacks import D, ResidualLayer
from helpers.odd_steps import ROWS, STEPS, UpdateStep, Views, simsiam, simsiam_symmetric, through
from helpers.peaks import tracked_peak
from helpers.plans import change_levels, planner_of, stepped_once

from graphckpt import apply, plan
from graphckpt.planning import PlanError, step_clock
from graphckpt.planning.plan_step import find_blocks
from graphckpt.planning.planner import Planner
from graphckpt.planning.steps import RealStep, peak_of


@pytest.mark.parametrize("name", STEPS)
def test_any_plan_takes_what_is_predicted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Seconds of ops, by which levels of `selective` are found, that do not depend on the load of the machine.
    seconds = random.Random(0)
    clock = itertools.accumulate(seconds.uniform(1e-6, 2e-5) for _ in itertools.count())
    monkeypatch.setattr(step_clock, "process_time", clock.__next__)
    model = Views()
    step, optimizers = STEPS[name](model)
    planner = planner_of(model, step, ResidualLayer)
    blocks = planner.measured.names
    rng, options = random.Random(0), range(len(planner.measured.options))
    choices = [planner.search.evaluate([option] * len(blocks)) for option in options]
    choices += [planner.search.evaluate([rng.choice(options) for _ in blocks]) for _ in range(3)]
    choices += [planner.search.evaluate(plan, runs) for plan, runs in joined(planner, rng)]
    low, high = planner.floor.peak, planner.plain.peak
    choices += [planner.search.fastest(low + (high - low) * n // 3) for n in range(3)]
    for choice in choices:
        found = planner.to_plan(choice, choice.peak)
        with found.apply():
            peak = tracked_peak(model, step, optimizers)
        # Of equal gates, only the last one is used: what the others drop under a level is read from one of them.
        # With 24 seeds of the clock, predictions were up to 17 % too high and 16 % too low; with real times, 24 % high.
        most_off = 0.25 * peak if name == "unused_second_output" else 0
        assert abs(peak - choice.peak) <= most_off, (choice.plan, choice.runs)
    assert 0 < planner.measured.model.static_bytes < low
    assert not planner.measured.notes


def joined(
    planner: Planner, rng: random.Random, count: int = 3
) -> Iterator[tuple[list[int], tuple[tuple[int, int], ...]]]:
    """Yields plans in which runs of blocks are recomputed as one."""
    joints, num_blocks = planner.search.joined_runs, len(planner.measured.names)
    for _ in range(count):
        plan, runs = [], []
        while (block := len(plan)) < num_blocks:
            length = rng.choice([1, *joints.lengths(block)])
            runs += [(block, block + length)] if length > 1 else []
            plan += [joints.full] * length
        yield plan, tuple(runs)


@pytest.mark.parametrize("name", ["simsiam", "unused_output", "unused_second_output", "optimizer_in_backward"])
def test_a_budget_at_the_peak_of_full_is_kept(name: str) -> None:
    model = Views()
    step, optimizers = STEPS[name](model)
    with apply(model, {name: True for name, _ in find_blocks(model, ResidualLayer)}):
        budget = tracked_peak(model, step, optimizers)
    found = plan(model, step, memory_budget=budget, select=ResidualLayer)
    assert 0 < found.floor_bytes <= budget
    with found.apply():
        assert tracked_peak(model, step, optimizers) == found.predicted_peak_bytes <= budget


def gradient_penalty(model: Views) -> torch.Tensor:
    x = model.views[0].clone().requires_grad_()
    y = model.online(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.square().mean() + (gradient.norm(dim=1) - 1).square().mean()


def truncated_with_overlap(model: Views) -> UpdateStep:
    """Runs backward through each call twice: from its own loss, and from that of the next call."""

    def step() -> None:
        state = last = None
        for _ in range(4):
            state = torch.zeros(ROWS, D) if last is None else last.detach().requires_grad_()
            x = through(model.online.layers, model.online.embed(model.views[0] + state))
            model.online.head(x).square().mean().backward(retain_graph=True)
            if last is not None:
                last.backward(state.grad)
            last = x
        model.zero_grad()

    return step, []


@pytest.mark.parametrize("build", [lambda model: stepped_once(model, gradient_penalty), truncated_with_overlap])
def test_a_second_backward_makes_it_an_estimate(build: Callable[[Views], UpdateStep]) -> None:
    model = Views()
    step, optimizers = build(model)
    for budget in ("min", "1GiB"):
        found = plan(model, step, memory_budget=budget, select=ResidualLayer)
        notes = [note for note in found.notes if "optimizer states" not in note]
        assert [note for note in notes if "create_graph=True or retain_graph=True" in note] == notes != []
        with found.apply():
            peak = tracked_peak(model, step, optimizers)
        assert peak <= found.budget_bytes
        assert abs(peak - found.predicted_peak_bytes) <= 0.01 * peak


def test_a_step_whose_graphs_are_all_dropped_cannot_be_planned() -> None:
    model = Views()

    def step() -> None:
        model.online(model.views[0])

    with pytest.raises(PlanError, match="no backward went through the blocks"):
        plan(model, step, memory_budget="min", select=ResidualLayer)


# ---- a plan that its check refutes


StepWithPeaks = tuple[Views, Callable[[], None], int, int]


@pytest.fixture(scope="module")
def simple() -> StepWithPeaks:
    """Returns a model, its step, and the lowest and the highest predicted peak."""
    model = Views()
    model.online.layers.extend(ResidualLayer() for _ in range(3))
    step, _ = stepped_once(model, lambda model: model.online(model.views[0]).square().mean())
    least, most = (plan(model, step, memory_budget=budget, select=ResidualLayer) for budget in ("min", "1GiB"))
    return model, step, least.predicted_peak_bytes, most.predicted_peak_bytes


def test_a_refuted_plan_is_not_returned(simple: StepWithPeaks, monkeypatch: pytest.MonkeyPatch) -> None:
    model, step, _, most = simple
    budget = most + 64  # many plans are predicted to fit
    peaks = change_levels(monkeypatch, lambda peak: budget + 8)
    with pytest.raises(
        PlanError, match=f"memory_budget {budget} B: no plan fits · the lowest possible peak is {budget + 8} B, reached"
    ):
        plan(model, step, memory_budget=budget, select=ResidualLayer)
    assert 2 <= len(peaks) <= 7


def test_the_lowest_plan_is_tried_before_giving_up(simple: StepWithPeaks, monkeypatch: pytest.MonkeyPatch) -> None:
    model, step, least, most = simple
    change_levels(monkeypatch, lambda peak: peak if peak <= least else peak + most)
    for budget in (least, (least + most) // 2, most - 1):
        found = plan(model, step, memory_budget=budget, select=ResidualLayer)
        assert found.predicted_peak_bytes == found.floor_bytes == least


def test_a_plan_that_takes_less_than_predicted_is_found(simple: StepWithPeaks, monkeypatch: pytest.MonkeyPatch) -> None:
    model, step, least, most = simple
    change_levels(monkeypatch, lambda peak: peak // 2)
    for budget in (least // 2, least - 1, most - 1):
        found = plan(model, step, memory_budget=budget, select=ResidualLayer)
        assert 0 < found.floor_bytes <= found.predicted_peak_bytes <= budget
        with found.apply():
            assert peak_of(RealStep(model, step).levels()) == found.predicted_peak_bytes
    with pytest.raises(PlanError, match="no plan fits"):
        plan(model, step, memory_budget=least // 2 - 1, select=ResidualLayer)
    with pytest.raises(PlanError, match=f"the lowest possible peak is {least} B, reached "):
        plan(model, step, memory_budget=least - 1, select=ResidualLayer, check=False)


@pytest.mark.parametrize("loss", [simsiam, simsiam_symmetric])
def test_layers_that_are_called_twice_may_offload(loss: Callable[[Views], torch.Tensor], tmp_path: Path) -> None:
    model = Views()
    step, _ = stepped_once(model, loss)
    found = plan(model, step, memory_budget=0.6, select=ResidualLayer, offload=f"disk:{tmp_path}", check=False)
    assert found.predicted_peak_bytes <= found.budget_bytes
