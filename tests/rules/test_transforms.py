"""Blocks within transforms of `torch.func` and forward-mode AD: they run as they are, and nothing ends the process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers.layer_stacks import residual_layers
from helpers.modules import as_module
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

import graphckpt
from graphckpt import Segments, Selective, Tiles

# forward-mode AD loads decompositions of its own by `torch.jit.script`
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

# Legend: N rows, D width
D = 16
RULES: dict[str, dict[str, Any]] = {
    "keep": {"[01]": False},
    "full": {"[01]": True},
    "selective": {"[01]": Selective("matmul")},
    "segments": {"": Segments(2)},
    "tiles": {"[01]": Tiles(2)},
    "joined": {"0": True, "1": "joined"},
    "excluded children": {"[01]": True, "[01].down": False},
}
STORES: dict[str, dict[str, Any]] = {
    "device": {},
    "disk": {"offload": "disk", "min_elements": 1},
    "slab": {"contiguous": True, "min_elements": 1},
}


def rows(seed: int = 1) -> Tensor:
    return torch.randn(8, D, generator=torch.Generator().manual_seed(seed))


def built() -> nn.Module:
    torch.manual_seed(0)
    return residual_layers(2, D, D, torch.tanh, dropout=None).append(nn.Linear(D, D))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def vjp(model: nn.Module) -> tuple[Tensor, tuple[Tensor]]:
    output, pull = torch.func.vjp(model, rows())
    return output, pull(rows(2))


def per_sample_gradients(model: nn.Module) -> dict[str, Tensor]:
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def of_one(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (x,)).square().sum()

    return torch.func.vmap(torch.func.grad(of_one), (None, 0))(weights, rows())


def backward_of_vmap(model: nn.Module) -> tuple[Tensor, list[Tensor]]:
    output = torch.func.vmap(model)(rows())
    output.square().sum().backward()
    return output, [parameter.grad for parameter in model.parameters()]


def forward_mode(model: nn.Module) -> tuple[Tensor, Tensor | None]:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(rows(), rows(2))))


def backward_of_forward_mode(model: nn.Module) -> tuple[Tensor, Tensor, list[Tensor]]:
    with forward_ad.dual_level():
        primal, tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(rows().requires_grad_(), rows(2))))
        assert tangent is not None
        tangent.square().sum().backward()
        return primal, tangent, [parameter.grad for parameter in model.parameters()]


TRANSFORMS: dict[str, Callable[[nn.Module], Any]] = {
    "grad": lambda model: torch.func.grad(lambda x: loss(model, x))(rows()),
    "vjp": vjp,
    "jvp": lambda model: torch.func.jvp(model, (rows(),), (rows(2),)),
    "jvp of grad": lambda model: torch.func.jvp(torch.func.grad(lambda x: loss(model, x)), (rows(),), (rows(2),)),
    "vmap": lambda model: torch.func.vmap(model)(rows()),
    "backward of vmap": backward_of_vmap,
    "gradients of samples": per_sample_gradients,
    "jacrev": lambda model: torch.func.jacrev(lambda x: model(x).sum(0))(rows()),
    "jacfwd": lambda model: torch.func.jacfwd(lambda x: model(x).sum(0))(rows()),
    "hessian": lambda model: torch.func.hessian(lambda x: loss(model, x))(rows()[:2]),
    "functionalize": lambda model: torch.func.functionalize(model)(rows()),
    "forward mode": forward_mode,
    "backward of forward mode": backward_of_forward_mode,
}


def outcome(transform: str, model: nn.Module) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    return [leaf.detach() for leaf in tree_leaves(TRANSFORMS[transform](model)) if leaf is not None]


def is_right(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def check(transform: str, store: str) -> None:
    expected = outcome(transform, built())
    for rules in RULES.values():
        model = built()
        policies = {name: {"activation_checkpointing": rule, **STORES[store]} for name, rule in rules.items()}
        with graphckpt.apply(model, policies):
            assert is_right(outcome(transform, model), expected), rules
            loss(model, rows()).backward()  # outside it, the policies act
            assert is_right(outcome(transform, model), expected), rules


@pytest.mark.parametrize("store", ["device", "slab"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_blocks_run_as_they_are(transform: str, store: str) -> None:
    check(transform, store)


def run_in_a_process(script: str) -> None:
    begin = "import warnings; warnings.simplefilter('ignore')\n"
    path = os.pathsep.join(sys.path)
    ran = subprocess.run(
        [sys.executable, "-c", begin + script],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.slow
def test_blocks_with_a_store_on_disk_run_as_they_are_and_end_no_process() -> None:
    run_in_a_process("from tests.rules.test_transforms import *\nfor name in TRANSFORMS: check(name, 'disk')")


def test_a_zero_tensor_on_disk_does_not_end_the_process() -> None:
    run_in_a_process(
        """
import torch
from graphckpt.stores import TensorGroup
from graphckpt.stores.placement import placement_of

