"""Which modules of a model are its layers, where nobody has marked them, and which of them a policy can act on."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from helpers.layer_stacks import stack_of
from torch import Tensor, nn

import graphckpt
from graphckpt import ConfigError, PlanError
from graphckpt.blocks.select import layers
from graphckpt.planning.plan_step import find_blocks


def lines(*widths: int) -> list[nn.Module]:
    return [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inside(x)


class Mixer(Block):
    """A layer of another class and size."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 8)


class Stack(nn.ModuleList):
    """A list with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


class Branches(nn.ModuleDict):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([branch(x).sigmoid() for branch in self.values()]).sum(0)


class Residual(nn.Module):
    """A layer of two parts in a list, which it calls one after the other, as x-transformers does."""

    def __init__(self, items: Callable[[], Iterable[nn.Module]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(items())

    def forward(self, x: Tensor) -> Tensor:
        for norm, part in self.layers:
            x = x + part(norm(x))
        return x


class Unet(nn.Module):
    """Stages with flagged lists, of which one level has no attention, and attention that has a flagged list itself."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gradient_checkpointing = False
            self.norm = nn.LayerNorm(8)
            self.blocks = nn.ModuleList([Block()])

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[0](self.norm(x))

    class Stage(nn.Module):
        def __init__(self, attention: nn.Module | None) -> None:
            super().__init__()
            self.gradient_checkpointing = False
            self.resnets = nn.ModuleList([Block()])
            self.attentions = nn.ModuleList([attention])

        def forward(self, x: Tensor) -> Tensor:
            x = self.resnets[0](x)
            return x if self.attentions[0] is None else self.attentions[0](x)

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([self.Stage(self.Attention()), self.Stage(None)])

    def forward(self, x: Tensor) -> Tensor:
        return self.stages[1](self.stages[0](x))


def dense_net() -> nn.Module:
    parts: dict[str, nn.Module] = {"stem": nn.Linear(8, 8), "norm": nn.LayerNorm(8)}
    for n in range(2):
        parts |= {f"dense{n}": Branches({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}), f"transition{n}": Mixer()}
    return nn.Sequential(OrderedDict(parts))


def twins() -> nn.Module:
    shared = stack_of(Block, 2)
    return nn.ModuleDict({"first": shared, "second": nn.Sequential(*shared)})


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.ModuleDict({"blocks": nn.ModuleList(Block() for _ in range(4))}), [f"blocks.{n}" for n in range(4)]),
        (nn.Sequential(nn.Linear(2, 8), nn.Sequential(Block(), Block()), nn.Linear(8, 2)), ["1.0", "1.1"]),
        (nn.Sequential(*lines(8, 8, 8, 8), nn.ReLU()), ["0", "1", "2"]),
        (nn.Linear(2, 2), []),
        (nn.ModuleDict({"layers": nn.ModuleDict({"2": Block(), "5": Block()})}), ["layers.2", "layers.5"]),
        (nn.ModuleDict({"left": nn.Linear(2, 2), "right": nn.Linear(2, 2)}), []),
        (
            nn.ModuleList(stack_of(partial(Block, w), n) for w, n in ((4, 2), (8, 3), (16, 2))),
            ["0.0", "0.1", "1.0", "1.1", "1.2", "2.0", "2.1"],
        ),
        (nn.ModuleList([Mixer(), Block(), Mixer(), Block()]), ["0", "1", "2", "3"]),
        (nn.Sequential(Mixer(), Block(), Stack([Block()]), Mixer(), Block()), ["0", "1", "2", "3", "4"]),
        (nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8)), []),
        (dense_net(), ["dense0", "transition0", "dense1", "transition1"]),
        (Residual(lambda: (nn.ModuleList([nn.LayerNorm(8), Block()]) for _ in range(2))), ["layers.0.1", "layers.1.1"]),
        (
            nn.ModuleList(nn.ModuleDict({"attn": Block(), "mlp": Mixer()}) for _ in range(2)),
            ["0.attn", "0.mlp", "1.attn", "1.mlp"],
        ),
        (nn.ModuleList(nn.ParameterList([torch.ones(2)]) for _ in range(2)), []),
        (nn.ModuleList([Block(), None, Block()]), ["0", "2"]),
        (nn.ModuleList([Stack([Block(), Block()]), Stack([Block(), Block()])]), ["0", "1"]),
        (Unet(), ["stages.0.resnets.0", "stages.0.attentions.0.blocks.0", "stages.1.resnets.0"]),
        (twins(), ["first.0", "first.1"]),
    ],
    ids=[
        "blocks with stacks in them", "between a first and a last", "plain", "none", "numbers as keys", "names as keys",
        "stages", "alternating", "alternating with one of a kind", "products and norms", "dense blocks",
        "parts in lists", "parts in dicts", "lists of weights", "with None", "lists with a forward", "nested flags",
        "shared",
    ],
)  # fmt: skip
def test_layers_are_found(model: nn.Module, expected: list[str]) -> None:
    assert layers(model) == expected


def test_a_resnet_is_cut_at_its_bottlenecks() -> None:
    config = transformers.ResNetConfig(depths=[3, 4, 6, 3], hidden_sizes=[8, 16, 32, 64], embedding_size=8)
    found = layers(transformers.ResNetForImageClassification(config))
    assert len(found) == 16
    assert found[0] == "resnet.encoder.stages.0.layers.0"


