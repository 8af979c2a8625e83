"""The recomputation is called with the arguments of the original forward: the same objects, classes, aliases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fuzz.layers import D, EditsBuffer
from helpers.contract import assert_same_steps
from helpers.modules import as_module
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import graphckpt
from graphckpt.errors import ConfigError, RecomputeError
from graphckpt.rules import Selective

DISK = {"offload": "disk", "min_elements": 1}
WAYS: dict[str, dict[str, Any]] = {
    "full": {"block": True},
    "selective": {"block": Selective("matmul")},
    "disk": {"block": {"activation_checkpointing": True, **DISK}},
    "contiguous": {"block": {"activation_checkpointing": True, "contiguous": True, "min_elements": 1}},
    "nested": {"": True, "block": True},
    "nested, disk": {"": {"activation_checkpointing": True, **DISK}, "block": Selective("matmul")},
    "joined": {"before": True, "block": "joined"},
}

MakeArguments = Callable[[nn.Module, Tensor], tuple[tuple[Any, ...], dict[str, Any]]]
"""Returns the arguments of the block, of the model and an activation."""

OWN_CALL = [way for way in WAYS if way not in ("joined", "nested")]
"""Those under which the call of the block itself is recomputed, from arguments that are kept."""


@as_module(lambda block, make: {"before": nn.Linear(3, 3), "block": block, "make": make})
def Around(self: Any, x: Tensor) -> Tensor:
    """Calls a block with what ``make`` returns for the activation ``h``."""
    args, kwargs = self.make(self, self.before(x))
    return self.block(*args, **kwargs)


def step(model: nn.Module, steps: int = 2) -> list[Tensor]:
    torch.manual_seed(3)
    found = []
    for number in range(steps):
        model.zero_grad()
        out = model(torch.arange(6.0).view(2, 3) / 7 + number)
        (out * out).sum().backward()
        found += [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        found += [b.clone() for b in model.buffers()]
    return found


def build(block: type[nn.Module], make: MakeArguments) -> nn.Module:
    torch.manual_seed(0)
    return Around(block(), make)


def check(block: type[nn.Module], make: MakeArguments, policies: dict[str, Any]) -> None:
    expected = step(build(block, make))
    model = build(block, make)
    with graphckpt.apply(model, policies):
        found = step(model)
    assert len(found) == len(expected)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


@as_module(lambda: {"linear": nn.Linear(3, 3)})
def Masked(self: Any, h: Tensor, mask: Tensor) -> Tensor:
    """Reads a Python attribute of its arguments."""
    return torch.sin(self.linear(h) * getattr(mask, "factor", 1.0)) * mask * getattr(h, "factor", 1.0)


def with_factor(tensor: Tensor, factor: float) -> Tensor:
    tensor.factor = factor  # type: ignore[attr-defined]
    return tensor


@pytest.mark.parametrize("way", [way for way in WAYS if way != "joined"])
def test_arguments_with_python_attributes_stay_as_they_are(way: str) -> None:
    check(Masked, lambda _, h: ((with_factor(h, 3.0),), {"mask": with_factor(torch.ones(2, 3), -0.5)}), WAYS[way])


class Scaled(Tensor):
    """A subclass whose attribute changes results."""

    scale = 1.0


@as_module(lambda: {"linear": nn.Linear(3, 3)})
def Classes(self: Any, h: Tensor, weight: Tensor, other: Tensor) -> Tensor:
    """Takes other paths for a parameter, for the block's own weight, and for a subclass."""
    if weight is not self.linear.weight or not isinstance(weight, nn.Parameter):
        h = h * 2
    if isinstance(other, Scaled):
        h = h * other.scale
    return F.linear(h, weight).sin() * other.as_subclass(Tensor)


@pytest.mark.parametrize("way", WAYS)
def test_class_and_identity_of_arguments_are_those_of_the_original_forward(way: str) -> None:
    def make(model: nn.Module, h: Tensor) -> tuple[tuple[Tensor, ...], dict[str, object]]:
        other = torch.full((3,), 2.0).as_subclass(Scaled)
        other.scale = 0.25
        return (h, model.block.linear.weight, other), {}

    check(Classes, make, WAYS[way])


