"""Changes by the program around a block between forward and backward, and the context of a call of the block."""

from __future__ import annotations

import time
import weakref
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from functools import partial
from itertools import product
from types import FunctionType, NoneType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers.layer_stacks import stack_of
from helpers.modules import as_module
from helpers.thinning import is_chosen
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

import graphckpt
from graphckpt import RecomputeError
from graphckpt.errors import MutatedError

D = 12
POLICIES: dict[str, Any] = {
    "full": True,
    "selective": "selective",
    "disk": {"activation_checkpointing": True, "offload": "disk", "min_elements": 1},
}
Step = Callable[[nn.Module], Tensor]


@pytest.fixture(autouse=True)
def on_device(device: str) -> Iterator[None]:
    """Makes all tensors on the device of the tests."""
    torch.set_default_device(None if device == "cpu" else device)
    yield
    torch.set_default_device(None)


def trained(build: Callable[[], nn.Module], step: Step, policy: Any = None) -> dict[str, Tensor]:
    """Returns losses, gradients, parameters and buffers of three steps, with a policy on ``layers`` or without."""
    torch.manual_seed(0)
    model = build()
    seen: dict[str, Tensor] = {}
    with graphckpt.apply(model, {} if policy is None else {"layers.*": policy}):
        for number in range(3):
            torch.manual_seed(number)
            model.zero_grad()
            seen[f"loss {number}"] = step(model).detach()
            seen |= {f"{name} {number}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    seen["random"] = torch.get_rng_state()
    return seen | {name: t.detach().clone() for name, t in (*model.named_parameters(), *model.named_buffers())}


def assert_same(build: Callable[[], nn.Module], step: Step, policy: str) -> None:
    plain, found = trained(build, step), trained(build, step, POLICIES[policy])
    assert plain.keys() == found.keys()
    assert len(plain) > 10
    assert [name for name in plain if not torch.equal(plain[name], found[name])] == []


policies = pytest.mark.parametrize("policy", POLICIES)


# Objects among the arguments, and in attributes


class Scale(Enum):
    LOW = 1.5
    HIGH = 2.5


class Slotted:
    __slots__ = ("edges", "x")

    def __init__(self, x: Tensor, edges: Tensor) -> None:
        self.x, self.edges = x, edges


class SlottedBelow(Slotted):
    """Has slots and a dictionary."""


class Pair(NamedTuple):
    x: Tensor
    edges: Tensor


class Doubling(list[Tensor]):
    """Makes its items anew each time that they are iterated over."""

    def __iter__(self) -> Iterator[Tensor]:
        return (item * 2 for item in list.__iter__(self))


class Odd(dict[str, Tensor]):
    """Has other keys than it says."""

    def __iter__(self) -> Iterator[str]:
        return iter("abc")

    def keys(self) -> list[str]:  # type: ignore[override]
        return list("abc")

    def __setitem__(self, key: str, value: Tensor) -> None:
        raise AssertionError(key)


class OddOrdered(OrderedDict[str, Tensor]):
    def __setitem__(self, key: str, value: Tensor) -> None:
        if key in self:
            raise AssertionError(key)
        super().__setitem__(key, value)


class Kind(NamedTuple):
    """How a graph is made, read, and given the next ``x`` by the caller."""

    make: Callable[..., Any]
    read: Callable[[Any], tuple[Tensor, Tensor]]
    write: Callable[[Any, Tensor], Any]


def of_attributes(graph: SimpleNamespace) -> tuple[Tensor, Tensor]:
    return graph.x, graph.edges


def set_x(graph: SimpleNamespace, x: Tensor) -> None:
    graph.x = x


GRAPHS = {
    "attributes": Kind(SimpleNamespace, of_attributes, set_x),
    "UserDict": Kind(UserDict, lambda g: (g["x"], g["edges"]), lambda g, x: g.update(x=x)),
    "slots": Kind(Slotted, of_attributes, set_x),
    "slots and a dictionary": Kind(SlottedBelow, of_attributes, set_x),
    "dict in an object": Kind(
        lambda x, edges: SimpleNamespace(data={"x": x, "edges": edges}),
        lambda g: (g.data["x"], g.data["edges"]),
        lambda g, x: g.data.update(x=x),
    ),
    "list in an object": Kind(
        lambda x, edges: SimpleNamespace(items=[x, edges]),
        lambda g: tuple(g.items),
        lambda g, x: g.items.__setitem__(0, x),
    ),
    "deque in an object": Kind(
        lambda x, edges: SimpleNamespace(items=deque([x, edges])),
        lambda g: tuple(g.items),
        lambda g, x: g.items.__setitem__(0, x),
    ),
    "list that iterates over others": Kind(
        lambda x, edges: SimpleNamespace(items=Doubling([x, edges])),
        lambda g: (g.items[0], g.items[1]),
        lambda g, x: g.items.__setitem__(0, x),
    ),
    "dict with odd keys": Kind(
        lambda x, edges: SimpleNamespace(items=Odd(x=x, edges=edges)),
        lambda g: (g.items["x"], g.items["edges"]),
        lambda g, x: dict.__setitem__(g.items, "x", x),
    ),
    "ordered dict that refuses new values": Kind(
        lambda x, edges: SimpleNamespace(items=OddOrdered(x=x, edges=edges)),
        lambda g: (g.items["x"], g.items["edges"]),
        lambda g, x: OrderedDict.__setitem__(g.items, "x", x),
    ),
    "object in an object": Kind(
        lambda x, edges: SimpleNamespace(inner=Slotted(x, edges)),
        lambda g: of_attributes(g.inner),
        lambda g, x: set_x(g.inner, x),
    ),
    "named tuple in an object": Kind(
        lambda x, edges: SimpleNamespace(pair=Pair(x, edges)),
        lambda g: g.pair,
        lambda g, x: setattr(g, "pair", Pair(x, g.pair.edges)),
    ),
}


@as_module(
    lambda read, find: {"up": nn.Linear(D, 2 * D), "down": nn.Linear(2 * D, D), "read": read, "find": find, "ctx": None}
)
def Convolution(
    self: Any,
    graph: SimpleNamespace | None = None,
    *,
    named: SimpleNamespace | None = None,
    among: Iterable[SimpleNamespace] = (),
) -> Tensor:
    x, edges = self.read(self.find(self, graph, named, among))
    return x + self.down(nn.functional.gelu(self.up(edges @ x.tanh())))


PASSES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "an argument": (lambda layer, graph: layer(graph), lambda layer, graph, *_: graph),
    "a keyword": (lambda layer, graph: layer(named=graph), lambda layer, _, named, __: named),
    "in a list": (lambda layer, graph: layer(among=[1, graph]), lambda layer, _, __, among: among[1]),
    "an attribute": (lambda layer, graph: (setattr(layer, "ctx", graph), layer())[1], lambda layer, *_: layer.ctx),
    "in an attribute": (
        lambda layer, graph: (setattr(layer, "ctx", [{"graph": graph}]), layer())[1],
        lambda layer, *_: layer.ctx[0]["graph"],
    ),
    "an attribute for the time of the call": (
        lambda layer, graph: (setattr(layer, "ctx", graph), layer(), setattr(layer, "ctx", None))[1],
        lambda layer, *_: layer.ctx,
    ),
    "a new attribute": (
        lambda layer, graph: (setattr(layer, "late", graph), layer(), delattr(layer, "late"))[1],
        lambda layer, *_: layer.late,
    ),
}


