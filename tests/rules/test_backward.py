"""Any backward: several forwards, retained graphs, partial and double backward, other threads, other parameters."""

from __future__ import annotations

import copy
import gc
import io
import threading
import weakref
from typing import Any

import pytest
import torch
from helpers.hard_modules import chain
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
}


@pytest.fixture(params=RULES)
def rules(request: pytest.FixtureRequest) -> dict[str, Any]:
    return RULES[request.param]


def both(rules: dict[str, Any], act: Any) -> None:
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


def test_several_forwards_before_one_backward(rules: dict[str, Any]) -> None:
    def act(model: nn.Module) -> list[torch.Tensor]:
        losses = [model(torch.randn(6, 16)).sum() for _ in range(3)]
        (losses[2] + losses[0] * losses[1]).backward()
        return grads(model)

    both(rules, act)


def test_backwards_in_another_order_than_forwards(rules: dict[str, Any]) -> None:
    def act(model: nn.Module) -> list[torch.Tensor]:
        first, second = (model(torch.randn(6, 16)).sum() for _ in range(2))
        first.backward()
        second.backward()
        return grads(model)

    both(rules, act)


def test_retain_graph(rules: dict[str, Any]) -> None:
    def act(model: nn.Module) -> list[torch.Tensor]:
        loss = model(torch.randn(6, 16)).sum()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        return grads(model)

    both(rules, act)


def test_second_backward_without_retain_graph_fails_as_always(rules: dict[str, Any]) -> None:
    model = chain("mlp")
    with graphckpt.apply(model, rules):
        loss = model(torch.randn(6, 16)).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


def test_autograd_grad_of_some_inputs(rules: dict[str, Any]) -> None:
    def act(model: nn.Module) -> list[torch.Tensor]:
        x = torch.randn(6, 16, requires_grad=True)
        out = model(x)
        wanted = [model[2].up.weight, x]
        first = torch.autograd.grad(out.sum(), wanted, retain_graph=True)
        rest = torch.autograd.grad((out * out).sum(), list(model.parameters()))
        return [*first, *rest]

    both(rules, act)


def test_double_backward(rules: dict[str, Any]) -> None:
    def act(model: nn.Module) -> list[torch.Tensor]:
        x = torch.randn(6, 16, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
        slope.pow(2).sum().backward()
        return [slope.detach(), x.grad, *grads(model)]

    both(rules, act)


def test_unused_outputs_and_detached_parts(rules: dict[str, Any]) -> None:
    def act(model: nn.Module) -> list[torch.Tensor]:
        out = model(torch.randn(6, 16))
        unused = out.exp()
        loss = out[:, 0].sum() + out.detach().sum()
        del unused
        loss.backward()
        return grads(model)

    both(rules, act)


def test_eval_between_forward_and_backward(rules: dict[str, Any]) -> None:
    """The recomputation drops what the original forward dropped, whatever the mode is by then."""

    def act(model: nn.Module) -> list[torch.Tensor]:
        loss = model(torch.randn(6, 16)).sum()
        model.eval()
        with torch.no_grad():
            model(torch.randn(6, 16))
        loss.backward()
        assert not any(m.training for m in model.modules())
        model.train()
        model(torch.randn(6, 16)).sum().backward()
        return [*grads(model), torch.get_rng_state()]

    both(rules, act)


def test_functional_call_puts_other_parameters_in_place(rules: dict[str, Any]) -> None:
    def act(model: nn.Module) -> list[torch.Tensor]:
        other = {name: (p.detach() * 2).requires_grad_() for name, p in model.named_parameters()}
        torch.func.functional_call(model, other, (torch.randn(6, 16),)).sum().backward()
        return [p.grad for p in other.values()]

    both(rules, act)


def test_hooks_on_tensors_and_modules_fire_as_ever(rules: dict[str, Any]) -> None:
    def act(model: nn.Module) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        model[2].register_full_backward_hook(lambda _m, _gin, gout: seen.append(gout[0].clone()))
        out = model(torch.randn(6, 16))
        out.register_hook(lambda grad: grad * 2)
        out.sum().backward()
        return [*seen, *grads(model)]

    both(rules, act)


def test_backward_in_another_thread(rules: dict[str, Any]) -> None:
    def act(model: nn.Module) -> list[torch.Tensor]:
        loss = model(torch.randn(6, 16)).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        return grads(model)

    both(rules, act)


def test_save_on_cpu_around_it_sees_what_is_kept(rules: dict[str, Any]) -> None:
    packed = []

    def act(model: nn.Module) -> list[torch.Tensor]:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            packed.append(tensor)
            return tensor.detach().clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(torch.randn(6, 16)).sum()
        loss.backward()
        return grads(model)

    both(rules, act)
    assert packed


def test_inside_of_torchs_own_checkpoint(rules: dict[str, Any]) -> None:
    def act(model: nn.Module) -> list[torch.Tensor]:
        out = torch.utils.checkpoint.checkpoint(model, torch.randn(6, 16), use_reentrant=False)
        out.sum().backward()
        return grads(model)

    both(rules, act)


def test_copies_and_pickles_follow_their_own_module(rules: dict[str, Any]) -> None:
    def act(model: nn.Module) -> list[torch.Tensor]:
        twin = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()  # a copy that called the original's forward would show it
        found = []
        for other in (twin, loaded):
            torch.manual_seed(3)
            other(torch.randn(6, 16)).sum().backward()
            found += grads(other)
        assert grads(model) == []
        return found

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


def test_ddp(tmp_path: Any, rules: dict[str, Any]) -> None:
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
