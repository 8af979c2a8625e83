"""Every way to call the planner has every option, or says where it is instead."""

from __future__ import annotations

import argparse
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any, Unpack, get_overloads, get_type_hints

import pytest
import torch
from helpers.modules import as_module
from helpers.train_graphs import SquareGraph
from torch import nn

import graphckpt
from graphckpt import ConfigError
from graphckpt.blocks.config import FIELDS
from graphckpt.commands.plan import add_plan
from graphckpt.config.run import fake_steps_from
from graphckpt.integrations.policy_callback import CallbackOptionsDict, PolicyCallback
from graphckpt.integrations.transformers import fit_training_arguments
from graphckpt.planning import PlanOptions, PlanOptionsDict, live_plan, plan_step
from graphckpt.planning.options import FitOptionsDict, SharedOptionsDict, available_bytes
from graphckpt.train.settings import ActivationCheckpointConfig

VALUES = {
    "offload": "disk", "host_budget": "1GiB", "select": ["layers.*"], "candidates": ("full",), "head": {"head": "full"},
    "partition": True, "contiguous": True, "compile": {"backend": "eager"},
    "determinism_check": "values", "group": False, "step_group": None, "check": False, "progress": print,
}  # fmt: skip
ELSEWHERE = {
    "select": "a config has it, which the command reads",
    "group": "in a config all processes plan, and the command is one process",
    "step_group": "in a config all stages run the steps, and the command is one process",
    "progress": "in a config the log shows it, and the command has a bar",
    "partition": "the command plans for one process",
    "compile": "the command cannot compile for an absent device",
    "check": "the command cannot run the step on an absent device",
}


class Caught(Exception):
    """Carries the options that have arrived."""


