"""Policies that change between a forward and its backward: the recomputation follows those of the forward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.modules import as_module
from torch import Tensor, nn

import graphckpt
from graphckpt.blocks import disable_checkpointing
from graphckpt.engine.execution import call_numbers
from graphckpt.rules import Selective

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@as_module(lambda: {"up": nn.Linear(4, 8), "drop": nn.Dropout(0.4), "down": nn.Linear(8, 4)})
def Block(self: Any, x: Tensor) -> Tensor:
    return x + self.down(self.drop(torch.tanh(self.up(x))))


EAGER = {"compile": {"backend": "eager"}}
POLICIES: dict[str, dict[str, Any]] = {
    "full": {"*": True},
    "excluded children": {"[01]": True, "[01].up": False, "[01].drop": False},
    "excluded, disk": {
        "[01]": True,
        "[01].up": {"activation_checkpointing": False, "offload": "disk", "min_elements": 1},
    },
    "selective in full": {"": True, "[01]": Selective("matmul")},
    "compiled": {"[01]": {"activation_checkpointing": True, **EAGER}},
    "compiled excluded child": {"[01]": True, "[01].down": {"activation_checkpointing": False, **EAGER}},
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def loss_of(model: nn.Module) -> Tensor:
    torch.manual_seed(1)
    return model(torch.ones(3, 4)).square().sum()


def grads(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("policies", POLICIES)
@pytest.mark.parametrize("then", ["removed", "others", "disabled"])
def test_backward_follows_the_policies_of_its_forward(policies: str, then: str) -> None:
    plain, wrapped = model(), model()
    loss_of(plain).backward()
    for warm_up in (True, False):
        wrapped.zero_grad()
        handle = graphckpt.apply(wrapped, POLICIES[policies])
        if warm_up:
            loss_of(wrapped).backward()
            wrapped.zero_grad()
        loss = loss_of(wrapped)
        if then == "disabled":
            with graphckpt.blocks.disable_checkpointing():
                loss.backward()
            handle.remove()
        else:
            handle.remove()
            if then == "others":
                handle = graphckpt.apply(wrapped, {"[01].up": True, "[01].drop": "selective"})
            loss.backward()
            handle.remove()
        assert all(map(torch.equal, grads(plain), grads(wrapped)))
        assert not any("forward" in module.__dict__ for module in wrapped.modules())


BENEATH: dict[str, dict[str, Any]] = {
    "full": {"0": True},
    "selective": {"0": Selective("matmul")},
    "excluded": {"0": False},
}


def wrap(module: nn.Module) -> None:
    """Puts a wrapper over the module's forward that stays, as hooks of other libraries do."""
    forward = module.forward
    module.forward = lambda x: forward(x)  # noqa: PLW0108


@pytest.mark.parametrize("policies", BENEATH)
@pytest.mark.parametrize("when", ["before forward", "before backward", "until backward"])
def test_a_policy_beneath_another_wrapper_acts_as_in_the_original_forward(policies: str, when: str) -> None:
    plain, wrapped = model(), model()
    loss_of(plain).backward()
    handle = graphckpt.apply(wrapped, BENEATH[policies])
    wrap(wrapped[0])  # type: ignore[index]
    if when != "before backward":
        handle.remove()
    torch.manual_seed(1)
    loss = graphckpt.checkpoint(wrapped, torch.ones(3, 4)).square().sum()
    if when == "before backward":
        handle.remove()
    elif when == "until backward":
        graphckpt.apply(wrapped, BENEATH[policies])
    loss.backward()
    torch.testing.assert_close(grads(wrapped), grads(plain), rtol=0, atol=0)


def test_a_policy_that_is_installed_anew_is_off_in_calls_between() -> None:
    wrapped = model()
    (forward,) = graphckpt.apply(wrapped, {"0": Selective("matmul")})._wrappers
    before = next(call_numbers)
    forward.uninstall()
    between = next(call_numbers)
    forward.install()
    assert [forward._was_on(number) for number in (before, between, next(call_numbers))] == [True, False, True]


@as_module(lambda: {"block": Block()})
def Disables(self: Any, x: Tensor) -> Tensor:
    with disable_checkpointing():
        return self.block(x).sin()


@pytest.mark.parametrize("rule", [True, False, Selective("matmul")])
def test_a_forward_may_disable_policies(rule: Any) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Disables())
    wrapped = copy.deepcopy(plain)
    loss_of(plain).backward()
    graphckpt.apply(wrapped, {"0": True, "0.block": rule})
    for _ in range(2):  # the first call runs to its end
        wrapped.zero_grad()
        loss_of(wrapped).backward()
        torch.testing.assert_close(grads(wrapped), grads(plain), rtol=0, atol=0)


def test_a_nested_checkpoint_is_recomputed_as_such_where_backward_disables_policies() -> None:
    layer = Block()
    x = torch.ones(3, 4)

    def nested(x: Tensor) -> Tensor:
        return graphckpt.checkpoint(layer.down, graphckpt.checkpoint(layer.up, x).sin())

    nested(x).sum().backward()
    want = [weight.grad for weight in layer.parameters()]
    layer.zero_grad()
    loss = graphckpt.checkpoint(nested, x).sum()
    with disable_checkpointing():
        loss.backward()
    torch.testing.assert_close([weight.grad for weight in layer.parameters()], want, rtol=0, atol=0)


@as_module(lambda: {"inner": nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))})
def Outer(self: Any, x: Tensor) -> Tensor:
    return self.inner(x).tanh()


@pytest.mark.parametrize("others", [[], ["last"], ["first"]])
def test_a_record_that_begins_within_a_checkpoint_leaves_excluded_children_excluded(others: list[str]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Outer(), Outer())
    wrapped = copy.deepcopy(plain)
    loss_of(plain).backward()
    policies = [{"0": True, "0.inner": False}, *({"1": True} for _ in others)]
    # While it is alive, each handle records the next forward, within those of the handles before it.
    handles = [graphckpt.apply(wrapped, each) for each in (policies[::-1] if "first" in others else policies)]
    x = torch.ones(3, 4, requires_grad=True)
    graphckpt.checkpoint(wrapped, x).square().sum().backward()
    torch.testing.assert_close(grads(wrapped), grads(plain), rtol=0, atol=0)
    for handle in handles:
        handle.remove()