def test_an_argument_that_stays_on_the_device_is_the_same_object_in_the_recomputation() -> None:
    seen: list[Tensor] = []

    def function(x: Tensor, y: Tensor) -> Tensor:
        seen.extend((x, y))
        return torch.sin(x * y)

    x, y = torch.ones(3, requires_grad=True) * 2, torch.ones(6)[::2]
    graphckpt.checkpoint(function, x, y).sum().backward()
    assert [seen[2] is x, seen[3] is y] == [True, True]
    assert seen[3]._is_view()


@as_module(lambda: {"linear": nn.Linear(3, 3)})
def Edits(self: Any, rows: Tensor, more: dict[str, list[Tensor]]) -> Tensor:
    """Edits one of two arguments that share memory, and saves both."""
    rows.mul_(2)
    flat = more["flat"][0]
    return self.linear(rows).sin() + flat.sin().reshape(2, 3) * rows.cos()


SHARED = {
    "view of what is edited": lambda h: (h, h.view(6)),
    "what is edited is a view": lambda h: ((base := h * 1.0).view(2, 3), base),
    "detached": lambda h: ((base := h * 1.0), base.detach()),
    "edited through the detached one": lambda h: ((base := h.detach() * 1.0), base.view(6)),
    "data": lambda h: ((base := h * 1.0), base.data),
    "parts of one": lambda h: ((base := torch.cat([h, h + 1]))[:2], base[1:3]),
    "with a step": lambda h: ((base := torch.cat([h, h + 1]).view(3, 4).t().contiguous())[:2, :3], base[:2, :3].t()),
}


@pytest.mark.parametrize("way", OWN_CALL)
@pytest.mark.parametrize("shared", SHARED)
def test_arguments_that_share_memory_are_refused_where_forward_edits_one(shared: str, way: str) -> None:
    def make(_: object, h: Tensor) -> tuple[tuple[Tensor], dict[str, dict[str, object]]]:
        rows, flat = SHARED[shared](h)
        return (rows,), {"more": {"flat": [flat]}}

    model = build(Edits, make)
    plain = step(model)
    with graphckpt.apply(model, WAYS[way]):
        for _ in range(2):
            with pytest.raises(RecomputeError, match=r"modified `rows` or `more\['flat'\]\[0\]` in place"):
                step(model)
    assert all(map(torch.equal, step(model), plain))


def test_arguments_that_share_memory_and_stay_as_they_are() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return x.sin() * y.view_as(x).cos()

    x = torch.arange(6.0, requires_grad=True)
    graphckpt.checkpoint(function, x * 1, x.detach().view(2, 3)).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, x.detach().cos() * x.detach().cos())


def test_arguments_that_share_memory_from_a_later_call_on_are_refused() -> None:
    block = Edits()
    rows = torch.arange(6.0).view(2, 3).requires_grad_() * 0.5
    with graphckpt.apply(block, {"": True}):
        block(rows.clone(), {"flat": [torch.ones(6)]}).square().sum().backward(retain_graph=True)
        with pytest.raises(RecomputeError, match="share memory"):
            block(rows, {"flat": [rows.view(6)]})


@pytest.mark.parametrize("way", OWN_CALL)
def test_an_argument_that_forward_edits_is_as_it_was_in_each_of_two_recomputations(way: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ELU(inplace=True), nn.Linear(3, 3), nn.Tanh()))
    x = torch.linspace(-2, 2, 6).view(2, 3)
    policies = {"1" if name == "block" else name: policy for name, policy in WAYS[way].items()}

    def gradients() -> list[Tensor]:
        loss = (model[1](model[0](x).sin() * 1.0) ** 2).sum()
        return [g for _ in range(2) for g in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)]

    expected = gradients()
    with graphckpt.apply(model, policies):
        assert all(map(torch.equal, gradients(), expected))
        assert all(map(torch.equal, gradients(), expected)), "in a later call"


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda x: x[:, 1:4],
    "rows in the same memory": lambda x: x[:1, :3].expand(2, 3),
}


@as_module(lambda: {"linear": nn.Linear(3, 3)})
def EditsFirstRow(self: Any, x: Tensor) -> Tensor:
    """Edits a row, and with it all that share its memory, and depends on how its argument is laid out."""
    x[0].mul_(1.5)
    return self.linear(x * x.stride(0)).tanh()


