"""Blocks that ``torch.jit`` has compiled, and compiled modules in blocks, train as in the plain step."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphckpt
from graphckpt.blocks import disable_checkpointing
from graphckpt.errors import ConfigError, RecomputeError

D = 8

POLICIES: dict[str, dict[str, Any]] = {
    "full": {"*": True},
    "selective": {"*": "selective"},
    "segments": {"": {"segments": 2}},
    "tiles": {"*": {"tiles": 1}},
    "joined": {"0": True, "[1-9]": "joined"},
    "disk": {"*": {"activation_checkpointing": True, "offload": "disk", "min_elements": 1}},
    "store alone": {"*": {"offload": "disk", "min_elements": 1}},
    "values, to the end": {"*": {"activation_checkpointing": True, "determinism_check": "values", "early_stop": False}},
    "nested": {"": True, "*": "selective"},
}


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(D, 2 * D), nn.BatchNorm1d(2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.norm(self.up(x))))


class Random(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(D, D), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(torch.tanh(self.linear(x)))


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.register_buffer("total", torch.zeros(1))
        self.register_buffer("calls", torch.zeros(1))
        self.num_calls = 0
        self.sizes = [0]

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.sizes.append(x.size(0))
        self.calls = self.calls + 1
        self.total += 2
        return torch.sigmoid(self.linear(x)) * self.total / self.num_calls / len(self.sizes) * self.calls


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        for number in range(x.size(0)):
            x = torch.tanh(self.linear(x)) if number % 2 == 0 else x * torch.sigmoid(x)
        return x


class Contains(nn.Module):
    def __init__(self, inner: nn.Module, *, is_last: bool) -> None:
        super().__init__()
        self.linear, self.inner, self.is_last = nn.Linear(D, D), inner, is_last

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.linear(x)) if self.is_last else self.linear(torch.relu(self.inner(x)))


def script(module: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated")
        return torch.jit.script(module)


def trace(module: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated")
        return torch.jit.trace(module, torch.ones(4, D), check_trace=False)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "with statistics": lambda: script(Normalized()),
    "random": lambda: script(Random()),
    "with state": lambda: script(Counts()),
    "with branches": lambda: script(Branches()),
    "traced": lambda: trace(Branches()),
    "statistics inside": lambda: Contains(script(Normalized()), is_last=False),
    "state inside": lambda: Contains(script(Counts()), is_last=True),
    "random at the end": lambda: Contains(script(Random()), is_last=True),
}


def steps(model: nn.Module, policies: dict[str, Any]) -> Iterator[Any]:
    """Yields what training changes. The two steps that TorchScript takes to optimize its code are plain."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with graphckpt.apply(model, policies):
        for step in range(6):
            x = torch.randn(4, D, requires_grad=True)
            optimizer.zero_grad()
            if step < 2:
                with disable_checkpointing():
                    model(x).square().mean().backward()
            else:
                model(x).square().mean().backward()
            optimizer.step()
            yield from [x.grad, *(p.grad.clone() for p in model.parameters())]
    yield from map(torch.clone, model.buffers())
    for module in model.modules():
        if hasattr(module, "num_calls"):
            yield torch.tensor([module.num_calls, *module.sizes])


def trained(name: str, policies: dict[str, Any]) -> list[Any]:
    torch.manual_seed(0)
    return list(steps(nn.Sequential(BLOCKS[name](), BLOCKS[name]()), policies))


@cache
def trained_plainly(name: str) -> list[Any]:
    trained(name, {})  # the first two steps of a process may round otherwise
    return trained(name, {})


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", BLOCKS)
def test_a_step_is_that_of_the_plain_module(name: str, policy: str) -> None:
    plain, ours = trained_plainly(name), trained(name, POLICIES[policy])
    assert len(ours) == len(plain)
    assert all(map(torch.equal, ours, plain))


def warm(model: nn.Module) -> None:
    with disable_checkpointing():
        for _ in range(2):
            model(torch.ones(4, D, requires_grad=True)).sum().backward()


def test_the_recomputation_is_in_the_mode_of_the_forward() -> None:
    grads = []
    for policies in ({}, {"*": True}):
        torch.manual_seed(0)
        model = nn.Sequential(script(Normalized()), script(Normalized()))
        with graphckpt.apply(model, policies):
            warm(model)
            for _ in range(2):
                model.train()
                loss = model(torch.randn(4, D)).square().mean()
                model.eval()
                model.zero_grad()
                loss.backward()
            assert not model[0].training
        grads.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *grads))


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.register_buffer("table", torch.ones(10_000, D))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.table[: x.size(0)]


@pytest.mark.parametrize("name", ["table", "weight"])
def test_a_modified_tensor_is_an_error(name: str) -> None:
    model = nn.Sequential(script(Large()), nn.Linear(D, D))
    with graphckpt.apply(model, {"0": True}):
        warm(model)
        loss = model(torch.ones(4, D)).sum()
        with torch.no_grad():
            (model[0].table if name == "table" else model[0].linear.weight).add_(1)
        with pytest.raises(RecomputeError, match=f"{name}.*in place.* · fix: "):
            loss.backward()


def test_a_step_that_torchscript_optimizes_in_between_is_an_error_that_says_so() -> None:
    model = nn.Sequential(script(Branches()), script(Branches()))

    def run_three_steps() -> None:
        for _ in range(3):
            model(torch.randn(4, D)).sum().backward()

    with (
        graphckpt.apply(model, {"*": True}),
        pytest.raises(RecomputeError, match=r"torch\.jit.*disable_checkpointing"),
    ):
        run_three_steps()


def test_a_child_of_a_scripted_module_has_no_policy() -> None:
    model = nn.Sequential(script(nn.Sequential(Branches(), Branches())))
    with pytest.raises(
        ConfigError, match=r"0\.1: expected a module that Python calls, got .* · fix: set the policy on"
    ):
        graphckpt.apply(model, {"0.1": True})
    with graphckpt.apply(model, {"0": True}):
        warm(model)
        model(torch.ones(4, D, requires_grad=True)).sum().backward()


def test_a_scripted_block_is_not_planned() -> None:
    model = nn.Sequential(script(Branches()), script(Branches()))

    def step() -> None:
        model(torch.ones(4, D)).sum().backward()

    with pytest.raises(ConfigError, match=r"0: expected a block that is not scripted or traced · fix: "):
        graphckpt.plan(model, step, memory_budget="max", select="*")


def test_the_forward_is_that_of_the_module_after_remove() -> None:
    for make in (script, trace):
        module = make(Branches())
        x = torch.randn(4, D)
        expected = module(x)
        with graphckpt.apply(module, {"": True}):
            assert torch.equal(module(x), expected)
        assert torch.equal(module(x), expected)
        assert torch.equal(copy.deepcopy(module)(x), expected)
