"""State that an attribute of a module refers to changes once: objects, containers in containers, generators."""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

import numpy as np
import pytest
import torch
from helpers.layer_stacks import stack_of
from helpers.modules import as_module
from torch import Tensor, nn

import graphckpt
from graphckpt import RecomputeError, Segments
from graphckpt.blocks import is_recomputing

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Statistics:
    """An object with attributes, one of which is a container."""

    def __init__(self) -> None:
        self.count = 0
        self.rows: list[int] = []

    def __call__(self) -> int:
        self.count += 1
        self.rows.append(1)
        return self.count + len(self.rows)


@as_module(lambda scale, state: {"up": nn.Linear(8, 8), "down": nn.Linear(8, 8), "scale": scale, **state})
def Layer(self: Any, x: Tensor) -> Tensor:
    """Scales what it returns by a state that ``scale`` changes."""
    return self.down((self.up(x) * self.scale(self)).tanh()) * self.scale(self)


class Source(random.Random):
    """A generator of a class of its own."""


class Congruential(random.Random):
    """A generator whose state is an attribute."""

    def random(self) -> float:
        self.state = (getattr(self, "state", 1) * 1103515245 + 12345) % 2**31
        return self.state / 2**31


class Named(NamedTuple):
    statistics: Statistics

    def count(self) -> int:
        return self.statistics()


class Counts(np.ndarray):
    """An array with an attribute."""

    number = 0


def count_in_object(layer: nn.Module) -> int:
    return layer.statistics()


def count_in_training(layer: nn.Module) -> int:
    return layer.statistics() if layer.training else 1


def count_nested(layer: nn.Module) -> int:
    layer.counts["calls"][0]["number"] += 1
    return layer.counts["calls"][0]["number"]


def count_growing(layer: nn.Module) -> int:
    calls = layer.seen["calls"]
    calls[len(calls)] = len(calls)
    return len(calls)


def count_in_array(layer: nn.Module) -> float:
    layer.counts += 1
    return float(layer.counts.sum())


def count_in_tensor(layer: nn.Module) -> Tensor:
    return layer.calls.add_(1).clone()


def count_in_attribute(layer: nn.Module) -> int:
    layer.counts.number += 1
    return layer.counts.number


def view_of_buffer() -> nn.Module:
    """Returns a layer with an array in the memory of a buffer, which it does not change."""
    buffer = nn.Buffer(torch.ones(1))
    return Layer(lambda layer: float(layer.array[0]), {"buffer": buffer, "array": buffer.numpy()})


def hooked() -> nn.Module:
    """Returns a module of PyTorch's, whose hook scales by an attribute that it changes."""

    def scale(layer: nn.Module, args: tuple[Tensor]) -> Tensor:
        layer.calls += 1
        return args[0] * layer.calls

    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    module[0].calls = 0
    module[0].register_forward_pre_hook(scale)
    return module


def hooked_with_tensor() -> nn.Module:
    """Returns a module of PyTorch's, whose hook modifies a tensor in place that is an attribute of it."""

    def scale(layer: Any, args: tuple[Tensor]) -> Tensor:
        return args[0] * layer.calls.add_(1).clone()

    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    module[0].calls = torch.zeros(())
    module[0].register_forward_pre_hook(scale)
    return module


def draw(layer: nn.Module) -> Tensor:
    return torch.rand(8, generator=layer.held[0] if hasattr(layer, "held") else layer.generator)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def sharing() -> nn.Module:
    """Returns layers that draw from one generator."""
    shared = generator()
    return stack_of(lambda: Layer(draw, {"generator": shared}), 2)


