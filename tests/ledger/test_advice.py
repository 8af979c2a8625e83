"""Advice and predictions of `explain()`: the peak does not rise if the advice is followed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.architectures import ARCHITECTURES, Architecture
from helpers.hard_modules import ZOO, chain
from helpers.layer_stacks import stack_of
from helpers.modules import as_module
from helpers.peaks import tracked_peak
from helpers.thinning import slow_unless
from torch import Tensor, nn

import graphckpt
from graphckpt import Segments, Selective, Tiles
from graphckpt.blocks.config import fields_of
from graphckpt.blocks.select import select
from graphckpt.ledger.explanation import Explanation

Step = Callable[[nn.Module], Tensor]


@dataclass
class Case:
    """A model, its step and policies that may deserve advice."""

    build: Callable[[], nn.Module]
    loss: Step
    policies: dict[str, Any]
    optimizer: Callable[..., torch.optim.Optimizer] | None = field(default=torch.optim.AdamW)

    def explain(self, more: dict[str, Any] | None = None, steps: int = 2) -> Explanation:
        model = self.build()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = None if self.optimizer is None else self.optimizer(trained)
        fields: dict[str, dict[str, Any]] = {}  # by block: what is advised may replace a policy on all of its blocks
        for selector, policy in {**self.policies, **(more or {})}.items():
            for name, _ in select(model, selector):
                fields.setdefault(name, {}).update(fields_of(policy))
        with graphckpt.apply(model, fields) as handle:
            for _ in range(steps):
                torch.manual_seed(1)
                with handle.measure():
                    self.loss(model).backward()
                    if optimizer is not None:
                        optimizer.step()
                    model.zero_grad()
            return handle.explain(show=False)


def convolution(channels: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())


@as_module(lambda: {"layers": nn.Sequential(*map(convolution, (3, 8, 8, 8))), "head": nn.Linear(8, 10)})
def Cnn(self: Any, x: Tensor) -> Tensor:
    return self.head(self.layers(x).mean((2, 3)))


@as_module(lambda: {"head": nn.Linear(16, 5000)})
def LossHead(self: Any, hidden: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(self.head(hidden), labels, reduction="sum")


@as_module(lambda: {"layers": chain("mlp", length=4)[1:5], "loss_head": LossHead()})
def WithHead(self: Any, x: Tensor, labels: Tensor) -> Tensor:
    """Layers and a loss over a big vocabulary."""
    return self.loss_head(self.layers(x), labels)


class Adapter(nn.Module):
    """A frozen linear layer with two small ones beside it that train, as LoRA has them."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def architecture(name: str) -> Architecture:
    return next(a for a in ARCHITECTURES if a.name == name)


def lora_llama() -> nn.Module:
    model = architecture("llama").build().requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj, layer.self_attn.v_proj = (
            Adapter(layer.self_attn.q_proj),
            Adapter(layer.self_attn.v_proj),
        )
    return model


def of_architecture(name: str, build: Callable[[], nn.Module] | None = None) -> Case:
    case = architecture(name)
    return Case(build or case.build, lambda model: case.loss(model(**case.inputs())), {case.layers: True})


IMAGES, LABELS = torch.randn(4, 3, 16, 16), torch.arange(4)
TOKENS = torch.randint(0, 5000, (64,), generator=torch.Generator().manual_seed(1))
CASES = {
    "cnn": Case(Cnn, lambda model: F.cross_entropy(model(IMAGES), LABELS), {"layers.*": True}),
    "tiled loss head": Case(
        WithHead,
        lambda model: model(torch.ones(64, 16), TOKENS),
        {"layers.*": True, "loss_head": Tiles(4, reduce="sum")},
    ),
    "segments": Case(lambda: chain("mlp", 9), lambda m: m(torch.ones(99, 16)).sum(), {"": Segments("sqrt")}),
    "whole model": Case(lambda: chain("mlp", 6), lambda m: m(torch.ones(99, 16)).sum(), {"": True}, torch.optim.SGD),
    "joined": Case(
        lambda: chain("mlp", 6), lambda m: m(torch.ones(99, 16)).sum(), {"[14]": True, "[2356]": "joined"}, None
    ),
    "gpt2, first kept": of_architecture("gpt2"),
    "lora llama": of_architecture("llama", lora_llama),
}
for name in ZOO:
    for rule in (True, Selective("matmul")):
        CASES[f"{name} {'full' if rule is True else 'selective'}"] = Case(
            lambda name=name: chain(name), lambda model: model(torch.ones(60, 16)).pow(2).mean(), {"[123]": rule}, None
        )


def followed(warning: str, case: Case) -> dict[str, Any]:
    """Returns the policies that a warning advises."""
    if "set the policy on its layers" in warning:
        return {"": None, **{name: True for name, _ in case.build().named_children()}}
    if "select the layers as blocks" in warning:
        (stages,) = re.findall(r" as blocks: (.*)", warning)
        return {pattern[1:-3]: None for pattern in stages.split(", ")} | {
            pattern[1:-1]: True for pattern in stages.split(", ")
        }
    (names,) = re.findall(r" · fix: graphckpt.apply\(model, .*, exclude=\[(.*)\]\)", warning)
    return {name.strip('"'): False for name in names.split(", ")}


