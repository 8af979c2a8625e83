"""Compiled layers are planned as they run: the bytes are predicted, and the compiled code runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.layer_stacks import ListModel, gpt2_step
from helpers.peaks import tracked_peak
from helpers.train_graphs import SquareGraph
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import graphckpt
from graphckpt import ConfigError
from graphckpt.blocks.forward import BlockForward
from graphckpt.ledger.live_memory import LiveBytes
from graphckpt.planning import Plan, plan_step
from graphckpt.planning.sweep import measure

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    # The compiler reads `.grad` of what it is given, and says so.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),
]

EAGER = {"backend": "eager"}  # runs what it has traced as it is
AOT = {"backend": "aot_eager"}


X = torch.randn(256, 16, generator=torch.Generator().manual_seed(2))


def stack() -> tuple[nn.Module, Callable[[], None]]:
    torch.manual_seed(0)
    model = ListModel(5, 4, nn.Identity)

    def step() -> None:
        model.zero_grad()
        model(X).square().mean().backward()

    return model, step


@pytest.mark.parametrize("build", [stack, pytest.param(gpt2_step, marks=pytest.mark.slow)])
@pytest.mark.parametrize("share", [0.9, 0.75])
def test_a_plan_takes_what_it_says(build: Callable[[], tuple[nn.Module, Callable[[], None]]], share: float) -> None:
    model, step = build()
    found = graphckpt.plan(model, step, memory_budget=share, compile=AOT, check=False)
    assert found.predicted_peak_bytes <= found.budget_bytes < found.plain_peak_bytes
    assert {row.option for row in found.rows} - {"keep, compiled"}
    assert all(fields["compile"].items() > AOT.items() for fields in found.policies.values())
    assert len(found.policies) == len(found.rows), "a layer that keeps everything is compiled too"
    assert not any(isinstance(module.forward, BlockForward) for module in model.modules())
    assert not any("forward" in vars(module) for module in model.modules())
    with found.apply():
        assert tracked_peak(model, step) == found.predicted_peak_bytes


def test_bits_are_those_of_compiled_layers_without_a_plan() -> None:
    model, step = stack()
    with graphckpt.apply(model, {"layers.*": {"compile": AOT}}):
        torch.manual_seed(5)
        step()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    for share in ("min", 0.85):
        found = graphckpt.plan(model, step, memory_budget=share, compile=AOT)
        with found.apply():
            torch.manual_seed(5)
            step()
        assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), expected, strict=True))


def test_layers_save_as_much_as_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's own levels, which run nothing twice that it need not, come before a second run of all."""
    model, step = stack()

    def measured(*args: Any) -> Any:
        found = measure(*args)
        names = ["keep", "full", *(f"keep at {n} %" for n in (80, 50, 30, 10))]
        assert [option.name for option in found.options] == names
        seconds = {"forward_seconds": ((1.0,) * 6,) * 5, "backward_seconds": ((1.0, 2.0, 1.1, 1.3, 1.5, 1.7),) * 5}
        return replace(found, step_seconds=11.0, **seconds)  # so that no noise decides

    monkeypatch.setattr(plan_step, "measure", measured)
    found = graphckpt.plan(model, step, memory_budget=0.6, compile=AOT, check=False)
    shares = [fields["compile"]["activation_memory_budget"] for fields in found.policies.values()]
    assert 1.0 in shares
    assert set(shares) & {0.8, 0.5, 0.3, 0.1}
    assert not any(fields["activation_checkpointing"] for fields in found.policies.values())
    peaks = []
    for share in (1.0, 0.3):
        with graphckpt.apply(model, {"layers.*": {"compile": AOT | {"activation_memory_budget": share}}}):
            peaks.append(tracked_peak(model, step))
    assert peaks[0] == found.plain_peak_bytes
    assert peaks[1] < found.predicted_peak_bytes <= found.budget_bytes < peaks[0]


def test_a_share_or_rules_that_are_given_leave_out_what_the_compiler_may_do() -> None:
    model, step = stack()
    options = AOT | {"activation_memory_budget": 0.5}
    found = graphckpt.plan(model, step, memory_budget="min", compile=options)
    assert all(fields["compile"] == options for fields in found.policies.values())
    assert {row.option for row in found.rows} <= {"keep, compiled", "full, compiled", "joined, compiled"}
    found = graphckpt.plan(model, step, memory_budget=0.5, compile=AOT, candidates=["full"])
    assert all(fields["compile"] == AOT for fields in found.policies.values()), "so do rules that are named"


def test_compiled_code_runs_while_the_step_is_measured_and_under_the_plan() -> None:
    model, step = stack()
    counter = CompileCounterWithBackend("aot_eager")
    found = graphckpt.plan(model, step, memory_budget=0.5, compile={"backend": counter}, check=False)
    assert counter.frame_count >= 1
    first = counter.frame_count
    step()
    assert counter.frame_count == first, "nothing is compiled behind the plan's back"
    torch._dynamo.reset()
    with found.apply():
        step()
    assert counter.frame_count > first


def test_layers_that_their_owner_has_compiled_are_planned_as_they_are() -> None:
    model, step = stack()
    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, backend="aot_eager")
    found = graphckpt.plan(model, step, memory_budget=0.5)
    assert not any("compile" in fields for fields in found.policies.values())
    with found.apply():
        assert tracked_peak(model, step) == found.predicted_peak_bytes <= found.budget_bytes