KINDS = {
    "object": lambda: Layer(count_in_object, {"statistics": Statistics()}),
    "object, in training mode": lambda: Layer(count_in_training, {"statistics": Statistics()}),
    "bound method": lambda: Layer(count_in_object, {"statistics": Statistics().__call__}),
    "nested": lambda: Layer(count_nested, {"counts": {"calls": [{"number": 0}]}}),
    "growing": lambda: Layer(count_growing, {"seen": {"calls": {0: 1}}}),
    "generator": lambda: Layer(draw, {"generator": generator()}),
    "generator of Python": lambda: Layer(lambda layer: layer.source.random(), {"source": Source(7)}),
    "generator of NumPy": lambda: Layer(lambda layer: layer.source.random(), {"source": np.random.default_rng(7)}),
    "method of a generator": lambda: Layer(lambda layer: layer.draw(), {"draw": random.Random(7).random}),
    "generator with attributes": lambda: Layer(lambda layer: layer.source.random(), {"source": Congruential()}),
    "bit generator": lambda: Layer(lambda layer: layer.bits.random_raw() / 2**64, {"bits": np.random.PCG64(7)}),
    "method of a named tuple": lambda: Layer(lambda layer: layer.count(), {"count": Named(Statistics()).count}),
    "array with attributes": lambda: Layer(count_in_attribute, {"counts": np.zeros(2).view(Counts)}),
    "view of a buffer": view_of_buffer,
    "attribute that a hook changes": hooked,
    "tensor that a hook modifies": hooked_with_tensor,
    "old generator of NumPy": lambda: Layer(lambda layer: layer.source.rand(), {"source": np.random.RandomState(7)}),
    "tensor": lambda: Layer(count_in_tensor, {"calls": torch.zeros(())}),
    "array": lambda: Layer(count_in_array, {"counts": np.zeros(2)}),
    "tuple": lambda: Layer(lambda layer: layer.pair[1](), {"pair": (0, Statistics())}),
    "partial": lambda: Layer(lambda layer: layer.count(), {"count": partial(Statistics.__call__, Statistics())}),
    "held generator": lambda: Layer(draw, {"held": [generator()]}),
    "shared generator": sharing,
}
POLICIES: dict[str, dict[str, Any]] = {
    "full": {"[12]": True},
    "selective": {"[12]": "selective"},
    "joined": {"1": True, "2": "joined"},
    "nested": {"": True, "2": False},
    "segments": {"": Segments(2)},
    "disk": {"[12]": {"activation_checkpointing": True, "offload": "disk", "min_elements": 1}},
}


def run(kind: Callable[[], nn.Module], policies: dict[str, Any], micro_batches: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), kind(), kind(), nn.Linear(8, 1))
    found = []
    with graphckpt.apply(model, policies):
        for step in range(4):
            model.train(step > 0)  # each mode learns on its own
            model.zero_grad()
            if step == 2:
                for layer in model.modules():
                    if hasattr(layer, "statistics"):
                        layer.statistics = Statistics()  # the object that was there at first is not looked at any more
            losses = [model(X + step).square().sum() for _ in range(micro_batches)]
            for loss in reversed(losses):
                loss.backward()
            found += [*(loss.detach() for loss in losses), *(p.grad for p in model.parameters() if p.grad is not None)]
    return found


@cache
def plain(kind: str, micro_batches: int) -> list[Tensor]:
    return run(KINDS[kind], {}, micro_batches)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_objects_that_attributes_reach_change_once(kind: str, policy: str, micro_batches: int) -> None:
    expected, recomputed = plain(kind, micro_batches), run(KINDS[kind], POLICIES[policy], micro_batches)
    assert len(expected) == len(recomputed) > 40
    assert all(map(torch.equal, expected, recomputed))


@as_module(lambda container: {"linear": nn.Linear(8, 8), "results": container()})
def Collects(self: Any, x: Tensor) -> Tensor:
    """Collects what it computes, as a router collects its losses."""
    y = self.linear(x * (1 + len(self.results))).tanh()
    if isinstance(self.results, dict):
        self.results[len(self.results)] = y
    else:
        self.results.append(y)
    return y


@pytest.mark.parametrize("container", [list, dict])
def test_what_a_block_collects_is_freed_without_a_backward(container: Callable[[], Any]) -> None:
    """As in an evaluation with gradients on: the container leads to the call, which must not hold it."""
    model, storages = nn.Sequential(Collects(container)), []
    with graphckpt.apply(model, {"0": True}):
        for _ in range(5):
            model[0].results = container()
            storages.append(weakref.ref(model(X).untyped_storage()))
    gc.collect()
    assert sum(storage() is not None for storage in storages) <= 1


