"""The contract of every rule, run over the registry, so that a new rule is tested without being named."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from helpers.hard_modules import ZOO, chain, differing, plain_steps, run_steps
from helpers.policies import HOLES, NESTED, ON_CHAIN, put
from helpers.thinning import is_chosen, slow_unless
from torch import nn

from graphckpt.rules import rule_classes


def test_every_rule_has_a_case() -> None:
    ours = {name for name, rule in rule_classes().items() if rule.__module__.startswith("graphckpt.")}
    assert set(ON_CHAIN) == ours


def both_types(policy: str, kind: str) -> list[bool]:
    """With and without autocast; of rules in rules on some kinds of modules only, as the two do not depend on it."""
    return [False, True] if policy not in NESTED or kind in VARIED else [False]


VARIED = {"mlp", "gru", "attention", "edits_its_input"}


def is_fast(policy: str, kind: str, autocast: bool) -> bool:
    """Autocast on some kinds of modules; nested rules on the same ones, and a fourth of them on each other kind."""
    if torch.cuda.is_available():
        return is_chosen((policy, kind, 3 * autocast), ON_CHAIN | NESTED | HOLES, ZOO, range(8))
    if policy not in NESTED:
        return kind in VARIED or not autocast
    return not autocast and (kind in VARIED or is_chosen((policy, kind, 0), NESTED, ZOO, range(4)))


@pytest.mark.parametrize(
    ("policy", "kind", "autocast"),
    [
        pytest.param(
            policy,
            kind,
            autocast,
            id=f"{policy}-{kind}-{'bfloat16' if autocast else 'float32'}",
            marks=slow_unless(is_fast(policy, kind, autocast)),
        )
        for policy in ON_CHAIN | NESTED | HOLES
        for kind in ZOO
        for autocast in both_types(policy, kind)
    ],
)
@pytest.mark.one_schedule("a rule uses one stream")
def test_same_bits_as_the_plain_step(policy: str, kind: str, autocast: bool, device: str) -> None:
    plain = plain_steps(kind, autocast=autocast, device=device)
    model = chain(kind).to(device)
    with put(model, (ON_CHAIN | NESTED | HOLES)[policy]):
        ours = run_steps(model, autocast=autocast, device=device)
    assert differing(ours, plain) == []


@pytest.mark.parametrize("policy", [p for p in ON_CHAIN if p != "keep"])
def test_the_rule_runs_blocks_again(policy: str) -> None:
    model = chain("mlp", length=6)
    runs = [0]
    for block in model:
        block.register_forward_pre_hook(lambda *_: runs.__setitem__(0, runs[0] + 1))
    inner = [0]
    model[1].up.register_forward_pre_hook(lambda *_: inner.__setitem__(0, inner[0] + 1))
    with put(model, ON_CHAIN[policy]):
        run_steps(model, steps=1)
    assert inner[0] == 2


@pytest.mark.parametrize("policy", ON_CHAIN)
def test_inputs_that_need_no_gradient(policy: str) -> None:
    plain = plain_steps("mlp", needs_grad=False)
    model = chain("mlp")
    with put(model, ON_CHAIN[policy]):
        assert differing(run_steps(model, needs_grad=False), plain) == []


@pytest.mark.parametrize("policy", ON_CHAIN | NESTED)
def test_nothing_is_left_behind(policy: str) -> None:
    """Forward without backward, an error in forward, one in backward: the kept tensors die with their graph."""

    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("forward fails")

    model = chain("mlp")
    alive: list[weakref.ref[torch.UntypedStorage]] = []
    model[1].up.register_forward_pre_hook(lambda _, args: alive.append(weakref.ref(args[0].untyped_storage())))
    gc.collect()
    gc.disable()  # what only the collector frees would be a cycle through autograd's graph
    try:
        with put(model, (ON_CHAIN | NESTED)[policy]):
            run_steps(model, steps=1)
            model(torch.randn(6, 16))
            out = model(torch.randn(6, 16)).sum()
            out.register_hook(lambda _: (_ for _ in ()).throw(RuntimeError("backward fails")))
            with pytest.raises(RuntimeError, match="backward fails"):
                (out * 1).backward()
            del out
            head, model[4] = model[4], Fails()
            with pytest.raises(RuntimeError, match="forward fails"):
                model(torch.randn(6, 16))
            model[4] = head
            run_steps(model, steps=1)
        for parameter in model.parameters():
            parameter.grad = None
        assert len(alive) >= 5
        assert [ref for ref in alive if ref() is not None] == []
    finally:
        gc.enable()
