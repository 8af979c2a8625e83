"""Joined blocks keep not even their inputs, and are recomputed once, as one with those before them."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.hard_modules import Mlp, chain, run_steps
from helpers.layer_stacks import linear_layers
from helpers.modules import as_module
from helpers.peaks import saved_bytes
from torch import nn
from torch.distributed.fsdp import fully_shard

import graphckpt

JOINED = {"1": True, "[2-6]": "joined"}  # of a chain whose first and last block are layers without a policy


def put(model: nn.Module, policies: dict[str, Any] | None = None) -> graphckpt.Handle:
    return graphckpt.apply(model, {k: {"activation_checkpointing": v} for k, v in (policies or JOINED).items()})


def test_only_the_input_of_the_first_block_is_kept() -> None:
    x = torch.randn(6, 16, requires_grad=True)
    model = chain("mlp", length=6)
    with put(model, {"[1-6]": True}):
        full = saved_bytes(model, x)
    with put(model):
        joined = saved_bytes(model, x)
    assert full - joined == 5 * x.untyped_storage().nbytes()  # the inputs of blocks 2 to 6


@pytest.mark.parametrize(
    ("policies", "again"),
    [(JOINED, [1, 2, 3, 4, 5, 6]), ({"[14]": True, "[2356]": "joined"}, [4, 5, 6, 1, 2, 3])],
    ids=["one run", "two runs"],
)
def test_each_block_runs_again_once_from_the_first_of_its_run(policies: dict[str, Any], again: list[int]) -> None:
    model = chain("mlp", length=6)
    ran: list[int] = []
    for number, block in enumerate(model[1:-1], start=1):
        block.up.register_forward_pre_hook(lambda *_, number=number: ran.append(number))
    with put(model, policies):
        run_steps(model, steps=1)  # learns
        ran.clear()
        run_steps(model, steps=1)
    assert ran == [1, 2, 3, 4, 5, 6, *again]


class Loop(nn.Module):
    """Calls its blocks itself, with something else beside their input."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor] | None = None, length: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Scaled() for _ in range(length))
        self.between = between

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            (x,) = block(x, scale=scale)
            if self.between is not None:
                x = self.between(x)
        return x


@as_module(lambda: {"mlp": Mlp()})
def Scaled(self: Any, x: torch.Tensor, *, scale: torch.Tensor) -> tuple[torch.Tensor]:
    return (self.mlp(x) * scale,)


LOOP = {"blocks.0": True, "blocks.[1-5]": "joined"}


def gradients(model: nn.Module, *inputs: torch.Tensor) -> list[torch.Tensor]:
    for _ in range(2):
        torch.manual_seed(3)
        model.zero_grad()
        for tensor in inputs:
            tensor.grad = None
        model(*inputs).sum().backward()
    return [tensor.grad.clone() for tensor in (*model.parameters(), *inputs)]


@pytest.mark.parametrize(
    ("between", "is_joined"),
    [(None, True), (lambda x: x, True), (lambda x: x * 1, False), (lambda x: x.mul_(2), False)],
    ids=["nothing", "the same tensor", "another tensor", "an edit in place"],
)
def test_the_caller_of_the_blocks_does_not_matter(
    between: Callable[[torch.Tensor], torch.Tensor] | None, is_joined: bool
) -> None:
    model, x, scale = Loop(between), torch.randn(6, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    wanted = gradients(model, x, scale)
    inputs: list[weakref.ref[torch.Tensor]] = []
    with put(model, LOOP) as handle:
        assert all(map(torch.equal, gradients(model, x, scale), wanted))
        for block in model.blocks[1:]:
            block.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0].untyped_storage())))
        loss = model(x, scale).sum()
        alive = [ref() is not None for ref in inputs]
        loss.backward()
        notes = str(handle.explain(show=False).rows)
    assert alive == [not is_joined] * 5
    assert ("joined: no argument is the output" in notes) is not is_joined


def test_a_joined_block_saves_its_input_where_the_block_before_is_not_recomputed() -> None:
    model = chain("mlp", length=4)
    x = torch.randn(6, 16)
    with put(model, {"[1234]": True}):
        full = saved_bytes(model, x)
    with put(model, {"[13]": True, "[24]": "joined"}):
        assert full - saved_bytes(model, x) == 2 * x.untyped_storage().nbytes()
    with put(model, {"[1234]": "joined"}):  # what is before the first is no block
        assert full - saved_bytes(model, x) == 3 * x.untyped_storage().nbytes()


def test_the_first_call_keeps_no_more_than_others() -> None:
    model, x = chain("mlp", length=6), torch.randn(6, 16)
    inputs: list[weakref.ref[torch.UntypedStorage]] = []
    for block in model[1:-1]:
        block.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0].untyped_storage())))
    with put(model):
        loss = model(x).sum()
        assert [ref() is not None for ref in inputs] == [True, False, False, False, False, False]
        loss.backward()