store, notes = placement_of({"offload": "disk", "min_elements": 1}).store, []
group = store.open_group(TensorGroup("block", list, notes.append))
assert not store.get(store.put(torch._efficientzerotensor(64, 64), group)).any()
assert notes == ["zero tensors stay on the device: only plain tensors can be moved"]
"""
    )


def test_explain_says_so() -> None:
    model = built()
    with graphckpt.apply(model, {"*": {"activation_checkpointing": True}}) as handle:
        torch.func.grad(lambda x: loss(model, x))(rows())
        loss(model, rows()).backward()
        assert "torch.func or forward-mode AD is around it" in str(handle.explain(show=False).rows)


@pytest.mark.parametrize("is_measured", [True, False])
@pytest.mark.parametrize("rules", [{}, RULES["full"], RULES["segments"]])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_measuring_leaves_them_alone_and_says_so(transform: str, rules: dict[str, Any], is_measured: bool) -> None:
    expected, model, disable = outcome(transform, built()), built(), disable_saved_tensors_hooks
    with graphckpt.apply(model, rules) as handle:
        with handle.measure() if is_measured else nullcontext():
            assert is_right(outcome(transform, model), expected)
        assert torch.autograd.graph.disable_saved_tensors_hooks is disable
        with pytest.raises(graphckpt.GraphError, match=r"torch.func or forward-mode AD was around the step"):
            handle.explain()
        with handle.measure():
            loss(model, rows()).backward()
            assert is_right(outcome(transform, model), expected)
            loss(model, rows()).backward()
        assert all(row.runs == 2 for row in handle.explain(show=False).rows if not row.block.startswith("("))


def test_transforms_run_within_measurements_of_two_models() -> None:
    handles = [graphckpt.apply(built(), RULES["full"]) for _ in range(2)]
    disable, x = disable_saved_tensors_hooks, rows()
    with handles[0].measure():
        with handles[1].measure():
            assert torch.equal(torch.func.grad(lambda x: x.sum())(x), torch.ones_like(x))
        assert torch.equal(torch.func.grad(lambda x: x.sum())(x), torch.ones_like(x))
    assert torch.autograd.graph.disable_saved_tensors_hooks is disable


@pytest.mark.parametrize("policy", [True, False, "selective"])
@pytest.mark.parametrize("is_measured", [True, False])
def test_a_transform_outside_of_the_blocks_does_not_stop_a_record(policy: bool | str, is_measured: bool) -> None:
    @as_module(lambda: {"layers": built()})
    def HasForces(self: Any, x: Tensor) -> Tensor:
        force = torch.func.grad(lambda x: x.square().sum())
        return self.layers(x) * torch.func.vmap(force)(x)

    model = HasForces()
    with graphckpt.apply(model, {"layers.*": policy}) as handle:
        with handle.measure() if is_measured else nullcontext():
            loss(model, rows()).backward()
        assert [row.runs for row in handle.explain(show=False).rows[:3]] == [1, 1, 1]
        assert handle.explain(show=False).bytes_before > 0


@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap", "forward mode", "backward of forward mode"])
def test_checkpointed_functions_run_as_they_are(transform: str) -> None:
    model = built()
    expected = outcome(transform, model)

    @as_module(lambda: {"model": model})
    def Checkpointed(self: Any, x: Tensor) -> Tensor:
        x = graphckpt.checkpoint(self.model[0], x, use_reentrant=False)
        return graphckpt.checkpoint_sequential(self.model[1:], 2, x)  # type: ignore[index]

    assert is_right(outcome(transform, Checkpointed()), expected)


_STORES: dict[str, dict[str, Any]] = {
    "full": {"*": True},
    "selective": {"*": "selective"},
    "segments": {"": Segments(2)},
    "joined": {"0": True, "1": "joined"},
    "full, disk": {"*": {"activation_checkpointing": True, "offload": "disk", "min_elements": 1}},
    "keep, disk": {"*": {"offload": "disk", "min_elements": 1}},
    "full, slab": {"*": {"activation_checkpointing": True, "contiguous": True, "min_elements": 1}},
}


@pytest.mark.parametrize("policies", _STORES.values(), ids=_STORES)
def test_make_fx_of_a_step(policies: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = residual_layers(2, D, dropout=None)
    x = torch.randn(4, D)

    def step(x: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(model(x).square().sum(), [*model.parameters()])

    expected = step(x)
    with graphckpt.apply(model, policies):
        traced = make_fx(step)(x)
    assert all(map(torch.equal, traced(x), expected))


@pytest.mark.parametrize("is_strict", [True, False])
@pytest.mark.parametrize("policies", _STORES.values(), ids=_STORES)
def test_export(policies: dict[str, Any], is_strict: bool) -> None:
    torch.manual_seed(0)
    model = residual_layers(2, D, dropout=None)
    x = torch.randn(4, D)
    expected = model(x)
    with graphckpt.apply(model, policies):
        exported = torch.export.export(model, (x,), strict=is_strict)
    assert torch.equal(exported.module()(x), expected)