class Net(nn.Module):
    """Containers with a forward of their own, called as blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack(nn.Linear(8, 8) for _ in range(3))
        self.branches = Branches({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
        self.stages = nn.ModuleList([Stack([Block(), Block()]) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.branches(self.stack(x))
        for stage in self.stages:
            x = stage(x)
        return x


def gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    model(torch.linspace(-1, 1, 32).view(4, 8)).square().mean().backward()
    return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


@pytest.mark.parametrize(
    ("build", "policies", "blocks"),
    [
        (Net, {"stack": True}, ["stack"]),
        (Net, {"branches": "selective"}, ["branches"]),
        (Net, {"branches": True, "branches.a": False}, ["branches"]),
        (Net, {"stages.*": {"activation_checkpointing": True, "offload": "disk"}}, ["stages.0", "stages.1"]),
        (Net, Stack, ["stack", "stages.0", "stages.1"]),
        (Net, ["branches", "stages.1"], ["branches", "stages.1"]),
        (Net, True, ["stack.0", "stack.1", "stack.2", "stages.0", "stages.1"]),
        (lambda: nn.Sequential(Mixer(), Block(), Mixer(), Block()), True, ["0", "1", "2", "3"]),
        (dense_net, True, ["dense0", "transition0", "dense1", "transition1"]),
        (Unet, True, ["stages.0.resnets.0", "stages.0.attentions.0.blocks.0", "stages.1.resnets.0"]),
        (
            lambda: Residual(lambda: (nn.ModuleList([nn.LayerNorm(8), Block()]) for _ in range(2))),
            True,
            ["layers.0.1", "layers.1.1"],
        ),
    ],
)
def test_blocks_are_recomputed_once_with_the_gradients_of_the_plain_step(
    build: Callable[[], nn.Module], policies: Any, blocks: list[str]
) -> None:
    model = build()
    plain = gradients(model)
    with graphckpt.apply(model, policies) as handle:
        assert all(map(torch.equal, gradients(model), plain))
    assert {row.block: row.reruns for row in handle.explain(show=False).rows if row.reruns} == dict.fromkeys(blocks, 1)


def test_a_list_with_a_forward_is_one_block_and_one_without_stands_for_its_items() -> None:
    model = Net()
    for policies, exclude, expected in [
        (model.stack, (), "full: stack)"),
        (model.stages, (), "full: stages.0-1 (2x))"),
        (["stack", "stages.*"], model.stack, "full: stages.0-1 (2x))"),
    ]:
        with graphckpt.apply(model, policies, exclude=exclude) as handle:
            assert repr(handle).endswith(expected)


@pytest.mark.parametrize("key", ["block[0]", "re:block", "a*?"])
def test_names_with_characters_of_patterns_are_names_first(key: str) -> None:
    model = nn.ModuleDict({key: stack_of(Block, 2), "b": nn.Linear(8, 8)})
    assert repr(graphckpt.apply(model, True)) == f"Handle(ModuleDict; full: {key}.0-1 (2x))"


def test_layers_that_are_reached_by_two_names_get_one_policy() -> None:
    assert repr(graphckpt.apply(twins(), True)) == "Handle(ModuleDict; full: first.0-1 (2x))"


def test_a_model_all_of_whose_items_lack_a_forward_says_how_to_select() -> None:
    weights = nn.ModuleList(nn.ParameterList([torch.ones(2)]) for _ in range(2))
    with pytest.raises(ConfigError, match=r"^apply: no list of layers was found in ModuleList · fix: name the blocks"):
        graphckpt.apply(weights, True)


def test_nested_layers_are_planned() -> None:
    model = Unet()
    plan = graphckpt.plan(model, lambda: gradients(model), memory_budget="min")
    assert {row.block for row in plan.rows} == set(layers(model))


def test_planning_a_list_without_a_forward_says_how_to_select_its_items() -> None:
    model = Net()
    with pytest.raises(ConfigError, match=r"^select: 'stages': ModuleList has no forward.*use 'stages\.\*'$"):
        graphckpt.plan(model, lambda: gradients(model), memory_budget="min", select="stages")


@pytest.mark.parametrize(("select", "expected"), [(["second.1"], ["first.1"]), (["first", "second.*"], ["first"])])
def test_planned_blocks_are_found_by_any_of_their_names_and_none_is_in_another(
    select: list[str], expected: list[str]
) -> None:
    assert [name for name, _ in find_blocks(twins(), select)] == expected


def test_a_plan_of_blocks_that_call_each_other_names_them() -> None:
    class Calling(Block):
        def forward(self, x: Tensor) -> Tensor:
            return self.others[0](super().forward(x))

    model = stack_of(Block, 3)
    model[0] = Calling()
    model[0].others = (model[1],)  # no child
    model.forward = lambda x: model[2](model[0](x))
    with pytest.raises(PlanError, match=r"^0: expected blocks that do not call each other, but it calls 1 · fix: sel"):
        graphckpt.plan(model, lambda: gradients(model), memory_budget="min")