def check(case: Case) -> list[str]:
    explanation = case.explain()
    assert explanation.peak_bytes is not None
    advice = [warning for warning in explanation.warnings if " · fix: " in warning]
    for warning in advice:
        after = case.explain(followed(warning, case))
        assert after.peak_bytes <= explanation.peak_bytes, warning
    return advice


@pytest.mark.parametrize("name", CASES)
def test_no_advice_raises_the_peak(name: str) -> None:
    advice = check(CASES[name])
    if name in ("tiled loss head", "segments", "joined"):
        assert advice == []
    if name in ("cnn", "whole model"):
        assert len(advice) == 1


@pytest.mark.parametrize(
    "name", [pytest.param(a.name, marks=slow_unless(n % 3 == 0)) for n, a in enumerate(ARCHITECTURES[::3])]
)
def test_no_advice_raises_the_peak_of_an_architecture(name: str) -> None:
    case = of_architecture(name)
    check(case)
    case.policies[architecture(name).layers] = "selective"
    check(case)


@pytest.mark.parametrize("holds_cache", [False, True])
def test_the_predicted_plain_peak_counts_a_cache_only_while_the_caller_holds_it(holds_cache: bool) -> None:
    case = of_architecture("gpt2")
    outputs = []  # with the cache

    def loss(model: nn.Module) -> Tensor:
        outputs.clear()
        outputs.append(model(**architecture("gpt2").inputs()))
        return architecture("gpt2").loss(outputs[-1] if holds_cache else outputs.pop())

    case.loss = loss
    plain = replace(case, policies=dict.fromkeys(case.policies, False)).explain()
    assert case.explain().plain_peak_bytes == plain.peak_bytes


class State(nn.Module):
    """A layer that changes what it holds, from call to call."""

    def __init__(self, change: Callable[[nn.Module, Tensor], None], num_rows: int = 999) -> None:
        super().__init__()
        self.change, self.linear, self.seen = change, nn.Linear(16, 16), [torch.zeros(1)]
        self.total = nn.Buffer(torch.zeros(num_rows, 16))

    def forward(self, x: Tensor) -> Tensor:
        self.change(self, x.detach())
        return self.linear(x).tanh()


def edit(layer: nn.Module, x: Tensor) -> None:
    layer.total.add_(1)


def replace_buffer(layer: nn.Module, x: Tensor) -> None:
    layer.total = layer.total + x.mean(0)


def replace_attribute(layer: nn.Module, x: Tensor) -> None:
    layer.last = getattr(layer, "last", 0) + x


def replace_in_list(layer: nn.Module, x: Tensor) -> None:
    layer.seen[0] = layer.seen[0] + x


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()),
    "frozen, input not saved": ZOO["frozen"],
    "spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(16, 16)),
    "large buffer, edited": lambda: State(edit),
    "large buffer, replaced": lambda: State(replace_buffer),
    "small buffer, replaced": lambda: State(replace_buffer, 9),
    "attribute, replaced": lambda: State(replace_attribute),
    "item of a list, replaced": lambda: State(replace_in_list),
}
RULES: dict[str, dict[str, Any]] = {
    "full": {"[0-3]": True},
    "selective": {"[0-3]": "selective"},
    "joined": {"[02]": True, "[13]": "joined"},
    "segments": {"": Segments(2)},
    "halves": {"": Segments("log")},
    "one block": {"": True},
}
WIDE = torch.ones(99, 16)


def two_calls(model: nn.Module) -> Tensor:
    return (model(WIDE) * model(WIDE + 1)).sum()


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.spectral_norm` is deprecated")
@pytest.mark.parametrize("loss", [lambda model: model(WIDE).pow(2).mean(), two_calls], ids=["one call", "two calls"])
@pytest.mark.parametrize("layer", LAYERS)
def test_the_predicted_plain_peak_has_no_copies_for_the_recomputation(layer: str, loss: Step) -> None:
    plain = Case(lambda: stack_of(LAYERS[layer], 4), loss, {})
    for steps in (1, 2):  # a first call copies more
        peak_bytes = plain.explain(steps=steps).peak_bytes
        for rule, policies in RULES.items():
            assert replace(plain, policies=policies).explain(steps=steps).plain_peak_bytes == peak_bytes, (rule, steps)


def test_measuring_keeps_no_buffer_alive_that_the_step_replaces() -> None:
    model = nn.Sequential(State(replace_buffer), State(replace_buffer))
    peak_bytes = tracked_peak(model, lambda: model(WIDE).sum().backward())
    with graphckpt.apply(model, {}) as handle:
        with handle.measure():
            model(WIDE).sum().backward()
        assert handle.explain(show=False).peak_bytes == peak_bytes


def test_the_first_step_that_creates_gradients_and_optimizer_state_gets_no_worse_advice() -> None:
    case = CASES["lora llama"]
    explanation = case.explain(steps=1)
    for warning in explanation.warnings:
        assert case.explain(followed(warning, case), steps=1).peak_bytes <= explanation.peak_bytes
