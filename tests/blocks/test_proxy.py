"""A block is its module, with a policy beside it."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from graphckpt import ConfigError, Graph, GraphModule
from graphckpt.blocks import Block


class Part(nn.Module):
    """Attributes with the names of dict methods, and a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values, self.items = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
        self.name = "own name"
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.zeros(()))

    def double(self) -> str:
        return "not what nn.Module does"

    def scaled(self, x: Tensor, *, by: float) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return self.keys(x) * by

    @property
    def width(self) -> int:
        return self.weight.numel()

    def forward(self, x: Tensor) -> Tensor:
        return self.values(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Part()
        self.list = nn.ModuleList([nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)])
        self.dict = nn.ModuleDict({"x": nn.Linear(2, 2), "y": nn.Tanh()})
        self.chain = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))])
        self.plain = [nn.Linear(1, 1)]

    def forward(self, x: Tensor) -> Tensor:
        return self.chain(self.part(x))


class Holds(Graph):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def build(self, act: Any) -> Any:
        return act(self.net)


@pytest.fixture
def net() -> Net:
    return Net()


@pytest.fixture
def graph(net: Net) -> Holds:
    return Holds(net)


def test_isinstance_in_and_out_of_build(net: Net, graph: Holds) -> None:
    assert isinstance(graph.net, Net)
    assert isinstance(graph.net, nn.Module)
    assert isinstance(graph.net.chain, nn.Sequential)
    assert not isinstance(graph.net.chain, nn.ModuleList)
    assert graph.net.__class__ is Net
    assert type(graph.net) is Block
    assert graph(lambda net: (isinstance(net, Net), type(net) is Net, type(net.part) is Part)) == (True, True, True)


def test_children_are_blocks_and_keep_their_identity(net: Net, graph: Holds) -> None:
    assert type(graph.net.part.keys) is Block
    assert graph.net.part is graph.net.part
    assert graph.net.part.origin is net.part
    assert {graph.net.part: 1}[graph.net.part] == 1
    assert graph.net.chain[0] is graph.net.chain[-3]
    part = graph.net.part
    assert (part.name, part.name_prefix) == ("part", "net.")
    assert (part.keys.name, part.keys.name_prefix) == ("keys", "net.part.")
    assert (graph.net.name, graph.net.name_prefix) == ("net", "")


def test_names_of_dict_methods_may_be_submodules(graph: Holds) -> None:
    for name in ("keys", "values", "items"):
        block = getattr(graph.net.part, name)
        assert isinstance(block, nn.Linear)
        block.config.activation_checkpointing = True
    with pytest.raises(AttributeError):
        graph.net.chain.keys


def test_parameters_buffers_and_plain_attributes_are_the_modules_own(net: Net, graph: Holds) -> None:
    block = graph.net.part
    assert block.weight is net.part.weight
    assert block.count is net.part.count
    assert block.width == 2
    assert graph.net.plain is net.plain
    assert [id(p) for p in graph.net.parameters()] == [id(p) for p in net.parameters()]
    assert list(graph.net.state_dict()) == list(net.state_dict())
    assert len(torch.optim.SGD(graph.net.parameters(), lr=0.1).param_groups[0]["params"]) == 19
    with pytest.raises(AttributeError, match="'Part' object has no attribute 'nothing'"):
        block.nothing


def test_writes_reach_the_module(net: Net, graph: Holds) -> None:
    graph.net.part.rate = 0.5
    assert net.part.rate == 0.5
    del graph.net.part.rate
    assert not hasattr(net.part, "rate")
    graph.net.part.keys = replacement = nn.Linear(2, 2)
    assert net.part.keys is replacement
    graph.net.part.keys = graph.net.part.values
    assert net.part.keys is net.part.values
    assert type(net.part.keys) is nn.Linear
    graph.net.chain[1] = nn.Tanh()
    graph.net.chain[2] = graph.net.chain[0]
    assert [type(m) for m in net.chain] == [nn.Linear, nn.Tanh, nn.Linear]
    del graph.net.chain[2]
    assert len(net.chain) == 2
    del graph.net.part.items
    assert not hasattr(net.part, "items")


def test_custom_methods_run_on_the_module(net: Net, graph: Holds) -> None:
    x = torch.ones(1, 2)
    assert torch.equal(graph.net.part.scaled(x, by=2.0), net.part.keys(x) * 2.0)
    assert net.part.calls == 1
    assert graph.net.part.double() == "not what nn.Module does"
    assert torch.equal(graph.net(x), net(x))


def test_calls_run_hooks(net: Net, graph: Holds) -> None:
    seen: list[str] = []
    graph.net.part.register_forward_hook(lambda *_: seen.append("hook"))
    graph.net.part.register_forward_pre_hook(lambda *_: seen.append("pre"))
    graph.net(torch.ones(1, 2))
    graph(lambda net: net(torch.ones(1, 2)))
    assert seen == ["pre", "hook"] * 2