@pytest.mark.parametrize("later", [None, list, dict], ids=["none", "list", "dict"])
@pytest.mark.parametrize("container", [list, dict])
def test_what_a_block_collects_is_collected_once(container: Callable[[], Any], later: Callable[[], Any] | None) -> None:
    """Also where the caller has put something else in the place of the container until backward."""
    found = []
    for policies in ({}, {"0": True}):
        torch.manual_seed(0)
        model = nn.Sequential(Collects(container))
        with graphckpt.apply(model, policies):
            for _ in range(3):
                model[0].results = results = container()
                loss = model(X).sum() + model(X).sum()
                loss = loss + sum(each.square().sum() for each in list(getattr(results, "values", lambda: results)()))
                model[0].results = replacement = later() if later else None
                loss.backward()
                assert model[0].results is replacement
                assert not replacement
                assert len(results) == 2
        found.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *found))


class Outputs(list[Any]):
    """A list with a constructor that needs an argument, and with a method."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def __new__(cls, scale: float) -> Self:
        assert scale
        return super().__new__(cls)

    def factor(self) -> float:
        return self.scale + len(self)


def count_and_collect(layer: Any, y: Tensor) -> float:
    layer.results["calls"] += 1
    layer.results[layer.results["calls"]] = y
    return layer.results["calls"]  # type: ignore[no-any-return]


def append_and_count(layer: Any, y: Tensor) -> float:
    layer.results.append(y)
    return len(layer.results)


def append_scaled(layer: Any, y: Tensor) -> float:
    factor = layer.results.factor()
    layer.results.append(y)
    return factor  # type: ignore[no-any-return]


def append_within(layer: Any, y: Tensor) -> float:
    layer.results["outputs"].append(y)
    return len(layer.results["outputs"])


def append_to_two(layer: Any, y: Tensor) -> float:
    layer.results.append(y)
    layer.same.append(y)
    return len(layer.results)


def lengths_of(container: Any) -> list[int]:
    within = container.values() if isinstance(container, dict) else container
    return [len(container), *(len(each) for each in within if isinstance(each, list))]


COLLECTING: dict[str, tuple[Callable[[Any, Tensor], float], Callable[[], Any]]] = {
    "deque of two": (append_and_count, lambda: deque(maxlen=2)),
    "default dict": (count_and_collect, lambda: defaultdict(int)),
    "counter": (count_and_collect, Counter),
    "subclass": (append_scaled, lambda: Outputs(2.0)),
    "lists in a default dict": (append_within, lambda: defaultdict(list)),
    "one list in two attributes": (append_to_two, list),
    "values without history": (lambda layer, y: append_and_count(layer, y.detach()), list),
    "numbers": (lambda layer, _: append_and_count(layer, 1.0), list),  # type: ignore[arg-type]
}


@as_module(lambda collect: {"linear": nn.Linear(8, 8), "collect": collect})
def Collecting(self: Any, x: Tensor) -> Tensor:
    """Computes with how much it has collected."""
    y = self.linear(x).tanh()
    return self.linear(y * self.collect(self, y)).tanh()


@pytest.mark.parametrize("later", ["same", "another", "none", "absent"])
@pytest.mark.parametrize("kind", COLLECTING)
def test_a_container_that_the_caller_replaces_is_the_former_one_in_the_recomputation(kind: str, later: str) -> None:
    collect, container = COLLECTING[kind]
    found = []
    for policies in ({}, {"0": True, "1": "joined"}):
        torch.manual_seed(0)
        model = nn.Sequential(Collecting(collect), Collecting(collect))
        with graphckpt.apply(model, policies, determinism_check="none"):
            for _ in range(3):
                model.zero_grad()
                containers = [container() for _ in model]
                for layer, each in zip(model, containers, strict=True):
                    layer.results = layer.same = each
                loss = sum(model(X).square().sum() for _ in range(3))
                lengths = [*map(lengths_of, containers)]
                replacements = [None if later == "none" else container() for _ in model]
                for layer, each in zip(model, replacements, strict=True):
                    if later == "absent":
                        del layer.results
                    elif later != "same":
                        layer.results = each
                assert isinstance(loss, Tensor)
                loss.backward()
                assert not any(replacements)
                assert lengths == [*map(lengths_of, containers)]
                assert all(hasattr(layer, "results") is (later != "absent") for layer in model)
        found.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *found))


def test_a_list_that_the_caller_sets_in_the_place_of_two_stands_for_neither() -> None:
    def collect(layer: Any, y: Tensor) -> float:
        layer.results.append(y)
        return len(layer.results) + 10 * len(layer.others)

    found = []
    for policies in ({}, {"0": True}):
        torch.manual_seed(0)
        model = nn.Sequential(Collecting(collect))
        with graphckpt.apply(model, policies, determinism_check="none"):
            for _ in range(3):
                model[0].results, model[0].others = [], [X * model[0].linear.weight.sum()]
                loss = model(X).square().sum() + model(X).square().sum()
                model[0].results = model[0].others = []
                loss.backward()
        found.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *found))


class Holder:
    def __init__(self) -> None:
        self.tensor = torch.ones(8)


@as_module(lambda find, **state: {"linear": nn.Linear(8, 8), "find": find, **state})
def Editing(self: Any, x: Tensor, holder: Holder) -> Tensor:
    """Modifies a tensor in place that a container or an object holds."""
    held = self.find(self, holder)
    held += x.detach().mean(0)
    return (self.linear(x) * held).tanh()


HELD: dict[str, Callable[[], nn.Module]] = {
    "list": lambda: Editing(lambda layer, _: layer.held[0], held=[torch.ones(8)]),
    "list in a dict": lambda: Editing(lambda layer, _: layer.held["a"][0], held={"a": [torch.ones(8)]}),
    "tuple": lambda: Editing(lambda layer, _: layer.held[0], held=(torch.ones(8),)),
    "object": lambda: Editing(lambda layer, _: layer.held.tensor, held=Holder()),
    "argument": lambda: Editing(lambda _, holder: holder.tensor),
}


@pytest.mark.parametrize("rule", [True, "selective"])
@pytest.mark.parametrize("kind", HELD)
def test_the_recomputation_of_a_modified_tensor_that_is_only_held_is_refused(kind: str, rule: bool | str) -> None:
    model, holder = HELD[kind](), Holder()
    message = "modified a tensor inside of a list, a dict or an object in place"
    with graphckpt.apply(model, {"": rule}):
        for _ in range(2):
            loss = model(X, holder).sum()
            with pytest.raises(RecomputeError, match=message):
                loss.backward()


@pytest.mark.parametrize("rule", [True, "selective"])
def test_a_buffer_that_a_list_holds_too_is_restored(rule: bool | str) -> None:
    seen = []
    for policies in ({}, {"": rule}):
        torch.manual_seed(0)
        buffer = nn.Buffer(torch.ones(8))
        model = Editing(lambda layer, _: layer.held[0], held=[buffer], buffer=buffer)
        with graphckpt.apply(model, policies):
            for _ in range(5):
                model(X, Holder()).sum().backward()
        assert model.held[0] is model.buffer
        seen.append([*(parameter.grad for parameter in model.parameters()), model.buffer])
    assert all(map(torch.equal, *seen))


@as_module(lambda: {"linear": nn.Linear(8, 8), "buffer": nn.Buffer(torch.ones(8))})
def Sharing(self: Any, x: Tensor, holder: Holder) -> Tensor:
    """Modifies a buffer and an argument of which there are views and aliases in containers, and counts its calls."""
    if not is_recomputing():
        holder.tensor += 1
    self.buffer += x.mean(0).detach()
    return self.linear(x.relu_()).tanh() * self.buffer


def test_a_held_tensor_may_share_memory_with_what_is_restored_and_be_modified_where_nothing_is_recomputed() -> None:
    found = []
    for policies in ({}, {"": True}):
        torch.manual_seed(0)
        model, holder, x = Sharing(), Holder(), X.clone()
        model.held = [model.buffer, model.buffer[:4], x.view(-1), model.buffer.detach(), behind := torch.ones(8)]
        with graphckpt.apply(model, policies):
            for _ in range(2):
                loss = model(x, holder).sum()
                behind.add_(1)
                loss.backward()
        found.append([model.linear.weight.grad, model.buffer, holder.tensor, x])
    assert all(map(torch.equal, *found))


@as_module(lambda: {"linear": nn.Linear(8, 8)})
def Drawing(self: Any, x: Tensor, generator: torch.Generator) -> Tensor:
    """Draws from a generator that it is called with."""
    return (self.linear(x) * torch.rand(8, generator=generator)).tanh()


@pytest.mark.parametrize("rule", [True, "selective"])
def test_generators_among_the_arguments_are_rewound(rule: bool | str) -> None:
    found = []
    for policies in ({}, {"": rule}):
        torch.manual_seed(0)
        model, generator = Drawing(), torch.Generator().manual_seed(1)
        with graphckpt.apply(model, policies):
            for _ in range(2):
                model(X, generator).sum().backward()
        found.append([*(p.grad for p in model.parameters()), generator.get_state()])
    assert all(map(torch.equal, *found))


def test_what_hooks_add_to_a_list_of_a_module_of_pytorch_is_added_once() -> None:
    """As K-FAC collects inputs: the first call leaves the list as it was, since backward hooks take the items out."""
    layer = nn.Linear(8, 8)
    layer.inputs = []
    layer.register_forward_hook(lambda module, args, output: module.inputs.append(args[0].detach()))
    layer.register_full_backward_hook(lambda module, *_: module.inputs.__delitem__(0))
    model = nn.Sequential(nn.Sequential(layer, nn.GELU()))
    with graphckpt.apply(model, {"*": True}):
        for _ in range(3):
            model(torch.ones(1, 8, requires_grad=True)).sum().backward()
    assert layer.inputs == []


class Mark(torch.autograd.Function):
    """Holds an object as long as the graph is alive."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, alive: set[Any]) -> torch.Tensor:
        ctx.token = nn.Module()
        alive.add(weakref.ref(ctx.token))
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


