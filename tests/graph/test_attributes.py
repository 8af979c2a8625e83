"""Attributes of a Graph: which objects it accepts, and what reading them returns."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from helpers.train_graphs import Train, adamw, batches, mlp
from torch import nn

from graphckpt import Graph
from graphckpt.blocks import Block


def test_a_module_becomes_a_block_and_comes_back_as_itself_in_build() -> None:
    model = mlp()
    seen = []

    class Looks(Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def build(self) -> None:
            seen.append(self.model)

    graph = Looks()
    assert type(graph.model) is Block
    assert graph.model.origin is model
    assert "model" not in graph.__dict__
    assert "model" in dir(graph)
    graph()
    assert seen == [model]
    assert type(graph.model) is Block


def test_nothing_can_be_set_before_init() -> None:
    class Early(Graph):
        def __init__(self) -> None:
            self.model = mlp()

    message = r"Early is not initialised, so 'model' cannot be set · fix: call super\(\)"
    with pytest.raises(AttributeError, match=message):
        Early()

    class Reads(Graph):
        def __init__(self) -> None:
            self.model.config

    with pytest.raises(AttributeError, match=r"Reads is not initialised · fix: call super\(\).__init__\(\) first"):
        Reads()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda: adamw(mlp()), "an Optimizer cannot be an attribute of a Graph · fix: use add_optimizer(...)"),
        (lambda: torch.ones(2), "a Tensor cannot be an attribute of a Graph · fix: hold it in an nn.Module"),
        (lambda: nn.Parameter(torch.ones(2)), "a Tensor cannot be an attribute of a Graph · fix: hold it in"),
    ],
)
def test_optimizers_and_tensors_are_no_attributes(value: Any, message: str) -> None:
    graph = Train(mlp())
    with pytest.raises(AttributeError, match=re.escape(f"Train.extra: {message}")):
        graph.extra = value()
    assert not hasattr(graph, "extra")


@pytest.mark.parametrize("name", ["", "a.b", "note", "build", "explain"])
def test_names_of_modules(name: str) -> None:
    message = f"Train.{name}: there is an attribute of this name already · fix: choose another"
    if name in ("", "a.b"):
        message = f"Train.{name}: expected a name without dots, got {name!r} · fix: rename it"
    graph = Train(mlp())
    graph.note = "text"
    with pytest.raises(KeyError) as error:
        setattr(graph, name, nn.Linear(1, 1))
    assert error.value.args[0] == message


def test_values_that_are_not_modules_are_plain_attributes() -> None:
    graph = Train(mlp())
    graph.count, graph.layers = 3, [nn.Linear(1, 1)]
    assert graph.count == 3
    assert type(graph.layers[0]) is nn.Linear
    del graph.count
    assert not hasattr(graph, "count")
    with pytest.raises(AttributeError, match="'Train' has no attribute 'count'"):
        graph.count


@pytest.mark.parametrize("name", ["config", "_step", "_update", "_name"])
@pytest.mark.parametrize("value", [0, nn.Linear(1, 1)])
def test_names_that_the_graph_uses_itself(name: str, value: Any) -> None:
    graph = Train(mlp())
    with pytest.raises(AttributeError, match=f"Train.{name}: the Graph itself uses this name · fix: choose another"):
        setattr(graph, name, value)
    graph(*batches(1)[0])


def test_properties_of_a_subclass() -> None:
    class Scaled(Train):
        @property
        def scale(self) -> float:
            return self._scale

        @scale.setter
        def scale(self, value: float) -> None:
            self._scale = value * 2

    graph = Scaled(mlp())
    graph.scale = 3.0
    assert graph.scale == 6.0


def test_a_graph_has_no_train_eval_or_parameters() -> None:
    graph = Train(mlp())
    for name in ("train", "eval", "to", "parameters", "modules", "zero_grad", "step"):
        assert not hasattr(graph, name)


def test_a_module_can_be_replaced_and_deleted() -> None:
    graph, (x, y) = Train(mlp()), batches(1)[0]
    first = graph(x, y)
    graph.model = mlp(seed=1)
    assert not torch.equal(graph(x, y), first)
    graph.model = mlp()
    torch.manual_seed(0)
    again = graph(x, y)
    torch.manual_seed(0)
    assert torch.equal(again, nn.functional.cross_entropy(mlp()(x), y))
    graph.model = None
    assert graph.model is None
    assert list(graph.state_dict()) == ["loss"]
    del graph.loss
    assert list(graph.state_dict()) == []


def test_build_can_neither_add_nor_remove_modules() -> None:
    class Adds(Graph):
        def __init__(self, act: Any) -> None:
            super().__init__()
            self.model, self.act = mlp(), act

        def build(self) -> None:
            self.act(self)

    with pytest.raises(AttributeError, match=r"Adds.extra: build\(\) cannot add modules · fix: assign it in __init__"):
        Adds(lambda graph: setattr(graph, "extra", nn.Linear(1, 1)))()
    removes = Adds(lambda graph: delattr(graph, "model"))
    with pytest.raises(AttributeError, match=r"Adds.model: build\(\) cannot remove modules · fix: do it outside"):
        removes()
    assert type(removes.model) is Block


def test_build_must_be_defined() -> None:
    class Empty(Graph):
        pass

    with pytest.raises(NotImplementedError, match=r"Empty.build\(\) is missing · fix: define build\(self, ...\), with"):
        Empty()()


def test_names_are_counted_per_class() -> None:
    class One(Graph):
        def build(self) -> None: ...

    class Two(One): ...

    names = [graph.name for graph in (One(), One(), Two(), One(), Two())]
    assert names == ["One_0", "One_1", "Two_0", "One_2", "Two_1"]
    with pytest.raises(AttributeError):
        One().name = "other"


def test_training_and_is_compiled() -> None:
    model = mlp()
    graph = Train(model)
    assert (graph.training, graph.config.training, graph.is_compiled) == (False, False, False)
    graph.add_optimizer(adamw(model))
    assert (graph.training, graph.config.training, graph.is_compiled) == (True, True, False)
    graph.config.strict_static = True
    with pytest.raises(RuntimeError):
        graph(torch.ones(8, 5), torch.zeros(8, dtype=torch.long))
    assert not graph.is_compiled, "a first call that fails does not count"
    graph(*batches(1)[0])
    assert graph.is_compiled
    graph.model[1].config.activation_checkpointing = True
    with graph.measure():
        assert graph.is_compiled


def test_trace_makes_a_graph_of_a_function() -> None:
    model = mlp().eval()

    @Graph.trace
    def predict(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        """Predicts."""
        return model(x) * scale

    x = batches(1)[0][0]
    assert isinstance(predict, Graph)
    assert (predict.name, predict.__doc__) == ("predict_0", "Predicts.")
    assert torch.equal(predict(x, scale=3.0), model(x) * 3.0)
    assert not predict(x).requires_grad
    predict.config.strict_static = True
    with pytest.raises(RuntimeError, match=r"input `x` was float32\[8, 4\] on cpu and is float32\[2, 4\] on cpu"):
        predict(x[:2], scale=3.0)


@pytest.mark.parametrize("value", [3, nn.Linear(1, 1), Graph, None])
def test_trace_takes_functions_only(value: Any) -> None:
    with pytest.raises(RuntimeError, match=r"Graph.trace: expected a function, got \w+ · fix: decorate a function"):
        Graph.trace(value)


def test_with_dynamic_input_shape() -> None:
    class Any_(Graph):
        @Graph.with_dynamic_input_shape(size=2)
        def __init__(self) -> None:
            super().__init__()
            self.model = mlp()

        def build(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x)

    graph = Any_()
    assert [tuple(graph(torch.ones(n, 4)).shape) for n in (2, 5, 3)] == [(2, 3), (5, 3), (3, 3)]


def test_the_same_module_under_two_names_is_one_block() -> None:
    model = mlp()

    class Twice(Graph):
        def __init__(self) -> None:
            super().__init__()
            self.a = self.b = model
            self.a[1].config.activation_checkpointing = True
            self.add_optimizer(adamw(model))

        def build(self, x: torch.Tensor) -> torch.Tensor:
            loss = (self.a(x) + self.b(x)).sum()
            loss.backward()
            return loss

    graph = Twice()
    assert graph.b[1].config.activation_checkpointing is True
    graph(batches(1)[0][0])
    (row,) = [row for row in graph.explain(show=False).rows if row.rule == "full"]
    assert (row.block, row.runs, row.reruns) == ("a.1", 2, 2)


def test_a_block_assigned_to_a_graph_is_its_module() -> None:
    first, second = Train(mlp()), Train(mlp())
    second.model = first.model[1]
    assert second.model.origin is first.model[1].origin
