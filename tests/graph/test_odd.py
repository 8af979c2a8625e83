"""Odd modules, odd places for errors, many layers, threads."""

from __future__ import annotations

import copy
import gc
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.modules import as_module
from helpers.train_graphs import Predict, SquareGraph, Train, adamw, batches, mlp, run_graph, same
from torch import Tensor, nn

from graphckpt import GraphError


class WithLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList([nn.Parameter(torch.randn(8, 8)) for _ in range(3)])
        self.dict = nn.ParameterDict({"a": nn.Parameter(torch.randn(8, 8))})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.list:
            x = torch.tanh(x @ weight)
        return x @ self.dict["a"]


@as_module(lambda: {"linear": nn.Linear(8, 8)})
def Yields(self: Any, x: Tensor) -> Iterator[Tensor]:
    for scale in range(3):
        yield torch.tanh(self.linear(x) * scale)


@as_module(lambda: {"inner": Yields()})
def Sums(self: Any, x: Tensor) -> Tensor:
    return sum(self.inner(x))


class Slotted:
    __slots__ = ("x", "y")

    def __init__(self, x: Tensor) -> None:
        self.x = x


@as_module(lambda: {"linear": nn.Linear(8, 8)})
def FillsItsArgument(self: Any, given: Slotted) -> None:
    given.y = torch.tanh(self.linear(given.x))


@as_module(lambda: {"first": nn.Linear(8, 8), "inner": FillsItsArgument()})
def UsesSlots(self: Any, x: Tensor) -> Tensor:
    given = Slotted(self.first(x))
    self.inner(given)
    return given.y


@as_module(lambda depth: {"linear": nn.Linear(8, 8), "c": Deep(depth - 1) if depth else nn.Identity()})
def Deep(self: Any, x: Tensor) -> Tensor:
    return self.c(torch.tanh(self.linear(x)))


@as_module(lambda: {"linear": nn.Linear(8, 8)})
def GrowsOnFirstCall(self: Any, x: Tensor) -> Tensor:
    if not hasattr(self, "late"):
        self.late = nn.Linear(8, 8)
    return self.late(torch.tanh(self.linear(x)))


@as_module(lambda: {"t": nn.Transformer(8, 2, 2, 2, 16, dropout=0.2, batch_first=True)})
def Transformer(self: Any, x: Tensor) -> Tensor:
    return self.t(x.unsqueeze(0), x.unsqueeze(0))


def around(make: Any) -> Any:
    return lambda: nn.Sequential(nn.Linear(8, 8), make(), nn.Linear(8, 2))


class Penalty(SquareGraph):
    def build(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        energy = self.model(x).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        loss = energy + force.pow(2).sum()
        loss.backward()
        return loss


class Elsewhere(SquareGraph):
    def build(self, x: Tensor) -> Tensor:
        loss = self.model(x).pow(2).mean()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        return loss


ODD: dict[str, tuple[Any, ...]] = {
    "parameter lists": (around(WithLists), {"1": True}),
    "transformer": (
        Transformer,
        {"t.encoder.layers.0": True, "t.encoder.layers.1": "selective", "t.decoder.layers.1": True},
    ),
    "slots": (UsesSlots, {"inner": True}),
    "deep": (lambda: Deep(60), {"c.c.c": True, "c.c.c.c.c.c": False, "c.c.c.c.c.c.c.c": True}),
    "grows on its first call": (around(GrowsOnFirstCall), {"1": True}),
    "doubles": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)).double(), {"0": True}),
    "a forward that yields": (Sums, {"inner": True}, SquareGraph),
    "a gradient inside of build": (around(nn.Tanh), {"0": True, "1": True}, Penalty),
    "backward in another thread": (around(nn.Tanh), {"0": True, "1": True}, Elsewhere),
}


@pytest.mark.parametrize("case", ODD)
def test_odd_modules_and_steps_keep_every_bit(case: str) -> None:
    make, flags, *kind = ODD[case]
    x = torch.randn(5, 8, dtype=torch.float64 if case == "doubles" else torch.float32)
    results = []
    for chosen in (flags, {}):
        torch.manual_seed(0)
        graph = (kind or [SquareGraph])[0](make(), chosen)
        torch.manual_seed(1)
        results.append(([graph(x) for _ in range(4)], graph))
    (ours, flagged), (plain, unflagged) = results
    assert same(ours, plain)
    assert same(flagged.model.origin, unflagged.model.origin)
    rows = [row for row in flagged.explain(show=False).rows if row.rule not in ("keep", "hole")]
    assert rows
    assert kind or all(row.reruns == 1 for row in rows if row.block.count(".c") < 7)