@pytest.mark.parametrize(
    "name", ["train", "eval", "float", "double", "half", "bfloat16", "cpu", "requires_grad_", "share_memory"]
)
def test_methods_that_return_the_module_return_the_block(name: str, graph: Holds) -> None:
    block = graph.net.chain
    assert getattr(block, name)() is block
    block.eval()[0].config.activation_checkpointing = True


def test_apply_returns_the_block_and_sees_modules(net: Net, graph: Holds) -> None:
    seen: list[Any] = []
    assert graph.net.chain.apply(seen.append) is graph.net.chain
    assert seen == [*net.chain, net.chain]


def test_to(net: Net, graph: Holds) -> None:
    block = graph.net.part
    assert block.to(nn.Module) is net.part
    assert block.to(Part) is net.part
    assert type(block.to(GraphModule)) is GraphModule
    assert block.to("cpu") is block
    assert block.to(torch.float64) is block
    assert net.part.weight.dtype is torch.float64
    assert block.to(dtype=torch.float32, device="cpu") is block
    assert net.part.weight.dtype is torch.float32
    assert block.to(torch.ones(1, dtype=torch.float64)) is block
    assert net.part.weight.dtype is torch.float64
    assert block.to("meta") is block
    assert net.part.count.device.type == "meta"


def test_train_and_eval_are_the_modules(net: Net, graph: Holds) -> None:
    graph.net.eval()
    assert not net.chain.training
    assert graph.net.chain.training is False
    assert graph(lambda net: net.part.training) is False
    graph.net.train()
    assert graph(lambda net: net.part.training) is True


def test_lists(net: Net, graph: Holds) -> None:
    block = graph.net.list
    assert len(block) == 3
    assert bool(block)
    assert bool(graph.net.part)
    assert [b.origin for b in block] == list(net.list)
    assert [b.origin for b in reversed(list(block))] == list(reversed(list(net.list)))
    assert block[1] in block
    assert net.list[1] in block
    assert nn.ReLU() not in block
    assert block.append(nn.Tanh()) is block
    assert block.insert(0, nn.Sigmoid()) is None
    assert block.extend([graph.net.chain[0], nn.ReLU()]) is block
    assert [type(m).__name__ for m in net.list] == ["Sigmoid", "Linear", "ReLU", "Linear", "Tanh", "Linear", "ReLU"]
    assert net.list[5] is net.chain[0]
    assert (block[4].name, block[4].name_prefix) == ("4", "net.list.")
    with pytest.raises(IndexError):
        block[9]
    with pytest.raises(TypeError):
        len(graph.net.part)
    with pytest.raises(TypeError):
        iter(graph.net.part)


def test_dicts(net: Net, graph: Holds) -> None:
    block = graph.net.dict
    assert list(block) == ["x", "y"]
    assert list(block.keys()) == ["x", "y"]
    assert [b.origin for b in block.values()] == [net.dict["x"], net.dict["y"]]
    assert [(key, b.origin) for key, b in block.items()] == list(net.dict.items())
    assert block["x"].name_prefix + block["x"].name == "net.dict.x"
    assert "x" in block
    block["z"] = graph.net.chain[0]
    assert net.dict["z"] is net.chain[0]
    block.update({"w": graph.net.chain[1]})
    assert net.dict["w"] is net.chain[1]
    del block["w"]
    assert list(net.dict) == ["x", "y", "z"]
    assert block.pop("z").origin is net.chain[0]


def test_slices(net: Net, graph: Holds) -> None:
    part = graph.net.chain[1:]
    assert len(part) == 2
    assert [b.origin for b in part] == list(net.chain[1:])
    assert part[1] is graph.net.chain[2]
    assert part.name == "net.chain[1:]"
    assert graph.net.list[:2].name == "net.list[:2]"
    assert type(part.origin) is nn.Sequential
    assert torch.equal(part(torch.ones(1, 2)), net.chain[1:](torch.ones(1, 2)))
    part.config.activation_checkpointing = True
    assert part.config.activation_checkpointing == [True, True]
    assert [b.config.activation_checkpointing for b in graph.net.chain] == [None, True, True]
    part.to(GraphModule).set_stage(2)
    assert part.config.stage_id == [2, 2]
    assert part.to(nn.Module) is part.origin
    part.to(torch.float64)
    assert net.chain[2].weight.dtype is torch.float64
    assert net.chain[0].weight.dtype is torch.float32
    with pytest.raises(ConfigError, match=r"net.chain.1.tiles: expected a positive int, got 0"):
        part.config.tiles = 0
    assert re.match(r"net\.chain\[1:\]: Sequential\(", repr(part))
    assert [b.origin for b in graph.net.list[::-2]] == [net.list[2], net.list[0]]


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("activation_checkpointing", "activation_checkpointing"),
        ("activation_checkpoint", "activation_checkpointing"),
        ("offlod", "offload"),
        ("cpu_checkpointing", "offload"),
        ("compile", "compile"),
    ],
)
def test_a_field_set_on_the_block_itself_is_an_error(net: Net, graph: Holds, name: str, field: str) -> None:
    chain = graph.net.chain
    for block, path in ((graph.net, "net"), (chain[1], r"net\.chain\.1"), (chain[:2], r"net\.chain\[:2\]")):
        with pytest.raises(ConfigError, match=rf"^{path}\.{name}: .* · fix: write {path}\.config\.{field}$"):
            setattr(block, name, True)
    net.tiles = 2  # an attribute of the module's own
    graph.net.tiles = 3
    graph.net.partition_size = 4
    graph.net.segments = nn.ModuleList()
    assert (net.tiles, net.partition_size, len(net.segments)) == (3, 4, 0)


