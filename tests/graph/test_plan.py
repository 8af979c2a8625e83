"""A Graph that plans its own policies: the budget is kept, and no bit of the training changes."""

from __future__ import annotations

import gc
from weakref import ref

import pytest
import torch
from helpers.layer_stacks import ListModel
from helpers.train_graphs import SquareGraph
from torch import nn

from graphckpt import ConfigError, Graph, GraphError, PlanError
from graphckpt.graph import auto_plan


def made() -> SquareGraph:
    torch.manual_seed(0)
    model = ListModel(6, norm=nn.LayerNorm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = SquareGraph(model, {}, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n))
    torch.manual_seed(1)
    return step


def trained(step: SquareGraph, x: torch.Tensor, steps: int = 4) -> tuple[list[torch.Tensor], float]:
    losses = [step(x) for _ in range(steps)]
    return [*losses, *step.model.origin.parameters()], step._update.optimizers[0].param_groups[0]["lr"]


def same(one: tuple[list[torch.Tensor], float], other: tuple[list[torch.Tensor], float]) -> bool:
    return one[1] == other[1] and all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))


X = torch.randn(256, 16, generator=torch.Generator().manual_seed(2))


def test_plan_keeps_its_budget_and_changes_no_bit() -> None:
    plain = made()
    expected = trained(plain, X)
    step = made()
    found = step.plan(X, memory_budget=0.73)
    found.apply()
    assert same(trained(step, X), expected)
    explained = step.explain(show=False)
    assert explained.peak_bytes == found.predicted_peak_bytes <= found.budget_bytes < found.plain_peak_bytes
    reruns = {row.block: row.reruns for row in explained.rows if row.block.startswith("model.layers.")}
    assert reruns == {row.block: int(row.option != "keep") for row in found.rows}
    assert sum(reruns.values()) > 0


def test_a_plan_replaces_policies_set_on_the_layers_before() -> None:
    step = made()
    step.model.layers[5].config.activation_checkpointing = True
    step.model.layers[5].up.config.offload = "disk"
    found = step.plan(X, memory_budget=1.0)
    found.apply()
    assert {row.option for row in found.rows} == {"keep"}
    assert step.model.layers[5].config.fields() == {}
    assert step.model.layers[5].up.config.fields() == {}


def test_config_plans_in_the_first_calls_and_anew_for_another_budget() -> None:
    expected = trained(made(), X)
    step = made()
    step.config.memory_budget = 0.7
    step.config.plan_options = {"candidates": ["full"]}
    assert same(trained(step, X), expected)
    policies = [layer.config.activation_checkpointing for layer in step.model.layers]
    assert any(policies)
    assert not all(policies)
    step.config.memory_budget = "1GiB"
    for _ in range(3):
        step(X[:100])
    assert [layer.config.activation_checkpointing for layer in step.model.layers] == [None] * 6
    step.config.memory_budget = 0.7
    for _ in range(3):
        step(X)
    assert [layer.config.activation_checkpointing for layer in step.model.layers] == policies


def test_a_plan_that_is_not_applied_leaves_the_flags_and_is_warned_of_once() -> None:
    step = made()
    step.plan(X, memory_budget="min")
    assert [layer.config.fields() for layer in step.model.layers] == [{}] * 6
    with pytest.warns(UserWarning, match=r"runs without the plan that was made .* fix: .*\.plan\(\.\.\.\)\.apply\(\)"):
        step(X)
    step(X)


def test_removing_a_plan_restores_the_flags_of_before() -> None:
    step = made()
    step.model.layers[5].config.activation_checkpointing = True
    step.model.layers[5].up.config.offload = "disk"
    with step.plan(X, memory_budget="min").apply():
        assert any(layer.config.activation_checkpointing for layer in step.model.layers[:5])
    assert step.model.layers[5].config.fields() == {"activation_checkpointing": True}
    assert step.model.layers[5].up.config.fields() == {"offload": "disk"}
    assert [layer.config.fields() for layer in step.model.layers[:5]] == [{}] * 5


def test_a_graph_that_was_planned_dies_with_its_last_reference() -> None:
    step = made()
    step.config.memory_budget = "min"
    step(X)
    assert step.explain(show=False)
    alive = ref(step._step)
    gc.collect()
    gc.disable()
    try:
        del step
        assert alive() is None
    finally:
        gc.enable()


def test_selectors_choose_what_is_planned() -> None:
    found = made().plan(X, memory_budget="min", select=["model.layers.[01]"])
    assert [row.block for row in found.rows] == ["model.layers.0", "model.layers.1"]


def test_a_graph_is_simulated_for_an_absent_device_and_stays_as_it_was() -> None:
    expected = trained(made(), X)
    step = made()
    found = step.plan(X, memory_budget=0.995, device="h200")
    assert found.is_simulated
    assert (found.device, found.model) == ("h200", None)
    assert found.predicted_peak_bytes <= found.budget_bytes < found.plain_peak_bytes
    assert step.plan(X, memory_budget="50%", device="h200").budget_bytes == 70_500_000_000
    with found.apply():
        assert same(trained(step, X), expected)
    with pytest.raises(ConfigError, match="compile: its effect is not known on an absent device"):
        step.plan(X, memory_budget="max", device="h200", compile=True)


@pytest.mark.parametrize(
    ("device", "profile"),
    [
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4060 Ti", "rtx4060ti-16g"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA GeForce GTX 1080", "a100-80g"),
    ],
)
def test_a_present_device_is_simulated_with_its_own_rates(
    device: str, profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: device)
    assert auto_plan._profile_of(torch.device("cuda", 0)).name == profile


def test_micro_batches_are_planned_as_they_run() -> None:
    step = made()
    step.config.set_gradient_accumulation_steps(2)
    found = step.plan(X, memory_budget=0.85)
    found.apply()
    step(X)
    step(X)
    assert step.explain(show=False).peak_bytes == found.predicted_peak_bytes <= found.budget_bytes


def test_faults_name_the_fix_and_leave_all_as_it_was() -> None:
    step = made()
    before = [p.clone() for p in step.model.origin.parameters()]
    with pytest.raises(PlanError, match=r"no plan fits · the lowest possible peak is .* reached .* · fix: "):
        step.plan(X, memory_budget="210KiB")
    assert all(torch.equal(a, b) for a, b in zip(before, step.model.origin.parameters(), strict=True))
    assert step._update.optimizers[0].state == {}
    assert step._update.optimizers[0].param_groups[0]["lr"] == 1e-2
    with pytest.raises(ConfigError, match="memory_budget: 'much'"):
        step.config.memory_budget = "much"
    with pytest.raises(ConfigError, match=r"memory_budget: expected a float greater than 0 and at most 1, .*, got"):
        step.plan(X, memory_budget=2.0)
    with pytest.raises(ConfigError, match="plan_options: unknown option 'ofload' · did you mean 'offload'"):
        step.config.plan_options = {"ofload": True}
    with pytest.raises(GraphError, match="plan: an evaluation graph saves nothing"):
        Graph.trace(lambda x: x).plan(X, memory_budget="min")