def test_keyword_arguments_of_any_name() -> None:
    @as_module(lambda: {"linear": nn.Linear(8, 2)})
    def Names(self: Any, *, fields: Tensor, build: float, args: int) -> Tensor:
        return self.linear(fields) * build + args

    graph = SquareGraph(Names(), {"": True})
    for _ in range(5):
        graph(fields=torch.ones(2, 8), build=2.0, args=1)


def test_an_error_in_the_optimizer_leaves_nothing() -> None:
    model = mlp()
    optimizer = adamw(model)
    graph = Train(model, optimizer)
    graph.model[1].config.activation_checkpointing = True
    for warm_calls in (0, 5):
        run_graph(graph, warm_calls)
        hook = optimizer.register_step_pre_hook(lambda *_: (_ for _ in ()).throw(ValueError("no step")))
        with pytest.raises(ValueError, match="no step"):
            run_graph(graph, 1)
        hook.remove()
        assert all(p.grad is None for p in model.parameters())
        assert "forward" not in model[1].__dict__
        assert "model" not in graph.__dict__
        run_graph(graph, 1)


def test_inference_mode() -> None:
    class PredictAndPass(Predict):
        def build(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().build(x), x

    graph, x = PredictAndPass(nn.Linear(8, 2)), torch.ones(2, 8)
    graph.model.config.activation_checkpointing = True
    for _ in range(5):
        with torch.inference_mode():
            y, same_x = graph(x)
        assert y.is_inference()
        assert same_x.data_ptr() != x.data_ptr()


def test_graphs_in_two_threads() -> None:
    graphs = [SquareGraph(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)), {"0": True}) for _ in range(2)]
    plain = [copy.deepcopy(graph) for graph in graphs]
    results: dict[int, Any] = {}

    def run(number: int) -> None:
        try:
            results[number] = [graphs[number](torch.ones(2, 8)) for _ in range(40)]
        except BaseException as error:  # shown by the assertion below
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(2):
        assert same(results[number], [plain[number](torch.ones(2, 8)) for _ in range(40)])


def test_one_graph_in_two_threads_is_an_error() -> None:
    inside, go_on = threading.Event(), threading.Event()

    class Waits(SquareGraph):
        def build(self, x: Tensor) -> Tensor:
            if threading.current_thread() is thread:
                inside.set()
                go_on.wait(10)
            return super().build(x)

    graph = Waits(nn.Linear(8, 2), {})
    thread = threading.Thread(target=lambda: graph(torch.ones(2, 8)))
    thread.start()
    inside.wait(10)
    with pytest.raises(GraphError) as error:
        graph(torch.ones(2, 8))
    assert str(error.value) == (f"{graph.name} is running in another thread · fix: call it from one thread at a time")
    go_on.set()
    thread.join()
    graph(torch.ones(2, 8))


def test_a_call_costs_the_plain_step() -> None:
    """With no flag, what a call runs in Python is a few frames: they are counted, since a time would be noise."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    graph = Train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run_graph(graph, 6)
    x, y = batches(1)[0]
    frames: list[str] = []

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and "graphckpt/" in frame.f_code.co_filename.replace("\\", "/"):
            frames.append(frame.f_code.co_qualname)

    gc.collect()
    gc.disable()  # what it frees of other tests may call functions of the package
    sys.setprofile(note)
    try:
        graph(x, y)
    finally:
        sys.setprofile(None)
        gc.enable()
    own = [name for name in frames if not name.startswith(("Train.", "Graph.training", "Graph.__getattr__"))]
    assert own == [
        "Graph.__call__",
        "Step.call",
        "Step._train",
        "Update.begin",
        "Update.apply",
        "has_gradient",
        "Update.step",
        "clip",
        "zero",
        "Update.schedule",
        "is_new",
    ]