@pytest.fixture
def caught(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def catch(*args: Any) -> None:
        raise Caught(next(value for value in args if isinstance(value, PlanOptions)))

    import_module("graphckpt.graph.auto_plan")  # at its first import it would take what replaces the function
    monkeypatch.setattr(plan_step, "measure_all", catch)
    monkeypatch.setattr(live_plan, "candidates_for_updates", catch)
    return lambda: None


@as_module(lambda: {"layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), "head": nn.Linear(4, 1)})
def Model(self: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in self.layers:
        x = layer(x)
    return self.head(x).sum()


def arrived(action: Callable[[], object]) -> PlanOptions:
    with pytest.raises(Caught) as error:
        action()
    return error.value.args[0]


def test_every_option_has_a_value() -> None:
    assert tuple(VALUES) == PlanOptions.names() == tuple(option.name for option in fields(PlanOptions))


def test_the_typed_options_are_the_fields() -> None:
    assert get_type_hints(PlanOptionsDict) == get_type_hints(PlanOptions)
    own = {"fit": {"progress"}, "callback": {"select"}}  # parameters of their own, which have other types
    assert FitOptionsDict.__annotations__.keys() == set(PlanOptions.names()) - own["fit"]
    assert SharedOptionsDict.__annotations__.keys() == set(PlanOptions.names()) - own["fit"] - own["callback"]
    assert CallbackOptionsDict.__annotations__.keys() >= set(PlanOptions.names()) - own["callback"]
    assert CallbackOptionsDict.__annotations__.keys() <= {*PlanOptions.names(), *FIELDS} - own["callback"]


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (graphckpt.plan, PlanOptionsDict),
        (graphckpt.fit, FitOptionsDict),
        (fit_training_arguments, FitOptionsDict),
        (get_overloads(graphckpt.Graph.plan)[0], PlanOptionsDict),
        (PolicyCallback.__init__, CallbackOptionsDict),
    ],
)
def test_entry_points_are_typed(function: Callable[..., object], options: type) -> None:
    annotations = function.__annotations__
    assert [text for text in annotations.values() if text.startswith("Unpack[")] == [f"Unpack[{options.__name__}]"]
    assert not annotations.keys() & options.__annotations__.keys(), "no parameter has the name of an option"
    assert vars(inspect.getmodule(function))[options.__name__] is options, "so that the annotation can be resolved"


@pytest.mark.parametrize("function", [graphckpt.plan, graphckpt.fit, fit_training_arguments, graphckpt.Graph.plan])
def test_signatures_list_the_options(function: Callable[..., object]) -> None:
    parameters = inspect.signature(function).parameters
    defaults = {option.name: option.default for option in fields(PlanOptions) if option.name != "progress"}
    options = {name: parameters[name].default for name in defaults}
    assert options == defaults
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in defaults)
    assert ("kwargs" in parameters) == (function is graphckpt.Graph.plan), "inputs of the step"
    assert "options" not in parameters


def test_annotations_can_be_read_at_run_time() -> None:
    assert get_type_hints(graphckpt.plan)["options"] == Unpack[PlanOptionsDict]
    assert get_type_hints(graphckpt.fit)["options"] == Unpack[FitOptionsDict]


@pytest.mark.slow
def test_a_type_checker_knows_the_options(tmp_path: Path) -> None:
    code = """
import graphckpt
import torch
from torch import nn

def steps(model: nn.Module, graph: graphckpt.Graph, x: torch.Tensor) -> None:
    graphckpt.plan(model, lambda: None, memory_budget="max", offload="cpu", select="layers.*", candidates=["full"])
    graphckpt.fit(lambda size: (model, lambda: None), select=nn.Linear, progress=True)
    graph.plan(x, memory_budget=0.5, select="model.layers.*")
    graph.plan(x=x, memory_budget=0.5)
    graphckpt.plan(model, lambda: None, memory_budget="max", ofload="cpu")
    graphckpt.fit(lambda size: (model, lambda: None), contiguous="yes")
"""
    file = tmp_path / "step.py"
    file.write_text(code)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", os.devnull, str(file)]
    shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    errors = [line.partition(": error: ")[2] for line in shown.splitlines() if ": error: " in line]
    assert len(errors) == 2, shown
    assert "ofload" in errors[0]
    assert 'has incompatible type "str"; expected "bool"' in errors[1]


@pytest.mark.parametrize("name", PlanOptions.names())
def test_plan_and_graphs_take_every_option(name: str, caught: Callable[[], None]) -> None:
    model, x = Model(), torch.ones(2, 4)
    value = {"model.head": "full"} if name == "head" else ["model.layers.*"] if name == "select" else VALUES[name]
    given = arrived(lambda: graphckpt.plan(model, lambda: None, memory_budget="min", **{name: VALUES[name]}))
    assert getattr(given, name) == VALUES[name]
    step = SquareGraph(Model())
    assert getattr(arrived(lambda: step.plan(x, memory_budget="min", **{name: value})), name) == value
    step.config.plan_options = {name: value}
    step.config.memory_budget = "min"
    assert getattr(arrived(lambda: step(x)), name) == value


@pytest.mark.parametrize("name", PlanOptions.names())
def test_a_config_has_every_option(name: str) -> None:
    if name not in PlanOptions.names("config"):
        assert name in ELSEWHERE
        return
    value = ["full"] if name == "candidates" else VALUES[name]
    section = ActivationCheckpointConfig(**{name: value})
    assert getattr(section.plan_options(), name) == VALUES[name]


@pytest.mark.parametrize("name", PlanOptions.names())
def test_the_command_has_every_option(name: str, caught: Callable[[], None]) -> None:
    parser = argparse.ArgumentParser()
    add_plan(parser.add_subparsers())
    words = {"head": ["loss_head=full"], "candidates": ["full"], "contiguous": []}.get(name, [str(VALUES[name])])
    arguments = ["plan", "--config-file", "configs/quickstart.py", "task.loss_head=True"]
    flag = f"--{name.replace('_', '-')}"
    if name not in PlanOptions.names("command"):
        assert name in ELSEWHERE
        with pytest.raises(SystemExit):
            parser.parse_args([*arguments, flag, *words])
        return
    parsed = parser.parse_args([*arguments, flag, *words])
    expected = {"loss_head": ["full"]} if name == "head" else VALUES[name]
    assert getattr(arrived(lambda: parsed.run(parsed)), name) == expected


def test_a_config_is_what_the_command_begins_with(caught: Callable[[], None]) -> None:
    parser = argparse.ArgumentParser()
    add_plan(parser.add_subparsers())
    word = "train.activation_checkpoint.host_budget=1GiB"
    for flags, expected in (([], "1GiB"), (["--host-budget", "2GiB"], "2GiB")):
        parsed = parser.parse_args(["plan", "--config-file", "configs/quickstart.py", *flags, word])
        assert arrived(lambda parsed=parsed: parsed.run(parsed)).host_budget == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ofload": True}, r"plan: unknown option 'ofload' · did you mean 'offload'\? · fix: use offload, "),
        ({"host_budget": "12 G"}, r"host_budget: '12 G': unknown unit 'G' · fix: "),
        ({"contiguous": "yes"}, r"contiguous: expected True or False, got 'yes' · fix: "),
        ({"compile": "yes"}, r"compile: "),
    ],
)
def test_faults_are_one_clear_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        graphckpt.plan(Model(), lambda: None, memory_budget="min", **options)


def test_a_slab_is_in_the_plan_of_the_command_too(tmp_path: Path) -> None:
    words, options = ["model.config.n_layer=2"], {"contiguous": True}
    with fake_steps_from("configs/quickstart.py", words, device="h200", options=options) as steps:
        plan = steps.plan("max")
    assert all(row.fields["contiguous"] for row in plan.rows if row.block != "loss_head")


# ---- budgets


def segment(total: int, allocated: int, pool: tuple[int, int] = (0, 0), device: int = 0) -> dict[str, object]:
    return {"device": device, "total_size": total, "allocated_size": allocated, "segment_pool_id": pool}


def test_free_blocks_in_the_pool_of_a_capture_are_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = [segment(100, 60), segment(1000, 10, (0, 1)), segment(500, 0, (0, 1), device=1)]
    of_this = [s for s in segments if s["device"] == 0]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7000, 8000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: sum(s["total_size"] for s in of_this))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: sum(s["allocated_size"] for s in of_this))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for device in ("cuda:0", "cuda"):
        assert available_bytes(torch.device(device), alive=5) == 7000 + 40 + 5
        assert available_bytes(torch.device(device), alive=5, sharers=2) == 3500 + 40 + 5
