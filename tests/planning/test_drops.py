"""Plans of steps that drop a graph without a backward, that step the optimizer in backward, and of refuted plans."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from helpers.layer_stacks import D, Layer, Listed
from helpers.peaks import tracked_peak
from helpers.plans import planner_of, stepped_once
from torch import nn

from graphckpt import apply, plan
from graphckpt.planning import PlanError
from graphckpt.planning.plan_step import find_blocks
from graphckpt.planning.steps import RealStep

ROWS = 128  # of a batch


class Gate(Layer):
    """Returns a gate too, which only the backward of the gate needs."""

    def forward(self, x):
        hidden = F.gelu(self.up(x))
        return x + self.down(hidden), torch.tanh(hidden)


class Views(nn.Module):
    """An encoder, a copy of it, a head that predicts, and layers whose output may be unused."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.online, self.predictor = Listed(3), nn.Linear(8, 8)
        self.target = copy.deepcopy(self.online)
        self.auxiliary = nn.ModuleList(Layer() for _ in range(2))
        self.gates = nn.ModuleList(Gate() for _ in range(3))
        self.views = torch.randn(2, ROWS, D, generator=torch.Generator().manual_seed(1))

    def similarity(self, one, other):
        return -F.cosine_similarity(self.predictor(one), other).mean()


def simsiam(model):
    return model.similarity(model.online(model.views[0]), model.online(model.views[1]).detach())


def simsiam_target_first(model):
    fixed = model.online(model.views[1]).detach()
    return model.similarity(model.online(model.views[0]), fixed)


def simsiam_target_alive(model):
    fixed = model.online(model.views[1])  # the graph lives until the end of this function
    return model.similarity(model.online(model.views[0]), fixed.detach())


def simsiam_symmetric(model):
    one, other = map(model.online, model.views)
    return model.similarity(one, other.detach()) + model.similarity(other, one.detach())


def byol(model):
    one, other = model.views
    first = model.similarity(model.online(one), model.target(other).detach())
    return first + model.similarity(model.online(other), model.target(one).detach())


def byol_no_grad(model):
    with torch.no_grad():
        fixed = model.target(model.views[1])
    return model.similarity(model.online(model.views[0]), fixed)


def through(layers, x):
    for layer in layers:
        x = layer(x)
    return x


def unused_output(model):
    y = x = through(model.online.layers, model.online.embed(model.views[0]))
    for layer in model.auxiliary:
        y = layer(y)
    return model.online.head(x).square().mean()


def unused_call(model):
    used, _ = model.online(model.views[0]), model.online(model.views[1])
    return used.square().mean()


def micro_batches(model):
    model.online(model.views[0]).square().mean().backward()
    return model.online(model.views[1]).square().mean()


def rebound_output(model):
    for view in model.views:
        y = model.online(view)
    return y.square().mean()


def detached_in_the_middle(model):
    first, *rest = model.online.layers
    x = through(rest, first(model.online.embed(model.views[0])).detach())
    return model.online.head(x).square().mean()


def unused_second_output(model):
    x = model.online.embed(model.views[0])
    for layer in model.gates:
        x, _ = layer(x)  # drops the gate of the layer before
    return model.online.head(x).square().mean()


def gan(model):
    """Discriminates what is generated twice: once detached, once through the generator."""
    generator, discriminator = model.online, nn.Sequential(nn.Linear(8, D), model.auxiliary[0], nn.Linear(D, 1))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-4, foreach=False) for m in (generator, discriminator)]

    def step():
        torch.manual_seed(5)
        real = torch.ones(ROWS, 8)
        fake = generator(model.views[0]).detach()
        (F.softplus(discriminator(fake)) + F.softplus(-discriminator(real))).mean().backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        F.softplus(-discriminator(generator(model.views[0]))).mean().backward()
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()

    return step, optimizers


