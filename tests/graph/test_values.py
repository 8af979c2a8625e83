"""Inputs of build and outputs of a call."""

from __future__ import annotations

import gc
import re
import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from helpers.train_graphs import Train, adamw, batches, mlp
from torch import Tensor, nn
from transformers.modeling_outputs import ModelOutput

from graphckpt import ConfigError, Graph, GraphError


class Echo(Graph):
    """Returns what ``act`` makes of the arguments."""

    def __init__(self, act: Any, model: nn.Module | None = None) -> None:
        super().__init__()
        self.act = act
        if model is not None:
            self.model = model

    def build(self, *args: Any, **kwargs: Any) -> Any:
        return self.act(*args, **kwargs)


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclass
class Record:
    x: Tensor
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Slotted:
    x: Tensor
    name: str = "n"


@dataclass
class Output(ModelOutput):
    loss: Tensor | None = None
    logits: Tensor | None = None
    states: tuple[Tensor, ...] | None = None


class Opaque:
    __slots__ = ("x",)

    def __init__(self, x: Tensor) -> None:
        self.x = x


def test_any_arguments_reach_build_as_they_are() -> None:
    x = torch.ones(2, 3)
    given = (x, None, 3, "text", [x, {"k": (x, 1.5)}], Pair(x, None), Record(x), Slotted(x), Opaque(x), print)
    seen: list[Any] = []

    def act(*args: Any, **kwargs: Any) -> None:
        seen.extend((args, kwargs))

    for _ in range(5):
        Echo(act)(*given, keyword=given[4], flag=True)
        args, kwargs = seen[-2:]
        assert all(a is b for a, b in zip(args, given, strict=True))
        assert kwargs == {"keyword": given[4], "flag": True}


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: (x,),
        lambda x: [x, None, 3, "text"],
        lambda x: {"a": x, "b": [x * 2, {"c": (x,)}]},
        lambda x: Pair(x, "b"),
        lambda x: Record(x, {"deep": [x]}),
        Slotted,
        lambda x: Output(loss=x.sum(), states=(x, x * 2)),
        lambda _: None,
        lambda _: 7,
        lambda _: "text",
    ],
)
def test_outputs_keep_their_structure_and_are_cut_off(make: Any) -> None:
    weight = nn.Linear(3, 3)
    x = torch.ones(2, 3)
    plain = make(weight(x))
    ours = Echo(lambda x: make(weight(x)))(x)
    assert type(ours) is type(plain)

    def check(a: Any, b: Any) -> None:
        assert type(a) is type(b)
        if isinstance(a, Tensor):
            assert torch.equal(a, b)
            assert not a.requires_grad
            assert a.grad_fn is None
        elif isinstance(a, (list, tuple)):
            assert len(a) == len(b)
            for pair in zip(a, b, strict=True):
                check(*pair)
        elif isinstance(a, dict):
            assert list(a) == list(b)
            for key in a:
                check(a[key], b[key])
        elif isinstance(a, (Record, Slotted)):
            for name in type(a).__dataclass_fields__:
                check(getattr(a, name), getattr(b, name))
        else:
            assert a == b

    check(ours, plain)
    if isinstance(ours, Output):
        assert ours.logits is None
        assert torch.equal(ours[0], plain.loss.detach())


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("average", torch.zeros(3))
        self.plain = torch.arange(3.0)
        self.scale = nn.Parameter(torch.tensor(2.0))


