"""Any backward: several forwards, retained graphs, partial and double backward, other threads, other parameters."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz.bench import differing
from fuzz.shapes import SHAPES
from helpers.contract import seen_in
from helpers.hard_modules import D, chain
from torch import nn

import graphckpt
from graphckpt import Segments, Selective

RULES: dict[str, Any] = {
    "full": {"[123]": True},
    "selective": {"[123]": Selective("matmul")},
    "holes": {"[123]": True, "[123].down": False},
    "segments": {"": Segments(2)},
    "log": {"": Segments("log")},
    "nested": {"": True, "[123]": Selective("matmul")},
    "joined": {"1": True, "[23]": "joined"},
    "joined after selective": {"1": Selective("matmul"), "[23]": "joined"},
}


@pytest.fixture(params=RULES)
def rules(request: pytest.FixtureRequest) -> dict[str, bool | Selective]:
    return RULES[request.param]


def wide() -> nn.Sequential:
    return nn.Sequential(*chain("mlp")[:-1], nn.Linear(D, D))


@functools.cache
def plain_steps(shape: str) -> dict[str, Any]:
    return seen_in(wide, None, [shape] * 2)


@pytest.mark.parametrize("shape", SHAPES)
def test_any_backward(rules: dict[str, Any], shape: str) -> None:
    """Several forwards, retained graphs, partial and double backward, errors, threads: all shapes of steps."""
    assert differing(seen_in(wide, rules, [shape] * 2), plain_steps(shape)) == []


def both(rules: dict[str, Any], act: Callable[[nn.Module], list[torch.Tensor]]) -> None:
    """Runs ``act(model)`` on a plain chain and on one with the rules; every tensor that it returns must be equal."""
    results = []
    for policy in ({}, rules):
        model = chain("mlp")
        torch.manual_seed(7)
        with graphckpt.apply(model, policy):
            results.append(act(model))
    plain, ours = results
    assert len(plain) == len(ours) > 0
    for a, b in zip(plain, ours, strict=True):
        assert torch.equal(a, b)


def grads(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_second_backward_without_retain_graph_fails_as_always(rules: dict[str, Any]) -> None:
    model = chain("mlp")
    with graphckpt.apply(model, rules):
        loss = model(torch.randn(6, 16)).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


def test_hooks_on_tensors_and_modules_fire_as_ever(rules: dict[str, Any]) -> None:
    def act(model: nn.Module) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        model[2].register_full_backward_hook(lambda _m, _gin, gout: seen.append(gout[0].clone()))
        out = model(torch.randn(6, 16))
        out.register_hook(lambda grad: grad * 2)
        out.sum().backward()
        return [*seen, *grads(model)]

    both(rules, act)


def test_modes_that_change_before_backward_are_those_of_the_forward(rules: dict[str, Any]) -> None:
    def act(model: nn.Module) -> list[torch.Tensor]:
        loss = model(torch.randn(6, 16)).sum()
        model.eval()
        loss.backward()
        return grads(model)

    both(rules, act)


def test_inside_of_torchs_own_checkpoint(rules: dict[str, Any]) -> None:
    def act(model: nn.Module) -> list[torch.Tensor]:
        out = torch.utils.checkpoint.checkpoint(model, torch.randn(6, 16), use_reentrant=False)
        out.sum().backward()
        return grads(model)

    both(rules, act)


def test_a_deleted_model_is_freed_at_once() -> None:
    model = chain("mlp")
    graphckpt.apply(model, {"[123]": True})
    model(torch.randn(6, 16)).sum().backward()
    weight = weakref.ref(model[1].up.weight)
    gc.collect()
    gc.disable()
    try:
        del model
        assert weight() is None
    finally:
        gc.enable()


def test_ddp(tmp_path: Path, rules: dict[str, Any]) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:

        def act(model: nn.Module) -> list[torch.Tensor]:
            parallel = nn.parallel.DistributedDataParallel(model)
            for _ in range(2):
                parallel(torch.randn(6, 16)).sum().backward()
            return grads(model)

        both(rules, act)
    finally:
        torch.distributed.destroy_process_group()
