"""`print(graph)` and the debug log."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from helpers.layer_stacks import linear_layers
from helpers.modules import as_module
from helpers.train_graphs import Train, adamw, batches, run_graph, same
from torch import Tensor, nn

from graphckpt import Graph, GraphError


@as_module(lambda: {"first": nn.Linear(4, 6), "rest": nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))})
def Net(self: Any, x: Tensor) -> Tensor:
    return self.rest(self.first(x))


class Shown(Train):
    pass


def test_print_before_and_after_the_first_call() -> None:
    Shown.__name__, model = "Shown", Net()
    graph = Shown(model, adamw(model))
    graph.model.first.config.activation_checkpointing = True
    number = graph.name.removeprefix("Shown_")
    text = f"""Shown_{number}: Shown(training=True)
  model: Net
    first: Linear(in_features=4, out_features=6, bias=True) · activation_checkpointing=True
    rest: Sequential
      0: BatchNorm1d(6, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True)
      1: Linear(in_features=6, out_features=3, bias=True)
  loss: CrossEntropyLoss"""
    printed = repr(graph).replace(" bias=True, track", " track")
    assert printed == text
    x, y = batches(1)[0]
    graph(x, y)
    assert repr(graph).splitlines()[1:3] == ["  input x: float32[8, 4] on cpu", "  input y: int64[8] on cpu"]


def test_consecutive_layers_of_one_kind_and_policy_share_a_line() -> None:
    model = linear_layers(5, 4)
    graph = Shown(model, adamw(model))
    for layer in graph.model[1:4]:
        layer.config.activation_checkpointing = "selective"
    layer = ["      0: Linear(in_features=4, out_features=4, bias=True)", "      1: Tanh"]
    assert repr(graph).splitlines()[2:-1] == [
        *("    0: Sequential", *layer),
        *("    1-3: 3 x Sequential · activation_checkpointing='selective'", *layer),
        *("    4: Sequential", *layer),
    ]


def test_print_names_nested_inputs() -> None:
    class Takes(Graph):
        def build(self, batch: Any, *rest: Any, scale: float) -> None: ...

    graph = Takes()
    graph({"ids": [torch.ones(2)]}, 3, scale=0.5)
    assert re.findall(r"input (.*)", repr(graph)) == ["batch['ids'][0]: float32[2] on cpu", "rest[0]: 3", "scale: 0.5"]


def logged(graph: Train, capsys: pytest.CaptureFixture[str]) -> list[str]:
    capsys.readouterr()
    run_graph(graph, 1)
    return capsys.readouterr().out.splitlines()


def make(**debug: Any) -> Train:
    model = Net()
    graph = Train(model, adamw(model), **debug)
    graph.model.rest.config.activation_checkpointing = True
    return graph


@pytest.mark.parametrize("warm_calls", [0, 5])
@pytest.mark.parametrize("level", [-1, 0, 1, 2, 3])
def test_each_level_says_more(level: int, warm_calls: int, capsys: pytest.CaptureFixture[str]) -> None:
    graph = make()
    run_graph(graph, warm_calls)
    graph.debug(level)
    lines = logged(graph, capsys)
    stages = [line for line in lines if line.startswith("(GRAPH")]
    if level >= 0:
        assert stages[0] == f"(GRAPH:{graph.name}) start running the step."
        assert re.fullmatch(rf"\(GRAPH:{graph.name}\) running the step Done! Cost time: \d+\.\d\ds\.", stages[1])
    assert len(stages) == (2 if level >= 0 else 0)
    blocks = [line for line in lines if re.match(r"  \((INPUT|OUTPUT):", line)]
    if level >= 1:
        assert "  (INPUT:_model.first_input.0:tensor(..., size=(8, 4), dtype=torch.float32))" in blocks
        assert (
            "  (OUTPUT:_model.rest.1_output.0:tensor(..., size=(8, 3), dtype=torch.float32, requires_grad=True))"
            in blocks
        )
        assert any(line.startswith("  (OUTPUT:_loss_output.0:tensor(..., size=()") for line in blocks)
    assert bool(blocks) is (level >= 1)
    ops = [line for line in lines if line.startswith("    (OPERATOR: ")]
    assert bool(ops) is (level >= 2)
    if level >= 2:
        assert sum("aten.addmm.default(tensor(..., size=(6,)" in line for line in ops) == 1
        assert any("-> (tensor(..., size=(8, 6), dtype=torch.float32))" in line for line in ops)
    sources = [line for line in lines if re.match(r"      \w+\.py:\d+ ", line)]
    assert bool(sources) is (level >= 3)
    if level >= 3:
        assert any("return self.rest(self.first(x))" in line for line in sources)
    assert logged(graph, capsys) if level >= 0 else not logged(graph, capsys)
    graph.debug()
    assert logged(graph, capsys) == []


def test_debugging_changes_no_bit() -> None:
    plain, debugged = make(), make(debug_v_level=3)
    debugged.load_state_dict(plain.state_dict())
    assert same(run_graph(plain), run_graph(debugged))
    assert same(plain.model.origin, debugged.model.origin)


def test_the_stack_of_an_op(capsys: pytest.CaptureFixture[str]) -> None:
    graph = make(debug_v_level=2, debug_op_repr_with_py_stack=True, debug_max_py_stack_depth=1)
    lines = logged(graph, capsys)
    first = next(i for i, line in enumerate(lines) if "aten.addmm" in line)
    assert re.match(r"      \w+\.py:\d+ return self.rest\(self.first\(x\)\)", lines[first + 1])
    assert not lines[first + 2].startswith("      ")
    graph.debug(3, max_py_stack_depth=30, only_user_py_stack=False)
    lines = logged(graph, capsys)
    first = next(i for i, line in enumerate(lines) if "aten.addmm" in line)
    assert any("linear.py" in line for line in lines[first + 1 : first + 31])


def test_an_error_is_logged_and_raised(capsys: pytest.CaptureFixture[str]) -> None:
    graph = make(debug_v_level=1)
    hooks = len(graph.model.first._forward_hooks)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        graph(torch.ones(8, 5), torch.zeros(8, dtype=torch.long))
    out = capsys.readouterr().out
    # "mat1 and mat2 ..."; since torch 2.15 "addmm: mat1 and mat2 ...".
    assert re.search(rf"\[ERROR\]\(GRAPH:{graph.name}\) run got error: <class 'RuntimeError'> .*mat1 and mat2", out)
    assert "Done!" not in out
    assert len(graph.model.first._forward_hooks) == hooks


@pytest.mark.parametrize(
    ("ranks", "are_meant"),
    [(None, True), (0, True), ([0, 3], True), (-1, True), ([-1], True), (1, False), ([1, 2], False), ([], False)],
)
def test_ranks_that_are_meant_write_lines(ranks: Any, are_meant: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert bool(logged(make(debug_v_level=0, debug_ranks=ranks), capsys)) is are_meant


@pytest.mark.parametrize("level", [-2, 4, True, "1", 1.0])
def test_levels_and_ranks_out_of_range(level: Any) -> None:
    with pytest.raises(GraphError, match=r"debug: level .* is not within -1 and 3 · fix: use one of -1, 0, 1, 2, 3"):
        make().debug(level)
    with pytest.raises(GraphError, match=r"debug: ranks 'all' must be an int or a list of ints · fix: use 0, \[0, 1\]"):
        make().debug(0, ranks="all")