def test_a_slab_is_made_for_the_first_input_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="graphckpt")
    model, x = chain("mlp", length=6), torch.randn(256, 16)
    for rule in (True, "joined"):
        fields = {"activation_checkpointing": rule, "contiguous": True}
        with graphckpt.apply(model, {"[1-6]": fields, "1": {"activation_checkpointing": True}}):
            for _ in range(3):
                model(x).sum().backward()
    made = [record.message for record in caplog.records if "slab" in record.message]
    assert made == ["contiguous: a slab of 96.0 KiB on cpu", "contiguous: a slab of 16.0 KiB on cpu"]


class Switch:
    """Is not an attribute of any module: a recomputation finds it as it is by then."""

    block: nn.Module | None = None


@as_module(lambda result: {"linear": nn.Linear(16, 16), "result": result})
def Returns(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns something else beside its result, and something else again once the switch points to it."""
    return self.result(self.linear(x).tanh(), Switch.block is self)


class Last(nn.Module):
    def __init__(self, result: Callable[[torch.Tensor, bool], tuple[torch.Tensor, ...]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Returns(result) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)[-1]
        return x


def made_in_inference_mode(y: torch.Tensor, _: bool) -> tuple[torch.Tensor, ...]:
    with torch.inference_mode():
        return torch.ones_like(y), y.clone(), y  # what comes last is no inference tensor


def test_the_output_of_a_joined_block_may_be_returned_beside_inference_tensors() -> None:
    model, x = Last(made_in_inference_mode), torch.randn(6, 16)
    wanted = gradients(model, x.requires_grad_())
    with put(model, {"blocks.0": True, "blocks.[12]": "joined"}):
        assert all(map(torch.equal, gradients(model, x), wanted))


@pytest.mark.parametrize(
    ("result", "now"),
    [
        (lambda y, flag: (y,) if flag else (y.detach(), y), "nothing"),
        (lambda y, flag: (y[:3],) if flag else (y,), r"float32\[3, 16\]"),
        (lambda y, flag: (y.double(),) if flag else (y,), r"float64\[6, 16\]"),
    ],
    ids=["fewer", "another shape", "another type"],
)
def test_a_block_that_returns_something_else_again_is_named(
    result: Callable[[torch.Tensor, bool], tuple[torch.Tensor, ...]], now: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Last(result)
    with put(model, {"blocks.0": True, "blocks.[12]": "joined"}):
        loss = model(torch.randn(6, 16)).sum()
        monkeypatch.setattr(Switch, "block", model.blocks[1])
        message = rf"blocks\.1: tensor . that it returns: expected float32\[6, 16\], got {now} in the recomputation"
        with pytest.raises(graphckpt.RecomputeError, match=message):
            loss.backward()


def test_a_run_may_be_longer_than_the_stack_of_python() -> None:
    torch.manual_seed(0)
    model = linear_layers(600, 4)
    x = torch.randn(2, 4)
    model(x).sum().backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    with graphckpt.apply(model, {"*": {"activation_checkpointing": "joined"}, "0": True}):
        for _ in range(2):
            model.zero_grad()
            model(x).sum().backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), wanted, strict=True))


@pytest.mark.multi_process
def test_units_of_fsdp2_are_refused(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = chain("mlp", length=3)
        for block in model[1:-1]:
            fully_shard(block)
        with pytest.raises(graphckpt.ConfigError, match="fully_shard gathers the weights of one at a time"):
            put(model, {"1": True, "[23]": "joined"})
    finally:
        dist.destroy_process_group()


@as_module(lambda: {"linear": nn.Linear(16, 16), "norms": nn.ModuleList(nn.BatchNorm1d(16) for _ in range(2))})
def TwoNorms(self: Any, x: torch.Tensor) -> torch.Tensor:
    first, second = self.norms
    return second(first(self.linear(x)).tanh())


def test_a_second_try_of_a_recomputation_recomputes_the_joined_blocks_too() -> None:
    """The output of the last norm is edited only behind the block: the recomputation finds that it must repeat both."""
    torch.manual_seed(0)
    model = as_module(lambda: {"blocks": nn.ModuleList(TwoNorms() for _ in range(2))})(
        lambda self, x: self.blocks[1](self.blocks[0](x)).add_(1).sin()
    )()
    x = torch.randn(6, 16, requires_grad=True)
    wanted = gradients(copy.deepcopy(model), x)
    with put(model, {"blocks.0": True, "blocks.1": "joined", "*.norms.*": False}):
        assert all(map(torch.equal, gradients(model, x), wanted))
