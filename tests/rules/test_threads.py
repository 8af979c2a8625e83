"""Threads that draw from one generator while a block runs or is recomputed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, repeat
from typing import Any

import pytest
import torch
from helpers.modules import as_module
from torch import Tensor, nn

import graphckpt

D = 8
POLICIES: dict[str, dict[str, Any]] = {
    "full": {"0": True},
    "selective": {"0": "selective"},
    "selective by a function": {"0": graphckpt.Selective(lambda context, op, *args, **kwargs: False)},
    "disk": {"0": {"activation_checkpointing": True, "offload": "disk", "min_elements": 1}},
}


def in_another_thread(function: Callable[[], Any]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


@contextmanager
def idle_thread() -> Iterator[None]:
    """A thread beside this one, as a progress bar has it."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


@as_module(lambda: {"linear": nn.Linear(D, D), "meanwhile": [lambda: None]})
def Drops(self: Any, x: Tensor) -> Tensor:
    x = self.linear(x)
    self.meanwhile[0]()
    return nn.functional.dropout(x, 0.5).sin()


@as_module(lambda: {"linear": nn.Linear(D, D), "meanwhile": [lambda: None]})
def DrawsNothing(self: Any, x: Tensor) -> Tensor:
    x = self.linear(x)
    self.meanwhile[0]()
    return x.sin()


@as_module(lambda: {"linear": nn.Linear(D, D), "meanwhile": [lambda: None]})
def DrawsLast(self: Any, x: Tensor) -> Tensor:
    """The last op that autograd saves something for comes before the draw of the noise."""
    x = self.linear(x).sin()
    return x + torch.rand(D)


def gradients(
    kind: type[nn.Module], policies: dict[str, Any], meanwhile: Callable[[], Any], steps: int
) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(kind(), nn.Linear(D, D))
    with graphckpt.apply(model, policies):
        for step in range(steps):
            torch.manual_seed(step)
            model[0].meanwhile = [lambda: None if torch._C._current_graph_task_id() >= 0 else meanwhile()]
            model(torch.ones(6, D)).square().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("policies", POLICIES.values(), ids=POLICIES)
def test_numbers_that_another_thread_draws_during_a_call(policies: dict[str, Any]) -> None:
    draw = lambda: in_another_thread(lambda: torch.rand(3))  # noqa: E731
    with idle_thread(), pytest.raises(graphckpt.RecomputeError, match=r"^0: .* another thread draws .* fix: "):
        gradients(Drops, policies, draw, 1)


def test_numbers_that_another_thread_draws_during_a_recomputation() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Drops(), nn.Linear(D, D))
    draws = chain([lambda: None], repeat(lambda: torch.rand(3)))
    model[0].meanwhile = [lambda: in_another_thread(next(draws))]
    with graphckpt.apply(model, {"0": True}), idle_thread():
        loss = model(torch.ones(6, D)).sum()
        with pytest.raises(graphckpt.RecomputeError, match="another thread draws"):
            loss.backward()


def test_as_many_numbers_that_another_thread_draws_during_a_call_and_its_recomputation() -> None:
    """The states at the end are equal then, though the numbers are not."""
    other = nn.Sequential(Drops())
    graphckpt.apply(other, {"0": True})
    steps = iter(["before", "after"])

    @as_module(lambda: {"linear": nn.Linear(D, D)})
    def DrawsBetween(self: Any, x: Tensor) -> Tensor:
        step = next(steps, "")
        x = self.linear(x)
        if step == "before":
            in_another_thread(lambda: other(torch.ones(6, D)))
        y = nn.functional.dropout(x, 0.5).sin()
        if step == "after":
            in_another_thread(lambda: other(torch.ones(6, D)))
        return y.cos()

    model = nn.Sequential(DrawsBetween(), nn.Linear(D, D))
    with graphckpt.apply(model, {"0": True}, determinism_check="none"), idle_thread():
        loss = model(torch.ones(6, D)).sum()
        with pytest.raises(graphckpt.RecomputeError, match="another thread draws"):
            loss.backward()


@pytest.mark.parametrize("policies", POLICIES.values(), ids=POLICIES)
def test_a_block_that_draws_nothing_beside_a_thread_that_draws(policies: dict[str, Any]) -> None:
    def draw() -> None:
        in_another_thread(lambda: torch.rand(3))

    with idle_thread():
        found = gradients(DrawsNothing, policies, draw, 3)
    assert all(map(torch.equal, found, gradients(DrawsNothing, {}, draw, 3)))


@pytest.mark.parametrize("policies", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("kind", [Drops, DrawsLast])
def test_a_block_that_draws_beside_a_thread_that_does_not(kind: type[nn.Module], policies: dict[str, Any]) -> None:
    with idle_thread():
        found = gradients(kind, policies, lambda: None, 5)
    assert all(map(torch.equal, found, gradients(kind, {}, lambda: None, 5)))


@as_module(lambda: {"linear": nn.Linear(D, D), "last": nn.Linear(D, D)})
def DrawsForTheSecondBackward(self: Any, x: Tensor) -> Tensor:
    """The first backward, through ``x + ...`` alone, needs nothing of what comes after the first draw."""
    x = nn.functional.dropout(self.linear(x), 0.5).sin()
    with torch.no_grad():
        noise = torch.rand_like(x)
    return self.last(x.detach()) * noise + x


@pytest.mark.parametrize("policies", POLICIES.values(), ids=POLICIES)
def test_a_first_backward_that_ends_before_the_last_draw(policies: dict[str, Any]) -> None:
    def penalized(policies: dict[str, Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(DrawsForTheSecondBackward(), nn.Linear(D, D))
        with graphckpt.apply(model, policies):
            for step in range(4):
                torch.manual_seed(step)
                x = torch.ones(6, D, requires_grad=True)
                y = model(x)
                (slope,) = torch.autograd.grad(y.tanh().sum(), x, create_graph=True)
                (y.square().mean() + slope.square().sum()).backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    with idle_thread():
        found = penalized(policies)
    assert all(map(torch.equal, found, penalized({})))


def test_a_backward_in_another_thread() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Drops(), nn.Linear(D, D))
    with graphckpt.apply(model, {"0": True}), idle_thread(), ThreadPoolExecutor(1) as pool:
        y = model(torch.ones(6, D))
        pool.submit(y.sum().backward).result()