def test_parameter_lists_hold_parameters(net: Net, graph: Holds) -> None:
    assert graph.net.weights[0] is net.weights[0]
    assert list(graph.net.weights) == list(net.weights)
    assert len(graph.net.weights) == 2


def test_walks_give_each_block_once_with_its_path(net: Net, graph: Holds) -> None:
    assert [(name, b.origin) for name, b in graph.net.named_modules()] == list(net.named_modules())
    assert [b.origin for b in graph.net.modules()] == list(net.modules())
    assert [(name, b.origin) for name, b in graph.net.named_children()] == list(net.named_children())
    assert [b.origin for b in graph.net.children()] == list(net.children())
    for name, block in graph.net.named_modules():
        assert block.name_prefix + block.name == ("net." + name if name else "net")
    prefixed = graph.net.chain.named_modules(prefix="p", remove_duplicate=False)
    assert [name for name, _ in prefixed] == ["p", "p.0", "p.1", "p.2"]
    assert graph.net.get_submodule("part.keys").origin is net.part.keys
    assert graph.net.get_submodule("") is graph.net
    with pytest.raises(AttributeError, match="Net has no attribute `nothing`"):
        graph.net.get_submodule("nothing")


def test_a_block_may_stand_in_another_module(net: Net, graph: Holds) -> None:
    outer = nn.Sequential(graph.net.chain, nn.Tanh())
    x = torch.ones(1, 2)
    assert torch.equal(outer(x), torch.tanh(net.chain(x)))
    assert [name for name, _ in outer.named_modules()] == ["", "0", "0.0", "0.1", "0.2", "1"]
    assert len(list(outer.parameters())) == 4
    outer.eval()
    assert not net.chain.training


def test_dir_and_repr(net: Net, graph: Holds) -> None:
    assert {"config", "origin", "name", "name_prefix", "part", "forward"} <= set(dir(graph.net))
    assert repr(graph.net) == repr(net)


def test_a_models_own_config_is_read_and_set_beside_the_policy() -> None:
    own = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11, n_positions=8, bos_token_id=1, eos_token_id=1)
    model = GPT2LMHeadModel(own)
    graph = Holds(model)
    assert graph.net.config.vocab_size == 11
    assert graph.net.transformer.config.n_layer == 1
    assert graph.net.config.to_dict()["vocab_size"] == 11
    graph.net.config.use_cache = False
    assert own.use_cache is False
    graph.net.config.activation_checkpointing = True
    assert not hasattr(own, "activation_checkpointing")
    assert graph.net.config.activation_checkpointing is True
    assert graph.net.origin.config is own
    assert graph(lambda net: net.config) is own
    with pytest.raises(AttributeError, match=r"net.config has no field 'vocab_sice' · fix: use one of activation"):
        graph.net.config.vocab_sice
    with pytest.raises(ConfigError, match=r"net.vocab_sice: unknown field · fix: use one of"):
        graph.net.config.vocab_sice = 1


def test_a_modules_own_config_is_intact_in_forward() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = SimpleNamespace(scale=3.0, activation_checkpointing="mine")
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            assert type(self.config) is SimpleNamespace
            assert self.config.activation_checkpointing == "mine"
            return self.linear(x) * self.config.scale

    module = Reads()

    class Trains(Holds):
        def build(self, x: Tensor) -> Tensor:
            loss = self.net(x).sum()
            loss.backward()
            return loss

    graph = Trains(module)
    graph.net.config.activation_checkpointing = True
    graph.add_optimizer(torch.optim.SGD(module.parameters(), lr=0.1))
    for _ in range(5):
        graph(torch.ones(1, 2))
    assert [row.reruns for row in graph.explain(show=False).rows if row.rule == "full"] == [1]
    assert module.config.activation_checkpointing == "mine"
    assert graph.net.config.scale == 3.0