HOLDERS: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], object]]] = {
    "an attribute": (lambda: None, lambda block, y: setattr(block, "held", y)),
    "a list": (list, lambda block, y: block.held.__setitem__(slice(None), [y])),
    "a dict": (dict, lambda block, y: block.held.update(y=y)),
    "a deque": (lambda: deque(maxlen=1), lambda block, y: block.held.append(y)),
    "an object": (SimpleNamespace, lambda block, y: setattr(block.held, "y", y)),
    "a new list": (list, lambda block, y: setattr(block, "held", [y])),
    "a tuple": (tuple, lambda block, y: setattr(block, "held", (y, 1))),
    "a closure": (lambda: None, lambda block, y: setattr(block, "held", lambda: y)),
    "a default value": (lambda: None, lambda block, y: setattr(block, "held", lambda value=y: value)),
    "a partial": (lambda: None, lambda block, y: setattr(block, "held", partial(torch.add, y))),
    "a keyword of a partial": (lambda: None, lambda block, y: setattr(block, "held", partial(torch.add, other=y))),
}


@as_module(lambda put, held, alive: {"linear": nn.Linear(8, 8), "put": put, "held": held, "alive": alive})
def Keeping(self: Any, x: Tensor) -> Tensor:
    y = Mark.apply(self.linear(x).tanh(), self.alive)
    self.put(self, y)
    return y