def test_a_part_that_its_owner_has_compiled_runs_again_with_its_layer() -> None:
    model, step = stack()
    for layer in model.layers:
        layer.up.forward = torch.compile(layer.up.forward, backend="aot_eager")
    torch.manual_seed(5)
    step()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    rules = [graphckpt.plan(model, step, memory_budget=share).policies for share in (0.9, 0.75, "min")]
    for rule in (*rules, {"layers.*": "selective"}, {"layers.*": graphckpt.Selective("attention")}):
        with graphckpt.apply(model, rule):
            for _ in range(2):  # a first call learns
                torch.manual_seed(5)
                step()
        assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), expected, strict=True))


def test_a_plan_with_compiled_layers_can_be_saved(tmp_path: Path) -> None:
    model, step = stack()
    found = graphckpt.plan(model, step, memory_budget=0.5, compile=EAGER)
    found.save(tmp_path / "plan.yaml")
    again = Plan.load(tmp_path / "plan.yaml")
    assert again.policies == found.policies
    with again.apply(model):
        assert tracked_peak(model, step) == found.predicted_peak_bytes


@pytest.mark.parametrize("how", ["in place", "a layer", "from outside"])
def test_a_model_that_is_compiled_as_a_whole_is_refused(how: str) -> None:
    model, step = stack()
    if how == "in place":
        model.compile(backend="eager")
    elif how == "a layer":
        model.layers[2].compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    with pytest.raises(ConfigError, match=r"expected a module that is not compiled as a whole.*compile=True"):
        graphckpt.plan(model, step, memory_budget=0.5, select="*layers.*")


def test_a_part_beside_the_layers_or_in_one_may_be_compiled_as_a_whole() -> None:
    model, step = stack()
    model.head.compile(backend="aot_eager")
    model.layers[1].up.compile(backend="aot_eager")
    found = graphckpt.plan(model, step, memory_budget=0.6, candidates=["full"])
    with found.apply():
        assert tracked_peak(model, step) == found.predicted_peak_bytes <= found.budget_bytes


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("yes", "compile: expected a bool or a dict of options, got 'yes'"),
        ({"dynamik": True}, r"compile: torch\.compile has no option 'dynamik' · did you mean 'dynamic'"),
    ],
)
def test_an_unknown_option_of_compile_is_an_error_at_once(value: dict[str, Any] | str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        graphckpt.plan(*stack(), memory_budget=0.5, compile=value)


def test_a_value_that_the_compiler_refuses_is_its_own_error_and_leaves_the_model_as_it_was() -> None:
    model, step = stack()
    with pytest.raises(RuntimeError, match="nonsense"):
        graphckpt.plan(model, step, memory_budget=0.5, compile={"mode": "nonsense"})
    assert not any("forward" in vars(module) for module in model.modules())


def planned(step: SquareGraph, **options: Any) -> Plan:
    found = step.plan(X, **options)
    found.apply()
    return found


def compiled_of(step: SquareGraph) -> list[Any]:
    return [step.model.layers[n].config.compile for n in range(5)]


def test_a_graph_takes_over_how_its_blocks_are_compiled() -> None:
    step = SquareGraph(stack()[0])
    for layer in step.model.layers:
        layer.config.compile = EAGER
    found = planned(step, memory_budget=0.5)
    assert {row.option for row in found.rows} <= {"full, compiled", "joined, compiled", "keep, compiled"}
    assert compiled_of(step) == [EAGER] * 5
    step(X)
    planned(step, memory_budget=0.5, compile=False)
    assert compiled_of(step) == [None] * 5


@pytest.mark.slow
def test_a_graph_plans_again_what_its_layers_save() -> None:
    step = SquareGraph(stack()[0])
    step.config.plan_options = {"compile": AOT}
    step.config.memory_budget = 0.6
    seen = []
    for rows in (256, 128):
        step(X[:rows])
        seen.append(compiled_of(step))
        assert all(AOT.items() < how.items() for how in seen[-1])
    assert planned(step, memory_budget=0.6).policies.keys() == {f"model.layers.{n}" for n in range(5)}
    assert all(AOT.items() < how.items() for how in compiled_of(step))


def test_a_graph_runs_what_the_plan_says_of_layers_that_were_compiled_before() -> None:
    step = SquareGraph(stack()[0])
    for number, layer in enumerate(step.model.layers):
        layer.config.compile = AOT | {"activation_memory_budget": (0.3, 0.8)[number % 2]}
    step(X)
    found = planned(step, memory_budget=0.5)
    step(X)
    with LiveBytes(record_timeline=False) as live:
        step(X)
    assert live.peak_bytes <= found.predicted_peak_bytes <= found.budget_bytes
    shown = {row.block: row.rule for row in step.explain(show=False).rows}
    assert {row.block: row.option for row in found.rows}.items() <= shown.items()


def test_a_graph_compiles_what_its_plan_options_say() -> None:
    step = SquareGraph(stack()[0])
    step.config.plan_options = {"compile": EAGER}
    step.config.memory_budget = 0.5
    step(X)
    assert compiled_of(step) == [EAGER] * 5


@pytest.mark.parametrize("value", [True, {}])
@pytest.mark.parametrize("name", ["layers.0", "layers.0.up"])
def test_blocks_that_are_compiled_in_different_ways_are_refused(name: str, value: bool | dict[str, Any]) -> None:
    step = SquareGraph(stack()[0])
    block = step.model.layers[0]
    (block.up if name.endswith("up") else block).config.compile = value
    with pytest.raises(ConfigError, match=r"plan: expected planned blocks with equal `compile`"):
        step.plan(X, memory_budget=0.5)