ALIASES: dict[str, Any] = {
    "the input": lambda _, x: x,
    "a view of the input": lambda _, x: x[0],
    "the input, edited": lambda _, x: x.add_(1),
    "the input in a list": lambda _, x: [{"x": x}],
    "a parameter": lambda m, _: m.linear.weight,
    "a view of a parameter": lambda m, _: m.linear.weight.t(),
    "an element of a parameter": lambda m, _: m.linear.weight[0, 0],
    "a parameter without dimensions": lambda m, _: m.scale,
    "a detached parameter": lambda m, _: m.linear.weight.detach(),
    "a buffer": lambda m, _: m.average,
    "a buffer, edited": lambda m, x: m.average.add_(x.mean()),
    "a plain attribute": lambda m, _: m.plain,
    "a view with history of an expanded input": lambda m, x: (x * m.scale).t(),
}


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("case", ALIASES)
def test_outputs_are_fresh(case: str, needs_grad: bool) -> None:
    model = Holds()
    if needs_grad and case == "the input, edited":
        pytest.skip("a leaf that requires gradients cannot be modified in place")
    x = torch.ones(3, 3, requires_grad=needs_grad)
    graph = Echo(lambda x: ALIASES[case](model, x), model)
    owned = [x, model.linear.weight, model.average, model.plain, model.scale]
    outputs = []
    for _ in range(6):
        output = graph(x)
        output = output[0]["x"] if isinstance(output, list) else output
        assert not output.requires_grad
        outputs.append(output)
        expected = output.clone()
        kept = [t.detach().clone() for t in owned]
        for earlier in outputs:
            earlier.add_(100)
        assert all(torch.equal(a, b) for a, b in zip(kept, owned, strict=True))
        output.copy_(expected)


def test_the_input_gets_its_gradient() -> None:
    model, (x, y) = mlp(), batches(1)[0]
    graph = Train(model, adamw(model))
    graph.model[1].config.activation_checkpointing = True
    x.requires_grad_()
    torch.manual_seed(0)
    graph(x, y)
    plain_x = x.detach().clone().requires_grad_()
    torch.manual_seed(0)
    nn.functional.cross_entropy(mlp()(plain_x), y).backward()
    assert torch.equal(x.grad, plain_x.grad)


X = torch.ones(2, 3)
CHANGES: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "shape": (
        (torch.ones(4, 3), [X, 1]),
        {"k": None},
        "input `x` was float32[2, 3] on cpu and is float32[4, 3] on cpu",
    ),
    "dtype": ((X.double(), [X, 1]), {"k": None}, "input `x` was float32[2, 3] on cpu and is float64[2, 3] on cpu"),
    "device": ((X.to("meta"), [X, 1]), {"k": None}, "input `x` was float32[2, 3] on cpu and is float32[2, 3] on meta"),
    "nested": ((X, [X[:1], 1]), {"k": None}, "input `pair[0]` was float32[2, 3] on cpu and is float32[1, 3] on cpu"),
    "value": ((X, [X, 2]), {"k": None}, "input `pair[1]` was 1 and is 2"),
    "none": ((X, [X, 1]), {"k": X}, "input `k` was None and is float32[2, 3] on cpu"),
    "fewer": ((X, [X, 1]), {}, "the arguments were (x, pair[0], pair[1], k) and are (x, pair[0], pair[1])"),
    "other keys": (
        (X, [X, 1]),
        {"k": {"a": None}},
        "the arguments were (x, pair[0], pair[1], k) and are (x, pair[0], pair[1], k['a'])",
    ),
}


@pytest.mark.parametrize("warm_calls", [1, 5])
@pytest.mark.parametrize("case", CHANGES)
def test_strict_static_names_what_changed(case: str, warm_calls: int) -> None:
    class Static(Graph):
        def build(self, x: Any, pair: Any, k: Any = 0) -> Any:
            return k

    args, kwargs, difference = CHANGES[case]
    graph = Static()
    graph.config.strict_static = True
    for _ in range(warm_calls):
        graph(X, [X, 1], k=None)
    with pytest.raises(GraphError) as error:
        graph(*args, **kwargs)
    assert str(error.value) == (
        f"{graph.name}: {difference} · fix: keep inputs as they are, or config.strict_static = False"
    )
    graph(X, [X, 1], k=None)
    graph.config.strict_static = False
    graph(*args, **kwargs)


