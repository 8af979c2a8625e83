"""Saving, loading, copying and pickling graphs; graphs that share modules."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
from helpers.train_graphs import Predict, Train, adamw, batches, mlp, run_graph, run_plain, same
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

from graphckpt import Graph, GraphError


def make(*, scaler: bool = True) -> Train:
    model = mlp()
    optimizer = adamw(model)
    graph = Train(model, optimizer, ExponentialLR(optimizer, 0.8))
    graph.model[1].config.activation_checkpointing = True
    if scaler:
        graph.set_grad_scaler(torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2))
    return graph


def test_the_state_has_a_dict_per_module_and_the_training_state_beside() -> None:
    graph = make()
    run_graph(graph)
    state = graph.state_dict()
    assert isinstance(state, OrderedDict)
    assert list(state) == [
        "model",
        "loss",
        "System-Train-TrainStep",
        "System-Train-Optimizer-0",
        "System-Train-LRScheduler-0",
        "System-Train-GradScaler",
    ]
    assert same(dict(state["model"]), dict(graph.model.origin.state_dict()))
    assert list(state["model"]) == list(mlp().state_dict()), "a flag must not rename keys"
    assert state["System-Train-TrainStep"] == 4
    assert list(Train(mlp()).state_dict()) == ["model", "loss"]
    destination: OrderedDict[str, Any] = OrderedDict(first=1)
    assert graph.state_dict(destination) is destination
    assert list(destination)[:2] == ["first", "model"]


@pytest.mark.parametrize("after_calls", [0, 1, 5])
def test_a_loaded_graph_goes_on_with_the_same_bits(after_calls: int) -> None:
    graph = make()
    run_graph(graph, 3)
    file = io.BytesIO()
    torch.save(graph.state_dict(), file)
    expected = run_graph(graph, 4, seed=9)

    other = make()
    run_graph(other, after_calls, seed=8)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    assert same(run_graph(other, 4, seed=9), expected)
    assert same(other.model.origin, graph.model.origin)
    ours, theirs = other.state_dict(), graph.state_dict()
    assert ours["System-Train-TrainStep"] == theirs["System-Train-TrainStep"] == 7
    for key in ("System-Train-LRScheduler-0", "System-Train-GradScaler"):
        assert ours[key] == theirs[key]


def test_strict_names_all_that_does_not_fit_and_loads_nothing() -> None:
    graph = make()
    run_graph(graph, 1)
    state = graph.state_dict()
    del state["System-Train-GradScaler"], state["loss"], state["model"]["0.bias"]
    state["extra"], state["model"]["9.weight"] = 1, torch.ones(1)
    fresh = make()
    with pytest.raises(GraphError) as error:
        fresh.load_state_dict(state)
    assert str(error.value) == (
        f"{fresh.name}.load_state_dict: nothing is loaded:\n  • missing System-Train-GradScaler, loss, model.0.bias\n"
        "  • unexpected extra, model.9.weight\n  • fix: load a state of this Graph, or strict=False"
    )
    assert same(fresh.model.origin, mlp())
    assert fresh.state_dict()["System-Train-TrainStep"] == 0


def test_not_strict_loads_what_there_is() -> None:
    graph = make()
    run_graph(graph, 3)
    state = graph.state_dict()
    del state["model"]["0.bias"], state["System-Train-GradScaler"]
    state["extra"] = 1
    fresh = make()
    fresh.load_state_dict(state, strict=False)
    assert torch.equal(fresh.model[0].weight, graph.model[0].weight)
    assert torch.equal(fresh.model[0].bias, mlp()[0].bias)
    assert fresh.state_dict()["System-Train-TrainStep"] == 3
    assert fresh.state_dict()["System-Train-LRScheduler-0"]["last_epoch"] == 3
    assert fresh.state_dict()["System-Train-Optimizer-0"]["state"]


COPIES: dict[str, Any] = {"deepcopy": copy.deepcopy, "pickle": lambda graph: pickle.loads(pickle.dumps(graph))}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # torch's schedulers forget it when copied
@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_goes_on_with_the_same_bits_and_shares_nothing(kind: str) -> None:
    graph = make()
    graph.note = {"k": [1]}
    graph.config.enable_amp(dtype=torch.bfloat16)
    run_graph(graph, 5)
    twin = COPIES[kind](graph)
    assert (twin.is_compiled, twin.note, twin.training) == (False, {"k": [1]}, True)
    assert twin.name != graph.name
    assert twin.model[1].config.activation_checkpointing is True
    assert twin.config.amp_dtype is torch.bfloat16
    assert twin.model.origin is not graph.model.origin
    expected = run_graph(graph, 4, seed=9)
    assert same(run_graph(twin, 4, seed=9), expected)
    assert same(twin.model.origin, graph.model.origin)
    assert twin.model[1].origin is not graph.model[1].origin
    assert [row.reruns for row in twin.explain(show=False).rows if row.rule == "full"] == [1]
    weights = graph.model[0].weight.clone()
    run_graph(twin)
    assert torch.equal(graph.model[0].weight, weights)


def test_a_shallow_copy_shares_modules_and_optimizers() -> None:
    graph = make()
    run_graph(graph, 2)
    twin = copy.copy(graph)
    assert twin.model.origin is graph.model.origin
    run_graph(twin, 1)
    twin.model[1].config.activation_checkpointing = None
    assert graph.model[1].config.activation_checkpointing is True


def test_copies_of_a_block_are_modules() -> None:
    graph = make()
    for twin in (copy.deepcopy(graph.model), pickle.loads(pickle.dumps(graph.model))):
        assert type(twin) is nn.Sequential
        assert same(twin, graph.model.origin)
        assert twin[0].weight is not graph.model[0].weight
    assert type(copy.copy(graph.model)) is nn.Sequential


def test_an_evaluation_graph_sees_the_trained_weights_and_keeps_the_modes_of_torch() -> None:
    ours, plain = mlp(), mlp()
    train, predict = Train(ours, adamw(ours)), Predict(ours)
    train.model[1].config.activation_checkpointing = True
    plain_optimizer = adamw(plain)
    x = batches(1, seed=5)[0][0]
    for seed in range(3):
        assert same(run_graph(train, 2, seed=seed), run_plain(plain, plain_optimizer, count=2, seed=seed))
        predict.model.eval()
        plain.eval()
        assert not ours.training
        assert not ours[1].training
        assert torch.equal(predict(x), plain(x))
        ours.train()
        plain.train()
        assert torch.equal(predict(torch.ones(2, 4)) * 0, plain(torch.ones(2, 4)) * 0)


def test_flags_of_one_graph_are_not_active_elsewhere() -> None:
    model = mlp()
    runs: list[str] = []
    model[1].register_forward_pre_hook(lambda *_: runs.append("outer"))
    model[1][0].register_forward_pre_hook(lambda *_: runs.append("inner"))
    flagged, unflagged = Train(model, torch.optim.SGD(model.parameters(), lr=0.1)), Train(model, adamw(model))
    flagged.model[1].config.activation_checkpointing = True
    assert unflagged.model[1].config.activation_checkpointing is None
    x, y = batches(1)[0]
    for _ in range(5):
        runs.clear()
        flagged(x, y)
        assert runs == ["outer", "inner", "inner"]
        runs.clear()
        unflagged(x, y)
        model(x).sum().backward()
        assert runs == ["outer", "inner"] * 2
        assert "forward" not in model[1].__dict__


def test_two_training_graphs_take_turns_on_one_model() -> None:
    ours, plain = mlp(p=0.0), mlp(p=0.0)
    head, body = torch.optim.SGD(ours[2].parameters(), lr=0.3), torch.optim.SGD(ours[1].parameters(), lr=0.3)
    graphs = Train(ours, head), Train(ours, body)
    graphs[0].model[1].config.activation_checkpointing = True
    plain_optimizers = [torch.optim.SGD(plain[i].parameters(), lr=0.3) for i in (2, 1)]
    for number, (x, y) in enumerate(batches(8)):
        graphs[number % 2](x, y)
        nn.functional.cross_entropy(plain(x), y).backward()
        plain_optimizers[number % 2].step()
        plain.zero_grad()
    assert same(ours, plain)


def test_a_graph_cannot_be_called_in_a_build() -> None:
    inner = Predict(mlp())
    model = mlp()

    class Outer(Train):
        def build(self, x: Tensor, y: Tensor) -> Tensor:
            return super().build(inner(x), y)

    graph = Outer(model, adamw(model))
    for _ in range(5):
        inner(batches(1)[0][0])  # settled or not, it must be seen
        with pytest.raises(GraphError) as error:
            run_graph(graph, 1)
        assert str(error.value) == (
            f"{inner.name} is called inside of {graph.name}.build() · fix: a Graph cannot be nested; call its modules"
        )

    class Calls(Graph):
        def build(self) -> None:
            self()

    with pytest.raises(GraphError, match=r"Calls_0 is called inside of Calls_0.build\(\)"):
        Calls()()
    inner(batches(1)[0][0])
