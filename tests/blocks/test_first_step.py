"""The record of the first step after `apply`: no module has a hook outside of the forward, and copies have no part."""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.layer_stacks import residual_layers
from torch import Tensor, nn

import graphckpt

# Legend: N rows, D width
N, D = 8, 16


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, D), residual_layers(3, D, dropout=None), nn.Linear(D, 4))


def step(model: nn.Module, x_ND: Tensor) -> list[Tensor | None]:
    model.zero_grad()
    model(x_ND).square().mean().backward()
    return [p.grad for p in model.parameters()]


def hooks_of(model: nn.Module) -> list[Callable[..., object]]:
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return [hook for module in model.modules() for kind in kinds for hook in getattr(module, kind).values()]


@pytest.fixture
def x_ND(device: str) -> Tensor:
    return torch.randn(N, D, device=device, generator=torch.Generator(device).manual_seed(0), requires_grad=True)


POLICIES: dict[str, Any] = {
    "layers": {"1.*": True},
    "the model": {"": True},
    "selective": {"1.*": "selective"},
    "nothing": {"1.*": False},
}


@pytest.mark.parametrize("policies", POLICIES.values(), ids=list(POLICIES))
def test_no_module_has_a_hook_outside_of_the_forward(policies: dict[str, Any]) -> None:
    model, x_ND = stack(), torch.randn(N, D)
    with graphckpt.apply(model, policies) as handle:
        assert hooks_of(model) == []
        assert list(inspect.signature(model.forward).parameters) == ["input"]
        loss = model(x_ND).square().mean()
        assert hooks_of(model) == []
        loss.backward()
        assert hooks_of(model) == []
        table = str(handle.explain(show=False))
        model(x_ND)
        assert str(handle.explain(show=False)) == table, "the record has ended"
        assert ("forward" in vars(model)) == ("" in policies)
    assert "forward" not in vars(model)


@pytest.mark.parametrize("steps_before", [0, 1, 2])
@pytest.mark.parametrize("num_warmup_iters", [1, 3])
@pytest.mark.parametrize("policy", [True, "selective", {"activation_checkpointing": True, "contiguous": True}])
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
def test_graphed_callables(
    policy: bool | str | dict[str, bool], num_warmup_iters: int, steps_before: int, x_ND: Tensor
) -> None:
    plain = step(stack().cuda(), x_ND)
    for names in (("",), ("1.0", "1.1")):
        model = stack().cuda()
        handle = graphckpt.apply(model, {"1.*": policy})
        for _ in range(steps_before):
            step(model, x_ND)
        model.zero_grad()
        modules = tuple(map(model.get_submodule, names))
        samples = tuple((torch.randn_like(x_ND).requires_grad_(),) for _ in names)
        torch.cuda.make_graphed_callables(modules, samples, num_warmup_iters=num_warmup_iters)
        for _ in range(2):
            ours = step(model, x_ND)
            assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))  # type: ignore[arg-type]
        reruns = sum(row.reruns for row in handle.explain(show=False).rows)
        assert reruns >= (3 if steps_before or names == ("",) else 1)


@pytest.mark.gpu
def test_a_first_step_within_a_capture(x_ND: Tensor) -> None:
    model = stack().cuda()
    handle = graphckpt.apply(model, {"1.*": True})
    with torch.no_grad():
        model(x_ND)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        model(x_ND).square().mean().backward()
    assert sum(row.reruns for row in handle.explain(show=False).rows) == 3


def by_deepcopy(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def by_file(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    twin: nn.Module = torch.load(file, weights_only=False)
    return twin


@pytest.mark.parametrize("policies", POLICIES.values(), ids=list(POLICIES))
@pytest.mark.parametrize("copied", [by_deepcopy, by_file])
def test_a_copy_has_no_part_in_the_record(copied: Callable[[nn.Module], nn.Module], policies: dict[str, Any]) -> None:
    plain, x_ND = stack(), torch.randn(N, D)
    expected = step(plain, x_ND)
    model = stack()
    with graphckpt.apply(model, policies) as handle:
        for twin in copies_in_a_step(model, x_ND, copied):
            assert all(torch.equal(a, b) for a, b in zip(step(twin, x_ND), expected, strict=True))  # type: ignore[arg-type]
            graphckpt.remove(twin)
            assert "forward" not in vars(twin)
        reruns = sum(row.reruns for row in handle.explain(show=False).rows)
        assert reruns == {"layers": 3, "the model": 1, "selective": 3, "nothing": 0}[name_of(policies)]
        with handle.measure():
            twins = list(copies_in_a_step(model, x_ND, copied))
        assert sum(row.reruns for row in handle.explain(show=False).rows) == reruns
        for twin in twins:
            step(twin, x_ND)
    assert hooks_of(model) == []


def name_of(policies: dict[str, Any]) -> str:
    return next(name for name, each in POLICIES.items() if each is policies)


def copies_in_a_step(model: nn.Module, x_ND: Tensor, copied: Callable[[nn.Module], nn.Module]) -> Iterator[nn.Module]:
    yield copied(model)
    loss = model(x_ND).square().mean()
    yield copied(model)
    loss.backward()
    model.zero_grad()
    yield copied(model)


def test_nothing_of_the_record_is_left_without_the_handle() -> None:
    model = stack()
    graphckpt.apply(model, {"1.*": True})
    assert "forward" not in vars(model)
    one, other = graphckpt.apply(model, {"0": True}), graphckpt.apply(model, {"2": True})
    step(model, torch.randn(N, D))
    for handle, name in ((one, "0"), (other, "2")):
        assert next(row for row in handle.explain(show=False).rows if row.block == name).reruns == 1
    model(torch.randn(N, D))
    assert "forward" not in vars(model)


def test_another_wrapper_over_the_record_stays() -> None:
    model, x_ND = stack(), torch.randn(N, D)
    handle = graphckpt.apply(model, {"1.*": True})
    forward, calls = model.forward, []

    def counted(*args: Any) -> Tensor:
        calls.append(1)
        return forward(*args)

    model.forward = counted  # type: ignore[method-assign]
    for _ in range(3):
        step(model, x_ND)
    assert len(calls) == 3
    assert sum(row.reruns for row in handle.explain(show=False).rows) == 3
    handle.remove()
    assert vars(model)["forward"] is counted
    assert all(torch.equal(a, b) for a, b in zip(step(model, x_ND), step(stack(), x_ND), strict=True))  # type: ignore[arg-type]


def test_a_forward_whose_module_is_gone() -> None:
    model = stack()
    graphckpt.apply(model, {"1.*": True})
    forward = model[1][0].forward  # type: ignore[index]
    model[1] = nn.Identity()
    with pytest.raises(graphckpt.ConfigError, match="the module is deleted · fix: call the module itself"):
        forward(torch.randn(N, D))