class Network(nn.Module):
    """Passes a graph to its layers in one of several ways, and gives it a new ``x`` after each."""

    def __init__(self, kind: str, way: str) -> None:
        super().__init__()
        self.kind, (self.call, find) = GRAPHS[kind], PASSES[way]
        self.embed = nn.Linear(8, D)
        self.layers = nn.ModuleList(Convolution(self.kind.read, find) for _ in range(3))

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        graph = self.kind.make(x=self.embed(nodes), edges=edges)
        for layer in self.layers:
            x = self.call(layer, graph)
            self.kind.write(graph, x)
        return x


def graph_step(model: nn.Module) -> Tensor:
    loss = model(torch.randn(5, 8), torch.rand(5, 5)).square().mean()
    loss.backward()
    return loss


@pytest.mark.parametrize(
    ("kind", "way", "policy"),
    # What finds the tensors of an object does not know how it was passed: each pair of two of the three is enough.
    [case for case in product(GRAPHS, PASSES, POLICIES) if is_chosen(case, GRAPHS, PASSES, POLICIES)],
)
def test_tensors_of_objects_are_those_of_the_forward(kind: str, way: str, policy: str) -> None:
    assert_same(lambda: Network(kind, way), graph_step, policy)


class Containers(nn.Module):
    """A block with containers of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.weights = [torch.ones(D)]
        self.table = {"scale": (torch.ones(D), 1.0)}

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.weights[0] * self.table["scale"][0]).sin()


def stack(layer: Callable[[], nn.Module], number: int = 2) -> Callable[[], nn.Module]:
    @as_module(lambda: {"embed": nn.Linear(D, D), "layers": stack_of(layer, number)})
    def Stack(self: Any, x: Tensor) -> Tensor:
        return self.layers(self.embed(x))

    return Stack


def then(change: Callable[[nn.Module], Any], undo: Callable[[nn.Module], Any] = lambda model: None) -> Step:
    """Returns a step in which ``change`` runs between forward and backward, and ``undo`` after it."""

    def step(model: nn.Module) -> Tensor:
        loss = model(torch.randn(4, D)).square().mean()
        change(model)
        loss.backward()
        undo(model)
        return loss

    return step


def each(change: Callable[[Any], Any]) -> Callable[[nn.Module], None]:
    def change_all(model: nn.Module) -> None:
        for layer in model.layers:
            change(layer)

    return change_all


@policies
@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.weights.__setitem__(0, layer.weights[0] * 0.5),
        lambda layer: setattr(layer, "weights", [torch.rand(D)]),
        lambda layer: layer.table.update(scale=(torch.rand(D), 2.0)),
        lambda layer: layer.weights.insert(0, torch.rand(D)),
    ],
    ids=["item", "list", "dict", "insert"],
)
def test_tensors_of_containers_are_those_of_the_forward(change: Callable[[Any], Any], policy: str) -> None:
    assert_same(stack(Containers), then(each(change)), policy)


@policies
@pytest.mark.parametrize("way", ["an argument", "an attribute"])
def test_a_tensor_of_an_object_that_is_modified_in_place_before_backward_is_an_error_if_it_is_read(
    way: str, policy: str
) -> None:
    torch.manual_seed(0)
    model = Network("attributes", way)
    edges = torch.rand(5, 5)
    with graphckpt.apply(model, {"layers.*": POLICIES[policy]}):
        loss = model(torch.randn(5, 8), edges).sum()
        edges.mul_(0.5)
        with pytest.raises(
            MutatedError, match=r"layers.2: a tensor that a container or an object holds was modified in place"
        ):
            loss.backward()
        graph_step(model)  # the next step is right


@as_module(lambda: {"linear": nn.Linear(D, D)})
def ReadsOne(self: Any, x: Tensor, memory: SimpleNamespace) -> Tensor:
    return (self.linear(x) * memory.own).sin()


@policies
def test_a_tensor_of_an_object_that_the_block_does_not_read_may_be_modified(policy: str) -> None:
    @as_module(lambda: {"layers": nn.ModuleList([ReadsOne(), ReadsOne()])})
    def Model(self: Any, x: Tensor) -> Tensor:
        memory = SimpleNamespace(own=torch.ones(D), other=torch.zeros(D))
        for layer in self.layers:
            x = layer(x, memory)
            memory.other.add_(x.detach().mean(0))  # as another layer does with its part of a cache
        return x

    assert_same(Model, then(lambda model: None), policy)


# Plain state that the caller changes


class Plain(nn.Module):
    """A block with numbers and names in containers, as adapters have them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.others = nn.ModuleDict({"a": nn.Linear(D, D), "b": nn.Linear(D, D)})
        self.active = ["a"]
        self.scaling = {"a": 0.5, "b": 2.0}
        self.nested = {"a": {"factors": [1.0, 3.0]}}
        self.shape = (1.0, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        for name in self.active:
            y = y + self.others[name](x).sin() * self.scaling[name] * self.nested["a"]["factors"][0] / self.shape[1]
        return y.tanh()


PLAIN: dict[str, Callable[[Any], Any]] = {
    "a list replaced": lambda layer: setattr(layer, "active", ["b"]),
    "a list grows": lambda layer: layer.active.append("b"),
    "a list emptied": lambda layer: layer.active.clear(),
    "an item of a dict": lambda layer: layer.scaling.update(a=layer.scaling["a"] * 0.25),
    "a dict replaced": lambda layer: setattr(layer, "scaling", {"a": 3.0, "b": 1.0}),
    "an inner list": lambda layer: layer.nested["a"]["factors"].__setitem__(0, 7.0),
    "a tuple": lambda layer: setattr(layer, "shape", (1.0, 5.0)),
}


@policies
@pytest.mark.parametrize("case", PLAIN)
def test_containers_of_plain_values_are_those_of_the_forward(case: str, policy: str) -> None:
    assert_same(stack(Plain), then(each(PLAIN[case])), policy)


def numbers() -> nn.Module:
    return nn.Sequential(
        nn.Linear(D, D),
        nn.LayerNorm(D),
        nn.LeakyReLU(0.1),
        nn.Dropout(0.3),
        nn.Linear(D, D),
        nn.Softplus(2.0),
        nn.BatchNorm1d(D),
    )


NUMBERS: dict[str, Callable[[Any], Any]] = {  # each changes in every step, as later calls read less than the first
    "dropout": lambda layer: setattr(layer[3], "p", 0.9 - layer[3].p / 2),
    "eps": lambda layer: setattr(layer[1], "eps", 1.0 + layer[1].eps / 2),
    "slope": lambda layer: setattr(layer[2], "negative_slope", 1.0 - layer[2].negative_slope / 2),
    "beta": lambda layer: setattr(layer[5], "beta", 1.0 + layer[5].beta / 4),
    "momentum": lambda layer: setattr(layer[6], "momentum", 0.9 - layer[6].momentum / 2),
}


@policies
@pytest.mark.parametrize("case", NUMBERS)
def test_numbers_of_modules_of_pytorch_are_those_of_the_forward(case: str, policy: str) -> None:
    assert_same(stack(numbers), then(each(NUMBERS[case])), policy)


def freeze(model: nn.Module) -> None:
    model.requires_grad_(False)


def thaw(model: nn.Module) -> None:
    model.requires_grad_(True)


def freeze_first(model: nn.Module) -> None:
    model.layers[0][0].weight.requires_grad_(False)


def step_with_frozen_layer(model: nn.Module) -> Tensor:
    model.layers[1].requires_grad_(False)
    loss = then(thaw)(model)
    assert all(p.grad is None for p in model.layers[1].parameters())
    return loss


TRAINABLE: dict[str, Step] = {
    "all frozen before backward": then(freeze, thaw),
    "one frozen before backward": then(freeze_first, thaw),
    "one trained again before backward": step_with_frozen_layer,
}


@policies
@pytest.mark.parametrize("case", TRAINABLE)
def test_parameters_require_gradients_as_in_the_forward(case: str, policy: str) -> None:
    assert_same(stack(numbers), TRAINABLE[case], policy)


# What is around the call


class GeluAsSilu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (nn.functional.silu if func is nn.functional.gelu else func)(*args, **(kwargs or {}))


class Halves(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 0.5 if func is nn.functional.linear else result


class SinAsCos(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (torch.ops.aten.cos.default if func is torch.ops.aten.sin.default else func)(*args, **(kwargs or {}))


@contextmanager
def both() -> Iterator[None]:
    with GeluAsSilu(), Halves(), SinAsCos():
        yield


temperature = ContextVar("temperature", default=1.0)
required: ContextVar[float] = ContextVar("required")


@contextmanager
def setting(variable: ContextVar[float], value: float) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@as_module(lambda read: {"norm": nn.LayerNorm(D), "up": nn.Linear(D, D), "down": nn.Linear(D, D), "read": read})
def Reads(self: Any, x: Tensor) -> Tensor:
    return x + self.down(nn.functional.gelu(self.up(self.norm(x)) / self.read())).sin()


def within(forward: Callable[[], Any], backward: Callable[[], Any] | None = None, *, whole: bool = False) -> Step:
    """Returns a step whose forward runs in a context, and whose backward in another, or in the same one."""

    def step(model: nn.Module) -> Tensor:
        with forward():
            loss = model(torch.randn(4, D, dtype=torch.float32)).square().mean()
            if whole:
                loss.backward()
                return loss
        if backward is None:
            loss.backward()
        else:
            with backward():
                loss.backward()
        return loss

    return step


@contextmanager
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def num_words() -> float:
    """Returns how many words of four bytes a number of the default dtype takes: 1 or 2."""
    return torch.zeros(()).element_size() / 4


def one() -> float:
    return 1.0


AROUND: dict[str, tuple[Callable[[], float], Step]] = {
    "function mode": (one, within(GeluAsSilu)),
    "dispatch mode": (one, within(SinAsCos)),
    "modes": (one, within(both)),
    "modes around the step": (one, within(both, whole=True)),
    "another mode in backward": (one, within(GeluAsSilu, Halves)),
    "default dtype": (num_words, within(double)),
    "default dtype in backward": (num_words, within(both, double)),
    "context variable with a default": (temperature.get, within(lambda: setting(temperature, 2.0))),
    "context variable without a default": (required.get, within(lambda: setting(required, 2.0))),
    "context variable with another value in backward": (
        required.get,
        within(lambda: setting(required, 2.0), lambda: setting(required, 3.0)),
    ),
    "context variable that is set in backward": (temperature.get, within(both, lambda: setting(temperature, 5.0))),
}


@policies
@pytest.mark.parametrize("case", AROUND)
def test_contexts_around_the_forward_are_around_its_recomputation(case: str, policy: str) -> None:
    read, step = AROUND[case]
    assert_same(stack(lambda: Reads(read)), step, policy)


def test_a_context_variable_that_forward_sets_is_set_once() -> None:
    calls: ContextVar[int] = ContextVar("calls", default=0)

    @as_module(lambda: {"linear": nn.Linear(D, D)})
    def Counts(self: Any, x: Tensor) -> Tensor:
        calls.set(calls.get() + 1)
        return (self.linear(x) * calls.get()).sin()

    @contextmanager
    def anew() -> Iterator[None]:
        with setting(calls, 0):
            yield

    def step(model: nn.Module) -> Tensor:
        with anew():
            loss = within(anew)(model) + then(lambda model: None)(model)
            assert calls.get() == 2  # both layers, once
        return loss

    assert_same(stack(Counts), step, "full")


def wait_until_freed(references: list[weakref.ref[Any]], most: int = 0) -> None:
    """Fails if more than ``most`` objects are alive that the thread of a store does not let go soon."""
    deadline = time.monotonic() + 5
    while sum(each() is not None for each in references) > most:
        assert time.monotonic() < deadline
        time.sleep(0.001)


collector: ContextVar[dict[str, list[Tensor]] | None] = ContextVar("collector", default=None)


def collect(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
    """Collects outputs as Transformers does: in a dictionary of lists, which nobody holds after the forward."""
    if (outputs := collector.get()) is not None:
        outputs["hidden"].append(output)


@policies
@pytest.mark.parametrize("has_backward", [True, False])
def test_outputs_that_hooks_collect_in_a_context_variable_are_collected_once_and_freed(
    policy: str, has_backward: bool
) -> None:
    def step(model: nn.Module) -> Tensor:
        outputs: dict[str, list[Tensor]] = {"hidden": []}
        handles = [m.register_forward_hook(collect) for m in model.layers.modules()]
        token = collector.set(outputs)
        loss = model(torch.randn(4, D)).square().mean()
        collector.reset(token)
        number = len(outputs["hidden"])
        freed.extend(weakref.ref(tensor.untyped_storage()) for tensor in outputs["hidden"])
        if has_backward:
            loss.backward()
        for handle in handles:
            handle.remove()
        assert len(outputs["hidden"]) == number == 9
        return loss

    freed: list[weakref.ref[Any]] = []
    if has_backward:
        assert_same(stack(lambda: Reads(one)), step, policy)
    else:
        model = stack(lambda: Reads(one))()
        with graphckpt.apply(model, {"layers.*": POLICIES[policy]}):
            for _ in range(3):
                step(model)
    assert len(freed) >= 27
    wait_until_freed(freed)


conditions: ContextVar[dict[str, Tensor]] = ContextVar("conditions")


@as_module(lambda: {"linear": nn.Linear(D, D)})
def Conditioned(self: Any, x: Tensor) -> Tensor:
    return (self.linear(x) + conditions.get()["mask"] * conditions.get().get("bias", 0)).sin()


@policies
@pytest.mark.parametrize("change", ["none", "freed", "modified"])
def test_a_tensor_in_a_context_variable_is_that_of_the_forward_or_refused(change: str, policy: str) -> None:
    def step(model: nn.Module) -> Tensor:
        bias = model.embed.bias * 0.5  # with history, which is not held
        mask = torch.rand(D)
        token = conditions.set({"mask": mask, "bias": bias})
        loss = model(torch.randn(4, D)).square().mean()
        conditions.reset(token)
        if change == "modified":
            mask.zero_()
        elif change == "freed":
            del token, mask, bias
        loss.backward()
        return loss

    if change != "modified":
        assert_same(stack(Conditioned), step, policy)
        return
    model = stack(Conditioned)()
    with graphckpt.apply(model, {"layers.*": POLICIES[policy]}), pytest.raises(MutatedError, match=r"layers.1: a ten"):
        step(model)


class Collector:
    def __init__(self, **fields: Any) -> None:
        self.outputs: list[Tensor] = []
        self.fields = fields


class Outputs(UserDict[str, Any]):
    @property
    def outputs(self) -> list[Tensor]:
        return self["outputs"]  # type: ignore[no-any-return]


class Numbers:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


scope: ContextVar[Any] = ContextVar("scope", default=None)


def append(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
    if (collector := scope.get()) is not None:
        (collector[0] if isinstance(collector, tuple) else collector).outputs.append(output)


@policies
@pytest.mark.parametrize(
    "make",
    [Collector, lambda: SimpleNamespace(outputs=[]), lambda: (Collector(),), lambda: Outputs(outputs=[])],
    ids=["object", "namespace", "in a tuple", "with a dictionary"],
)
def test_outputs_that_an_object_in_a_context_variable_collects_are_collected_once_and_freed(
    make: Callable[[], Any], policy: str
) -> None:
    """With a backward: without one, the object is held by the calls that it has outputs of."""
    freed: list[weakref.ref[Any]] = []

    def step(model: nn.Module) -> Tensor:
        handles = [layer.register_forward_hook(append) for layer in model.layers]
        inner = [layer.up.register_forward_hook(append) for layer in model.layers]
        collector = make()
        token = scope.set(collector)
        loss = model(torch.randn(4, D)).square().mean()
        scope.reset(token)
        outputs = (collector[0] if isinstance(collector, tuple) else collector).outputs
        freed.extend(weakref.ref(tensor.untyped_storage()) for tensor in outputs)
        loss.backward()
        for handle in (*handles, *inner):
            handle.remove()
        assert len(outputs) == 2 * len(model.layers)
        return loss.detach()

    assert_same(stack(lambda: Reads(one)), step, policy)
    assert len(freed) >= 12
    wait_until_freed(freed)


@policies
def test_a_context_variable_that_has_the_last_output_keeps_one_call_alive(policy: str) -> None:
    model = stack(lambda: Reads(one))()
    freed: list[weakref.ref[Any]] = []
    with graphckpt.apply(model, {"layers.*": POLICIES[policy]}):
        for _ in range(5):
            x = model.embed(torch.randn(4, D))
            for layer in model.layers:
                x = layer(x)
                freed.append(weakref.ref(x.untyped_storage()))
                scope.set(x)
    scope.set(None)
    wait_until_freed(freed, most=len(model.layers) + 1)


def count(settings: Numbers) -> float:
    settings.calls += 1
    return float(settings.calls)


OBJECTS: dict[str, tuple[Callable[[], Any], Callable[[], float]]] = {
    "numbers": (lambda: Numbers(scale=2.0), lambda: scope.get().scale),
    "numbers in a namespace": (lambda: SimpleNamespace(scale=2.0, name=None), lambda: scope.get().scale),
    "counter": (lambda: Numbers(calls=0), lambda: count(scope.get())),
    "with history": (lambda: torch.ones(D).requires_grad_() * 2, scope.get),
}


@policies
@pytest.mark.parametrize("case", OBJECTS)
def test_an_object_in_a_context_variable_is_that_of_the_forward(case: str, policy: str) -> None:
    make, read = OBJECTS[case]

    def step(model: nn.Module) -> Tensor:
        token = scope.set(make())
        loss = model(torch.randn(4, D)).square().mean()
        assert case != "counter" or scope.get().calls == len(model.layers)
        scope.reset(token)
        del token
        loss.backward()
        return loss

    assert_same(stack(lambda: Reads(read)), step, policy)


@policies
@pytest.mark.parametrize(
    "read",
    [
        lambda value: value.fields["scale"],
        lambda value: 2.0 if isinstance(value, Collector) else 1.0,
        lambda value: 2.0 if value else 1.0,
        lambda value: 2.0 if value == 3 else 1.0,
    ],
    ids=["attribute", "class", "truth", "equality"],
)
@pytest.mark.parametrize("change", ["freed", "changed"])
def test_an_object_in_a_context_variable_is_that_of_the_forward_whatever_becomes_of_it(
    change: str, read: Callable[[Any], float], policy: str
) -> None:
    def step(model: nn.Module) -> Tensor:
        collector = Collector(scale=2.0)
        token = scope.set(collector)
        loss = model(torch.randn(4, D)).square().mean()
        scope.reset(token)
        if change == "changed":
            collector.fields["scale"] = 3.0
        del token, collector
        loss.backward()
        return loss

    assert_same(stack(lambda: Reads(lambda: read(scope.get()))), step, policy)


# Attributes that come, go, or change their type


@as_module(lambda value: {"linear": nn.Linear(D, D), "value": value})
def Valued(self: Any, x: Tensor) -> Tensor:
    value = getattr(self, "value", 1.0)
    while not isinstance(value, (float, int, Tensor)):
        value = READERS[type(value)](value)
    return x + (self.linear(x) * value).sin()


READERS: dict[type, Callable[[Any], Any]] = {
    NoneType: lambda value: 1.0,
    list: lambda value: value[0],
    tuple: lambda value: value[0],
    frozenset: len,
    range: len,
    slice: lambda value: value.stop,
    SimpleNamespace: lambda value: value.x,
    FunctionType: lambda value: value(),
    partial: lambda value: value(),
    np.float32: float,
    np.ndarray: lambda value: float(value[0]),
    Scale: lambda value: value.value,
}


def one_argument() -> float:
    return 1.5


def other_argument() -> float:
    return 2.5


CONSTANTS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "member of an Enum": (lambda: Scale.LOW, lambda: Scale.HIGH),
    "function": (lambda: one_argument, lambda: other_argument),
    "partial": (lambda: partial(float, 1), lambda: partial(float, 2)),
    "number of NumPy": (lambda: np.float32(1.5), lambda: np.float32(2.5)),
    "double of NumPy": (lambda: np.float64(1.5), lambda: np.float64(2.5)),
    "array of NumPy": (lambda: np.ones(3), lambda: np.full(3, 2.5)),
    "range": (lambda: range(1), lambda: range(2)),
    "slice": (lambda: slice(1), lambda: slice(2)),
    "frozenset": (lambda: frozenset([1]), lambda: frozenset([1, 2])),
    "tuple in a tuple": (lambda: ((1.5,),), lambda: ((2.5,),)),
}


@policies
@pytest.mark.parametrize("case", CONSTANTS)
def test_values_that_cannot_change_are_those_of_the_forward(case: str, policy: str) -> None:
    before, after = CONSTANTS[case]

    def step(model: nn.Module) -> Tensor:
        each(lambda layer: setattr(layer, "value", before()))(model)
        return then(each(lambda layer: setattr(layer, "value", after())))(model)

    assert_same(stack(lambda: Valued(before())), step, policy)


VALUES: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.rand(D),
    "number": lambda: 2.0,
    "nothing": lambda: None,
    "list": lambda: [torch.rand(D)],
    "object": lambda: SimpleNamespace(x=torch.rand(D)),
    "function": lambda: one_argument,
}


FIRST, AFTER = [*VALUES, "absent"], ["tensor", "number", "list"]


@pytest.mark.parametrize(
    ("first", "later", "after", "policy"),
    # Each first and later value under each policy, and with each value after, under one of them.
    [case for case in product(FIRST, VALUES, AFTER, POLICIES) if is_chosen(case, FIRST, VALUES, AFTER, POLICIES)],
)
def test_an_attribute_may_change_its_type_from_call_to_call(first: str, later: str, after: str, policy: str) -> None:
    def step(model: nn.Module) -> Tensor:
        number = model.number = getattr(model, "number", -1) + 1
        name = (first, later)[number % 2]
        for layer in model.layers if name in VALUES else ():
            layer.value = VALUES[name]()
        is_absent = not hasattr(model.layers[0], "value")
        return then(lambda model: None if is_absent else each(lambda x: setattr(x, "value", VALUES[after]()))(model))(
            model
        )

    def build() -> nn.Module:
        model = stack(lambda: Valued(1.0))()
        for layer in model.layers if first == "absent" else ():
            del layer.value
        return model

    assert_same(build, step, policy)


# Hooks that exist during the model's forward alone


def hooked(register: Callable[[nn.Module], Any]) -> Step:
    """Returns a step in which the layers have hooks during the model's forward."""

    def step(model: nn.Module) -> Tensor:
        handles = [register(module) for module in model.modules() if isinstance(module, nn.Linear)]
        loss = model(torch.randn(4, D)).square().mean()
        for handle in handles:
            handle.remove()
        loss.backward()
        return loss

    return step


def hooked_later(model: nn.Module) -> Tensor:
    """A hook that is there in backward alone."""
    loss = model(torch.randn(4, D)).square().mean()
    handles = [m.register_forward_pre_hook(lambda m, args: (args[0] * 3,)) for m in model.modules()]
    loss.backward()
    for handle in handles:
        handle.remove()
    return loss


def once(module: nn.Module) -> RemovableHandle:
    """Registers a hook that removes itself when it has run."""

    def halve(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        handle.remove()
        return (args[0] * 0.5,)

    handle = module.register_forward_pre_hook(halve)
    return handle


def globally(module: nn.Module) -> RemovableHandle:
    def scale(owner: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor | None:
        return output * 0.7 if owner is module else None

    return nn.modules.module.register_module_forward_hook(scale)


HOOKS: dict[str, Step] = {
    "pre-hook": hooked(lambda m: m.register_forward_pre_hook(lambda m, args: (args[0] * 0.5,))),
    "pre-hook with keywords": hooked(
        lambda m: m.register_forward_pre_hook(lambda m, args, kwargs: ((args[0] + 1,), kwargs), with_kwargs=True)
    ),
    "hook": hooked(lambda m: m.register_forward_hook(lambda m, args, output: output.sin())),
    "hook with keywords, always": hooked(
        lambda m: m.register_forward_hook(lambda m, args, kwargs, out: out.sin(), with_kwargs=True, always_call=True)
    ),
    "hook that removes itself": hooked(once),
    "global hook": hooked(globally),
    "hook in backward alone": hooked_later,
}


@policies
@pytest.mark.parametrize("case", HOOKS)
def test_hooks_that_were_there_act_in_the_recomputation(case: str, policy: str) -> None:
    assert_same(stack(lambda: Reads(one)), HOOKS[case], policy)


def test_hooks_that_the_first_call_adds_stay_and_are_those_of_later_calls() -> None:
    @as_module(lambda: {"inner": nn.Linear(D, D), "is_set_up": False, "calls": 0})
    def SetsUp(self: Any, x: Tensor) -> Tensor:
        if not self.is_set_up:
            self.inner.register_forward_hook(lambda module, args, output: output.tanh())
            self.is_set_up = True
        return self.inner(x).sin()

    assert_same(stack(SetsUp), then(lambda model: None), "full")
    model = stack(SetsUp)()
    with graphckpt.apply(model, {"layers.*": True}):
        for _ in range(3):
            then(lambda model: None)(model)
    assert [len(layer.inner._forward_hooks) for layer in model.layers] == [1, 1]


# Buffers that forward leaves alone, and views of those that it modifies


class ByIdentity(nn.Module):
    """Reads its buffers by what they are: ``is``, a weak dictionary, a cache by ids."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.linear = nn.Linear(D, D)
        self.register_buffer("slow", torch.rand(D))
        self.register_buffer("steps", torch.zeros(()))
        self.schedule = [self.slow]
        known = WeakIdKeyDictionary({self.slow: 2.0})  # of a closure: the call state does not reach it
        sizes: dict[int, float] = {}
        self.sizes = lambda: sizes
        self.known = lambda: known

    def forward(self, x: Tensor) -> Tensor:
        scale = 1.0
        if self.way == "is":
            scale = 2.0 if self.schedule[0] is self.slow else 0.5
        elif self.way == "weak dictionary":
            scale = self.known()[self.slow]
        elif self.way == "cache":
            scale = self.sizes().setdefault(id(self.slow), 1.0 + len(self.sizes()))
        self.steps += 1
        return x + (self.linear(x) * (scale * self.steps) + self.slow).sin()


@policies
@pytest.mark.parametrize("way", ["is", "weak dictionary", "cache"])
def test_a_small_buffer_that_forward_leaves_alone_is_the_same_object(way: str, policy: str) -> None:
    build = stack(lambda: ByIdentity(way))
    assert_same(build, then(lambda model: None), policy)
    model = build()
    with graphckpt.apply(model, {"layers.*": POLICIES[policy]}):
        for _ in range(3):
            then(lambda model: None)(model)
    assert all(len(layer.sizes()) <= 1 for layer in model.layers), "each buffer has one identity"


@policies
@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.slow.mul_(0.5),
        lambda layer: layer.slow.data.mul_(0.5),
        lambda layer: setattr(layer.slow, "data", torch.rand(D)),
        lambda layer: setattr(layer, "slow", torch.rand(D)),
    ],
    ids=["in place", "through data", "other data", "replaced"],
)
def test_a_small_buffer_has_the_values_of_the_forward(change: Callable[[Any], Any], policy: str) -> None:
    seen: list[Tensor] = []

    def step(model: nn.Module) -> Tensor:
        loss = then(each(change))(model)
        seen.extend(layer.slow.clone() for layer in model.layers)
        return loss

    assert_same(stack(lambda: ByIdentity("none")), step, policy)
    half = len(seen) // 2
    assert all(map(torch.equal, seen[:half], seen[half:])), "what the caller has changed stays changed"


VIEWS: dict[str, Callable[[Any], Tensor]] = {
    "a row": lambda rates: rates[0],
    "a row, from its end": lambda rates: rates.flip(0)[0:0].new_empty(0).set_(rates)[1],
    "transposed": lambda rates: rates.t()[:, 0],
    "of another type": lambda rates: rates.view(torch.int32),
    "detached": lambda rates: rates.detach()[0],
}


@policies
@pytest.mark.parametrize("as_buffer", [False, True])
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_of_a_buffer_follows_it(view: str, as_buffer: bool, policy: str) -> None:
    class Decayed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(D, D)
            self.register_buffer("rates", torch.rand(2, D))
            rate = VIEWS[view](self.rates)
            if as_buffer:
                self.register_buffer("rate", rate)
            else:
                self.rate = rate

        def forward(self, x: Tensor) -> Tensor:
            self.rates.mul_(0.75)
            rate = self.rate.view(torch.float32)[0] if self.rate.dtype is torch.int32 else self.rate
            return x + (self.linear(x) * rate).sin()

    assert_same(stack(Decayed), then(lambda model: None), policy)


@as_module(lambda make, read: {"linear": nn.Linear(D, D), "buffer": nn.Buffer(make()), "read": read})
def ReadsBuffer(self: Any, x: Tensor) -> Tensor:
    return x + (self.linear(x) * self.read(self)).sin()


def values(*size: int) -> Tensor:
    return torch.linspace(-1.3, 2.7, torch.Size(size).numel()).reshape(size)


def column_sums(layer: nn.Module) -> Tensor:
    return layer.buffer.sum(0) + layer.buffer.sum() * 0.01


STRIDES: dict[str, tuple[Callable[[], Tensor], Callable[[Any], Any]]] = {
    "expanded": (lambda: values(64, 1).expand(64, D), column_sums),
    "expanded number": (lambda: values(1).expand(D), column_sums),
    "columns of a matrix": (lambda: values(64, D, 3)[:, :, 1], column_sums),
    "strides": (lambda: values(64, 2 * D)[:, :D], lambda layer: float(layer.buffer.stride(0))),
    "overlapping": (lambda: values(40 + D).unfold(0, D, 2), column_sums),
    "a column of much": (lambda: values(64 * D, 400)[:, 5], lambda layer: layer.buffer.view(64, D).sum(0)),
    "transposed": (lambda: values(D, 64).t(), column_sums),
    "no elements": (lambda: values(4, D)[:0, ::2], lambda layer: layer.buffer.sum() + 1),
}


@policies
@pytest.mark.parametrize("case", STRIDES)
@pytest.mark.parametrize("modify", [lambda layer: None, lambda layer: setattr(layer, "buffer", layer.buffer * 3)])
def test_a_buffer_is_rounded_alike_whatever_its_strides(case: str, modify: Callable[[Any], Any], policy: str) -> None:
    make, read = STRIDES[case]
    assert_same(stack(lambda: ReadsBuffer(make, read)), then(each(modify)), policy)


LAYOUTS: dict[str, tuple[Callable[[], Tensor], Callable[[Any], Any]]] = {
    "COO": (lambda: torch.eye(D).to_sparse(), lambda layer: torch.sparse.mm(layer.buffer, layer.linear.weight).sum(1)),
    "CSR": (lambda: torch.eye(D).to_sparse_csr(), lambda layer: (layer.buffer @ layer.linear.weight).sum(1)),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(2) * 2, torch.ones(3)]),
        lambda layer: layer.buffer.to_padded_tensor(0.0).sum(),
    ),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2) * 2, torch.ones(3)], layout=torch.jagged),
        lambda layer: layer.buffer.values().sum(),
    ),
}


@policies
@pytest.mark.filterwarnings("ignore:.*(Sparse CSR|nested tensors)")
@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize("case", LAYOUTS)
def test_a_buffer_may_have_any_layout(case: str, is_replaced: bool, policy: str) -> None:
    if case != "jagged" and torch.cuda.is_available() and torch.cuda.get_device_name() == "Simulated CUDA device":
        torch.set_default_device(None)  # the simulated device has kernels of strided tensors only
    make, read = LAYOUTS[case]
    losses = []
    for layers in ({}, {"layers.*": POLICIES[policy]}):
        torch.manual_seed(0)
        model = stack(lambda: ReadsBuffer(make, read))()
        with graphckpt.apply(model, layers):
            for _ in range(3):
                loss = model(torch.randn(4, D)).square().mean()
                if is_replaced:
                    for layer in model.layers:
                        layer.buffer = layer.buffer * 1.5
                loss.backward()
        losses.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *losses))


@policies
def test_offsets_of_nested_tensors_may_be_a_buffer(policy: str) -> None:
    class Jagged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(D, 30), nn.Linear(30, D)
            self.register_buffer("offsets", torch.tensor([0, 1, 4]), persistent=False)

        def forward(self, values: Tensor) -> Tensor:
            x = torch.nested.nested_tensor_from_jagged(values, self.offsets)
            return (x + self.down(nn.functional.gelu(self.up(x)))).values()

    assert_same(stack(Jagged), then(lambda model: None), policy)


# Errors


class Settings:
    current: dict[str, float] | None = None


@as_module(lambda: {"linear": nn.Linear(D, D)})
def Scaled(self: Any, x: Tensor) -> Tensor:
    assert Settings.current is not None
    return self.linear(x).relu() * Settings.current["scale"]


@policies
def test_an_error_of_the_users_in_a_recomputation_names_the_block_and_the_likely_cause(policy: str) -> None:
    model = stack(Scaled)()
    with graphckpt.apply(model, {"layers.*": POLICIES[policy]}):
        Settings.current = {"scale": 0.5}
        loss = model(torch.randn(4, D)).sum()
        Settings.current = None
        with pytest.raises(AssertionError) as raised:
            loss.backward()
    (note,) = raised.value.__notes__
    assert note.startswith("layers.1: raised while backward recomputed the forward of this block")
    assert "fix: " in note


@policies
def test_a_failed_recomputation_raises_no_base_exception(policy: str) -> None:
    """A forward that writes into an object that nothing can put back."""

    class Sealed:
        """Holds its tensor where only a closure reaches it."""

        def __init__(self, x: Tensor) -> None:
            held = [x]
            self.read: Callable[[], Tensor] = lambda: held[0]
            self.write: Callable[[Tensor], None] = lambda x: held.__setitem__(0, x)

    @as_module(lambda: {"message": nn.Linear(D, D), "update": nn.Linear(D, D)})
    def Writes(self: Any, graph: Sealed) -> Sealed:
        hidden = self.message(graph.read()).tanh()
        graph.write(graph.read()[:, :D] + self.update(hidden * 0.5))
        return graph

    model = stack(Writes)()
    with graphckpt.apply(model, {"layers.*": POLICIES[policy]}):
        graph = Sealed(torch.randn(4, D))
        loss = model.layers(graph).read().square().sum()
        with pytest.raises(Exception, match=r"fix: |must") as raised:
            loss.backward()
    assert isinstance(raised.value, RecomputeError) or raised.value.__notes__