def test_strict_static_can_be_switched_on_later() -> None:
    graph = Echo(lambda x: x)
    for _ in range(4):
        graph(X)
    graph.config.strict_static = True
    graph(X)
    with pytest.raises(GraphError, match=re.escape("input `args[0]` was float32[2, 3] on cpu and is float32[1, 3]")):
        graph(X[:1])


def test_no_batch_is_held() -> None:
    model = mlp()
    graph = Train(model, adamw(model))
    graph.model[1].config.activation_checkpointing = True
    taking = Echo(lambda record: record.x.sum())
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            x, y = batches(1)[0]
            record = Record(torch.ones(3), {"more": [torch.ones(4)]})
            refs = [weakref.ref(t.untyped_storage()) for t in (x, y, record.x, record.more["more"][0])]
            graph(x, y)
            taking(record)
            del x, y, record
            assert [ref() for ref in refs] == [None] * 4
    finally:
        gc.enable()


def test_a_deleted_graph_and_its_model_are_freed_at_once() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = Train(model, optimizer)
    graph.model[1].config.activation_checkpointing = True
    for x, y in batches(5):
        graph(x, y)
    graph.explain(show=False)
    gc.collect()
    gc.disable()
    try:
        refs = [weakref.ref(graph), weakref.ref(model[1]), weakref.ref(model[1][0].weight.untyped_storage())]
        del graph, model, optimizer
        assert [ref() for ref in refs] == [None] * 3
    finally:
        gc.enable()


KNOBS = [
    "allow_fuse_add_to_output",
    "allow_fuse_cast_scale",
    "allow_fuse_model_update_ops",
    "enable_compress_memory",
    "enable_choose_best_memory_allocation",
    "enable_cudnn_conv_heuristic_search_algo",
    "enable_fused_model_update_cast",
    "enable_multi_tensor_update",
    "enable_straighten_algorithm",
    "set_outputs_buffer_size",
]


@pytest.mark.parametrize("knob", KNOBS)
def test_knobs_without_effect_are_accepted(knob: str) -> None:
    model = mlp()
    graph = Train(model, adamw(model))
    assert getattr(graph.config, knob)(True) is None
    graph(*batches(1)[0])


@pytest.mark.parametrize(
    ("knob", "instead"),
    [
        ("enable_zero", "use fully_shard or ZeroRedundancyOptimizer"),
        ("set_zero_redundancy_optimizer_mode", "use fully_shard or ZeroRedundancyOptimizer"),
        ("enable_auto_parallel", "set torch.distributed's parallelism on the module"),
    ],
)
def test_impossible_settings_say_what_to_use_instead(knob: str, instead: str) -> None:
    graph = Train(mlp())
    with pytest.raises(ConfigError) as error:
        getattr(graph.config, knob)(True)
    assert str(error.value) == f"Graph.config.{knob}: a Graph does not do this · fix: {instead}"
    getattr(graph.config, knob)(False)


def test_unknown_settings_and_wrong_values() -> None:
    config = Train(mlp()).config
    with pytest.raises(AttributeError, match=r"has no attribute 'enable_ampp' · did you mean 'enable_amp'"):
        config.enable_ampp(True)
    for name in ("strict_static", "measure"):
        with pytest.raises(ConfigError, match=f"Graph.config.{name}: expected a bool, got 1 · fix: use True or False"):
            setattr(config, name, 1)


def test_the_config_reads_as_oneflows() -> None:
    model = mlp()
    graph = Train(model)
    assert repr(graph.config) == "GraphConfig(training=False)"
    graph.add_optimizer(adamw(model))
    assert repr(graph.config) == "GraphConfig(training=True)"
    graph.config.enable_amp(dtype=torch.bfloat16)
    graph.config.set_gradient_accumulation_steps(4)
    graph.config.strict_static = True
    assert repr(graph.config) == (
        "GraphConfig(training=True, amp=bfloat16, gradient_accumulation_steps=4, strict_static=True)"
    )