@pytest.mark.parametrize("rule", [True, "selective"])
@pytest.mark.parametrize("view", VIEWS)
def test_an_argument_that_forward_edits_has_its_strides_in_the_recomputation(view: str, rule: Any) -> None:
    gradients = []
    for policies in ({}, {"": rule}):
        torch.manual_seed(0)
        model = EditsFirstRow()
        with graphckpt.apply(model, policies, determinism_check="none"):
            for _ in range(2):
                model(VIEWS[view](torch.linspace(-2, 2, 10).view(2, 5))).sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *gradients))


@as_module(lambda: {"linear": nn.Linear(3, 3), "average": nn.Buffer(torch.ones(3))})
def OwnBuffer(self: Any, h: Tensor, average: Tensor) -> Tensor:
    """Is called with its own buffer, which it edits, through the argument and by name."""
    y = self.linear(h * average.clone())
    average.lerp_(y.detach().mean(0), 0.5)
    return y.sin() * self.average.clone()


@as_module(lambda: {"norm": nn.BatchNorm1d(3)})
def ReadsStatistics(self: Any, h: Tensor, mean: Tensor) -> Tensor:
    """Is called with running statistics that BatchNorm moves without a trace in their version."""
    return self.norm(h * (mean + 1)).sin() * (mean + 2)


@pytest.mark.parametrize("way", OWN_CALL)
@pytest.mark.parametrize(
    ("block", "argument"),
    [
        (OwnBuffer, lambda block: block.average),
        (OwnBuffer, lambda block: block.average[:]),
        (ReadsStatistics, lambda block: block.norm.running_mean),
    ],
    ids=["buffer", "view of a buffer", "running statistic"],
)
def test_an_argument_that_is_a_buffer_which_forward_edits_is_refused(
    block: type[nn.Module], argument: Callable[[nn.Module], Tensor], way: str
) -> None:
    model = build(block, lambda model, h: ((h, argument(model.block)), {}))
    with graphckpt.apply(model, WAYS[way]), pytest.raises(RecomputeError, match="share memory"):
        step(model)


@as_module(lambda: {"linear": nn.Linear(3, 3), "act": nn.RReLU()})
def Rrelu(self: Any, h: Tensor) -> Tensor:
    return self.act(self.linear(h) - 1)


RRELU_WAYS = {
    **WAYS,
    "kept, disk": {"block": DISK},
    "kept, contiguous": {"block": {"contiguous": True, "min_elements": 1}},
    "every op kept": {"block": Selective(lambda context, op, *args, **kwargs: True)},
    "rrelu kept": {"block": Selective(["aten.rrelu_with_noise.default"])},
    "excluded": {"block": True, "block.act": False},
    "excluded, disk": {"block": True, "block.act": {"activation_checkpointing": False, **DISK}},
}


@pytest.mark.parametrize("way", RRELU_WAYS)
def test_a_tensor_that_an_op_fills_after_autograd_has_saved_it(way: str) -> None:
    check(Rrelu, lambda _, h: ((h,), {}), RRELU_WAYS[way])


@pytest.mark.parametrize("use_cache", [True, False])
def test_tiles_refuse_an_argument_that_one_slice_changes_for_the_next(use_cache: bool) -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=8, vocab_size=32)).eval()
    ids = torch.arange(8).view(2, 4)
    plain = model(ids, use_cache=use_cache).logits
    with graphckpt.apply(model, {"transformer.h.*": graphckpt.Tiles(2)}):
        if use_cache:
            with pytest.raises(ConfigError, match=r"h\.0: tiles: .* such as a cache of keys · fix: .*use_cache=False"):
                model(ids, use_cache=True)
        else:
            assert torch.allclose(model(ids, use_cache=False).logits, plain, atol=1e-6)


@pytest.mark.parametrize("inner", ["tiles:1", True, "selective"])
def test_a_buffer_with_attributes_that_a_child_edits(inner: bool | str) -> None:
    def make_model() -> nn.Sequential:
        return nn.Sequential(nn.Sequential(nn.Linear(D, D), EditsBuffer()))

    assert [*vars(make_model()[0][1].average)], "an nn.Buffer has attributes"
    assert_same_steps(make_model, {"0": True, "0.1.inner": inner})