def truncated(model):
    """Updates the weights after each of four chunks, and passes a detached state on."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)

    def step():
        torch.manual_seed(5)
        state = torch.zeros(ROWS, D)
        for _ in range(4):
            x = through(model.online.layers, model.online.embed(model.views[0] + state))
            state = x.detach()
            model.online.head(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return step, [optimizer]


def optimizer_in_backward(model, loss=lambda model: model.online(model.views[0]).square().mean()):
    optimizers = {p: torch.optim.AdamW([p], lr=1e-4, foreach=False) for p in model.parameters()}

    def update(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(update)

    def step():
        torch.manual_seed(5)
        loss(model).backward()

    return step, optimizers.values()


LOSSES = [
    simsiam, simsiam_target_first, simsiam_target_alive, simsiam_symmetric, byol, byol_no_grad, unused_output,
    unused_second_output, unused_call, micro_batches, rebound_output, detached_in_the_middle,
]  # fmt: skip
STEPS = {
    **{loss.__name__: lambda model, loss=loss: stepped_once(model, loss) for loss in LOSSES},
    "gan": gan,
    "truncated": truncated,
    "optimizer_in_backward": optimizer_in_backward,
    "simsiam_with_optimizer_in_backward": lambda model: optimizer_in_backward(model, simsiam),
}


@pytest.mark.parametrize("name", STEPS)
def test_any_plan_takes_what_is_predicted(name):
    model = Views()
    step, optimizers = STEPS[name](model)
    planner = planner_of(model, step, Layer)
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
        is_bound = name == "unused_second_output" and choice.runs  # a joined layer may leave its second output
        assert peak <= choice.peak if is_bound else peak == choice.peak, (choice.plan, choice.runs)
    assert 0 < planner.measured.model.static_bytes < low
    assert not planner.measured.notes


def joined(planner, rng, count=3):
    """Yields plans in which runs of blocks are recomputed as one."""
    joints, num_blocks = planner.search.joined_runs, len(planner.measured.names)
    for _ in range(count):
        plan, runs = [], []
        while (block := len(plan)) < num_blocks:
            length = rng.choice([1, *joints.lengths(block)])
            runs += [(block, block + length)] if length > 1 else []
            plan += [joints.full] * length
        yield plan, tuple(runs)


@pytest.mark.parametrize("name", ["simsiam", "unused_output", "optimizer_in_backward"])
def test_a_budget_at_the_peak_of_full_is_kept(name):
    model = Views()
    step, optimizers = STEPS[name](model)
    with apply(model, {name: True for name, _ in find_blocks(model, Layer)}):
        budget = tracked_peak(model, step, optimizers)
    found = plan(model, step, memory_budget=budget, select=Layer)
    assert 0 < found.floor_bytes <= budget
    with found.apply():
        assert tracked_peak(model, step, optimizers) == found.predicted_peak_bytes <= budget


def gradient_penalty(model):
    x = model.views[0].clone().requires_grad_()
    y = model.online(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.square().mean() + (gradient.norm(dim=1) - 1).square().mean()


def truncated_with_overlap(model):
    """Runs backward through each call twice: from its own loss, and from that of the next call."""

    def step():
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
def test_a_second_backward_makes_it_an_estimate(build):
    model = Views()
    step, optimizers = build(model)
    for budget in ("min", "1GiB"):
        found = plan(model, step, memory_budget=budget, select=Layer)
        assert [note for note in found.notes if "create_graph=True or retain_graph=True" in note] == list(found.notes)
        with found.apply():
            peak = tracked_peak(model, step, optimizers)
        assert peak <= found.budget_bytes
        assert abs(peak - found.predicted_peak_bytes) <= 0.01 * peak


def test_a_step_whose_graphs_are_all_dropped_cannot_be_planned():
    model = Views()

    def step():
        model.online(model.views[0])

    with pytest.raises(PlanError, match="no backward went through the blocks"):
        plan(model, step, memory_budget="min", select=Layer)


# ---- a plan that its check refutes


@pytest.fixture(scope="module")
def simple():
    """Returns a model, its step, and the lowest and the highest predicted peak."""
    model = Views()
    model.online.layers.extend(Layer() for _ in range(3))
    step, _ = stepped_once(model, lambda model: model.online(model.views[0]).square().mean())
    least, most = (plan(model, step, memory_budget=budget, select=Layer) for budget in ("min", "1GiB"))
    return model, step, least.predicted_peak_bytes, most.predicted_peak_bytes


def measuring(monkeypatch, change):
    """Lets each check measure another peak; returns the peaks."""
    peaks, real_peak = [], RealStep.peak

    def peak(step):
        peaks.append(change(real_peak(step)))
        return peaks[-1]

    monkeypatch.setattr(RealStep, "peak", peak)
    return peaks


def test_a_refuted_plan_is_not_returned(simple, monkeypatch):
    model, step, _, most = simple
    budget = most + 64  # many plans are predicted to fit
    peaks = measuring(monkeypatch, lambda peak: budget + 8)
    with pytest.raises(
        PlanError, match=f"memory_budget {budget} B: no plan fits · the lowest possible peak is {budget + 8} B, reached"
    ):
        plan(model, step, memory_budget=budget, select=Layer)
    assert 2 <= len(peaks) <= 4


def test_the_lowest_plan_is_tried_before_giving_up(simple, monkeypatch):
    model, step, least, most = simple
    measuring(monkeypatch, lambda peak: peak if peak <= least else peak + most)
    for budget in (least, (least + most) // 2, most - 1):
        found = plan(model, step, memory_budget=budget, select=Layer)
        assert found.predicted_peak_bytes == found.floor_bytes == least


def test_a_plan_that_takes_less_than_predicted_is_found(simple, monkeypatch):
    model, step, least, most = simple
    measuring(monkeypatch, lambda peak: peak // 2)
    for budget in (least // 2, least - 1, most - 1):
        found = plan(model, step, memory_budget=budget, select=Layer)
        assert 0 < found.floor_bytes <= found.predicted_peak_bytes <= budget
        with found.apply():
            assert RealStep(model, step).peak() == found.predicted_peak_bytes
    with pytest.raises(PlanError, match="no plan fits"):
        plan(model, step, memory_budget=least // 2 - 1, select=Layer)
    with pytest.raises(PlanError, match=f"the lowest possible peak is {least} B, reached "):
        plan(model, step, memory_budget=least - 1, select=Layer, check=False)


@pytest.mark.parametrize("loss", [simsiam, simsiam_symmetric])
def test_layers_that_are_called_twice_may_offload(loss, tmp_path):
    model = Views()
    step, _ = stepped_once(model, loss)
    found = plan(model, step, memory_budget=0.6, select=Layer, offload=f"disk:{tmp_path}", check=False)
    assert found.predicted_peak_bytes <= found.budget_bytes