@as_module(lambda: {"linear": nn.Linear(8, 8), "last": None})
def ReadsAFunction(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x).tanh() * (1.0 if self.last is None else self.last())
    self.last = lambda scale=2.0: y * scale
    return y


@pytest.mark.parametrize("rule", [True, "selective"])
def test_a_function_in_an_attribute_gives_what_it_gave_in_the_forward(rule: bool | str) -> None:
    found = []
    for policies in ({}, {"*": rule}):
        torch.manual_seed(0)
        model = nn.Sequential(ReadsAFunction())
        x = torch.ones(2, 8, requires_grad=True)
        with graphckpt.apply(model, policies):
            for _ in range(4):
                model[0].last = None
                with torch.no_grad():
                    model(x)
                model(x).sum().backward()
        found.append([x.grad, *(parameter.grad for parameter in model.parameters())])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("rule", [True, "selective"])
@pytest.mark.parametrize("kind", HOLDERS)
def test_graphs_of_results_without_a_backward_do_not_pile_up(kind: str, rule: bool | str) -> None:
    make, put = HOLDERS[kind]
    alive: set[Any] = set()
    model = nn.Sequential(Keeping(put, make(), alive))
    with graphckpt.apply(model, {"*": rule}):
        for _ in range(5):
            model(torch.ones(2, 8, requires_grad=True))
            gc.collect()
        assert sum(ref() is not None for ref in alive) == 1  # as under PyTorch's checkpoint
