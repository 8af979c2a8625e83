"""A training loop whose batches grow is planned on its own steps, and never breaks."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.layer_stacks import ReLULayer, stack_of
from helpers.peaks import tracked_peak
from torch import nn

from graphckpt.blocks.forward import policy_of
from graphckpt.budget import Budget
from graphckpt.errors import PlanError
from graphckpt.planning.live_plan import LivePlan
from graphckpt.planning.options import PlanOptions
from graphckpt.planning.plan import Plan
from graphckpt.planning.planner import Dialogue, corrected


class Loop:
    """A training loop, whose updates are planned for."""

    def __init__(
        self,
        budget: Budget,
        candidates: tuple[str, ...] | None = ("full",),
        device: str = "cpu",
        num_layers: int = 4,
        **more: Any,
    ) -> None:
        self.device = device
        self.model = stack_of(ReLULayer, num_layers).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        self.lines = []
        options = PlanOptions(candidates=candidates, progress=False, **more)
        self.live = LivePlan(self.model, budget, options, self.lines.append)

    def step(self, size: int) -> None:
        self.model(torch.ones(size, 16, device=self.device)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def updates(self, *sizes: int) -> list[bool]:
        """Runs one update of each size, and returns which of them ended with a new plan."""
        planned = []
        for size in sizes:
            self.live.begin_step()
            self.step(size)
            planned.append(self.live.end_step())
            self.handle = self.live.handle  # which callbacks keep alive, until they see another one
        return planned

    def peak(self, size: int) -> int:
        return tracked_peak(self.model, lambda: self.step(size), [self.optimizer])


def test_larger_batches_one_after_the_other_recompute_every_block_and_are_planned_for() -> None:
    loop = Loop("min")
    assert loop.updates(256, 256, 256) == [False, True, False]
    first = loop.live.plan
    assert loop.updates(512) == [True], "the fourth update"
    assert loop.updates(512, 1024) == [False, True], "two updates after the plan before"
    assert loop.updates(1024, 2048, 2048) == [False, False, False], "the next such plan waits for four"
    assert loop.live.handle is not None, "the policies of the plan until a batch is too large for them"
    assert loop.updates(2048) == [True], "the tenth"
    assert loop.lines == ["plans from at most 5 updates", *["planned again, for the largest batch so far"] * 3]
    assert first.predicted_peak_bytes < loop.peak(2048) <= loop.live.plan.predicted_peak_bytes
    loop.live.close()


@pytest.mark.parametrize("budget", ["1GiB", 420_000])
def test_no_layer_runs_more_often_than_its_policy_says(budget: int | str) -> None:
    loop = Loop(budget, candidates=None)
    calls, num_updates = [], 0
    for layer in loop.model:
        layer.up.register_forward_pre_hook(lambda *_: calls.append(1))
    while not loop.live.is_settled:
        before = len(calls)
        loop.updates(256)
        num_updates += 1
        assert len(calls) - before <= 2 * len(loop.model), "forward and recomputation"
    plan = loop.live.plan
    assert plan.keeps_everything == (budget == "1GiB")
    assert num_updates == 3 if plan.keeps_everything else num_updates <= 8
    assert loop.peak(256) == plan.predicted_peak_bytes <= plan.budget_bytes
    loop.live.close()


def test_a_layer_next_to_the_last_is_compared_with_layers_there() -> None:
    """The gradient of the last layer is that of a sum, a number: what the one before frees is less by a gradient."""
    loop = Loop(980_000, candidates=None, num_layers=8)
    loop.updates(*[384] * 8)
    plan = loop.live.plan
    assert 0 < len(plan.policies) < 8
    assert plan.correction_bytes == 0
    assert loop.peak(384) == plan.predicted_peak_bytes <= plan.budget_bytes
    loop.live.close()


def test_no_faster_plan_is_tried_where_no_update_would_check_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(420_000, candidates=None)
    while loop.live.plan is None:
        loop.updates(256)
    first = loop.live.plan
    loop.live.plan = corrected(first, 40_000)
    loop.live._checks_left = 1
    monkeypatch.setattr(Dialogue, "ask", lambda _: pytest.fail("it was planned again"))
    assert loop.updates(256) == [False]
    assert loop.live.plan == first
    loop.live.close()


class Holder(Loop):
    """Holds a tensor of some KiB during each update, of another size since there is a plan."""

    def __init__(self, budget: Budget, before: int, since: int) -> None:
        super().__init__(budget)
        self.before, self.since = before, since

    def step(self, size: int) -> None:
        held = torch.ones(self.before if self.live.plan is None else self.since, 256)
        super().step(size)
        del held


@pytest.mark.filterwarnings("ignore:graphckpt. a step took .* planning again with a correction:UserWarning")
@pytest.mark.parametrize(("before", "since", "warnings"), [(0, 30, 1), (40, 0, 0)], ids=["more", "less"])
def test_an_update_that_is_not_as_predicted_leads_to_the_plan_that_fits_best(
    before: int, since: int, warnings: int, recwarn: pytest.WarningsRecorder
) -> None:
    direct = Holder(450_000, since, since)
    direct.updates(*[256] * 9)
    direct.live.close()
    loop = Holder(450_000, before, since)
    loop.updates(*[256] * 9)
    assert loop.live.is_settled
    plan = loop.live.plan
    assert len([each for each in recwarn if "planning again" in str(each.message)]) == warnings
    assert len(plan.policies) == len(direct.live.plan.policies)
    assert loop.peak(256) == plan.predicted_peak_bytes <= plan.budget_bytes
    own = [each for each in plan.front() if each.policies == plan.policies]
    assert {each.predicted_peak_bytes for each in own} <= {plan.predicted_peak_bytes}, "counted in once"
    loop.live.close()


def test_a_step_without_a_backward_is_not_planned_for() -> None:
    loop = Loop("min")

    def skip(size: int) -> bool:
        loop.live.begin_step()
        if size:
            loop.model(torch.ones(size, 16))
        loop.optimizer.step()
        return loop.live.end_step()

    assert loop.updates(8) == [False]
    assert not skip(0)
    assert not skip(8)
    assert loop.updates(8) == [True], "the next step"
    assert loop.updates(8, 16, 24) == [False, True, False]
    assert skip(32), "the eighth update"
    assert loop.peak(24) <= loop.live.plan.predicted_peak_bytes < loop.peak(32), "that of the smaller batch"
    loop.live.close()


@pytest.mark.parametrize("block", [0, 2])
@pytest.mark.parametrize("is_ended", [False, True])
def test_a_step_that_fails_in_a_block_does_not_end_the_training(block: int, is_ended: bool) -> None:
    loop = Loop("min")

    def fail(size: int) -> None:
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


def test_parameters_of_another_class_are_planned_for() -> None:
    class Odd(nn.Parameter):
        pass

    loop = Loop("1GiB")
    loop.model[1].up.weight = Odd(loop.model[1].up.weight.detach())
    loop.updates(256, 256, 256, 256)
    assert loop.live.plan.keeps_everything
    loop.live.close()


@pytest.mark.parametrize("budget", [200_000, 2_750_000])
def test_a_budget_that_nothing_fits_names_the_lowest_peak_and_what_a_callback_takes(budget: int) -> None:
    loop = Loop(budget, num_layers=8)
    with pytest.raises(PlanError, match=r"no plan fits · the lowest possible peak is .* MiB, reached ") as error:
        loop.updates(*[2048] * 8)
    fix = str(error.value).partition("fix: ")[2]
    assert "head" not in fix
    assert "segments" not in fix
    loop.live.close()


@pytest.mark.parametrize("host_budget", [None, 300_000])
def test_offloaded_layers_are_planned_for(host_budget: int | None, tmp_path: Path) -> None:
    """A layer that offloads everything takes less than one that keeps it, and recomputes nothing."""
    more = {"offload": f"disk:{tmp_path}", "host_budget": host_budget}
    loop = Loop(480_000, **more)
    loop.updates(*[256] * 9)
    plan = loop.live.plan
    offloaded = [row for row in plan.rows if row.moved_bytes]
    assert plan.predicted_peak_bytes <= plan.budget_bytes < plan.plain_peak_bytes
    assert loop.peak(256) <= 1.01 * plan.predicted_peak_bytes
    assert sum(row.moved_bytes for row in offloaded) <= (host_budget or 10**9)
    loop.live.close()


class Student(Loop):
    """Its teacher is a copy of the model that each update makes anew, at some moment of the step."""

    def __init__(self, moment: str = "before") -> None:
        super().__init__("min")
        self.moment = moment
        self.features = []

    def step(self, size: int) -> None:
        x = torch.ones(size, 16)
        teacher = self.copied() if self.moment == "before" else None
        y = self.model(x)
        teacher = self.copied() if self.moment == "between" else teacher
        y.sum().backward()
        teacher = teacher or self.copied()
        expected = self.model(x).detach()
        self.features.append(torch.equal(teacher(x), expected))
        teacher(x).sum().backward()
        assert not any(p.grad is None for p in teacher.parameters())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def copied(self) -> nn.Module:
        return copy.deepcopy(self.model)


class SavedStudent(Student):
    def copied(self) -> nn.Module:
        file = io.BytesIO()
        torch.save(self.model, file)
        file.seek(0)
        return torch.load(file, weights_only=False)


@pytest.mark.parametrize("kind", [Student, SavedStudent])
@pytest.mark.parametrize("moment", ["before", "between", "after"])
def test_copies_that_are_made_in_every_update_have_no_part_in_it(kind: type[Student], moment: str) -> None:
    loop = kind(moment)
    assert loop.updates(64, 64, 64) == [False, True, False]
    assert loop.updates(128, 128) == [True, False]
    assert loop.features == [True] * 5
    assert loop.live.handle is not None
    loop.live.close()
    hooks = [m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in loop.model.modules()]
    assert not any(hooks)


class Replaced(Loop):
    """Some layers are replaced by copies of others before each update, as a teacher by its student."""

    def __init__(self, new: Callable[[nn.Sequential], nn.Module], every: int = 1) -> None:
        super().__init__("min")
        self.new = new
        self.every = every
        self.number = 0

    def step(self, size: int) -> None:
        if self.number % self.every == 0:
            self.model[2] = self.new(self.model)
        self.number += 1
        super().step(size)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("new", [lambda model: copy.deepcopy(model[1]), lambda _: ReLULayer()])
def test_layers_that_are_replaced_get_the_policies_of_the_ones_before(
    new: Callable[[nn.Sequential], nn.Module], every: int
) -> None:
    loop = Replaced(new, every)
    planned = loop.updates(*[64] * 20)
    assert any(planned)
    loop.every = 100
    loop.updates(64)
    policies = {number: policy_of(layer) for number, layer in enumerate(loop.model)}
    assert {number: None if one is None else one.rule.name for number, one in policies.items()} == {
        number: {"keep": None}.get(rule, rule) for number, rule in enumerate(rules_of(loop.live.plan))
    }
    loop.live.close()
    assert not any("forward" in vars(module) for module in loop.model.modules())


def rules_of(plan: Plan) -> list[str]:
    return [row.option for name in "0123" for row in plan.rows if row.block == name]


def test_a_layer_that_is_dropped_is_planned_for_no_more() -> None:
    loop = Loop("min")
    loop.updates(64)
    del loop.model[3]
    assert loop.updates(64, 64) == [True, False]
    del loop.model[2]
    loop.updates(64, 128, 128, 128)
    assert [name for name, layer in loop.model.named_children() if policy_of(layer) is not None] != []
    loop.live.close()


@pytest.mark.gpu
def test_the_allocator_of_a_device_plans_a_training(device: str) -> None:
    """Nothing is counted op by op: levels are those of the allocator, which rounds up and has other tensors as well."""
    gc.collect()  # of other tests
    other = torch.ones(1000, device=device)
    plain = Loop("max", device=device)
    plain.live.close()
    plain.step(256)
    alive = torch.cuda.memory_allocated()  # with workspaces of cuBLAS, which are larger than such a model
    torch.cuda.reset_peak_memory_stats()
    plain.step(256)
    budget = alive + int(0.8 * (torch.cuda.max_memory_allocated() - alive))
    del plain
    gc.collect()
    loop = Loop(budget, device=device, determinism_check="none")  # a check takes a few KiB from the first one on
    loop.updates(*[256] * 5)
    plan = loop.live.plan
    assert loop.live.is_settled
    assert 0 < len(plan.policies) < len(loop.model)
    assert plan.device.startswith(device)
    torch.cuda.reset_peak_memory_stats()
    loop.step(256)
    assert torch.cuda.max_memory_allocated() == pytest.approx(plan.predicted_peak_bytes, rel=0.01)
    assert torch.cuda.max_memory_allocated() <= plan.budget_bytes < plan.plain_peak_bytes
    del other
    loop.live.close()
