"""A block whose forward raises an exception that its caller catches, after it has left history behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphckpt
from graphckpt import Disk, RecomputeError


class Fails(nn.Module):
    """Edits its argument in place, appends a result to a list, and raises in some calls."""

    def __init__(self, fails_in: set[int]) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.fails_in, self.calls = fails_in, 0

    def forward(self, x: Tensor, results: list[Tensor]) -> Tensor:
        self.calls += 1
        if self.calls in self.fails_in:
            x.sigmoid_()
        y = self.norm(self.linear(x).tanh())
        results.append(y)
        if self.calls in self.fails_in:
            raise ValueError("this call fails")
        return y.sin() + torch.rand(8)


def test_a_failed_call_that_cannot_be_recomputed_is_an_error() -> None:
    block = Fails({2})
    with graphckpt.apply(block, {"": {"activation_checkpointing": True}}):
        block(torch.rand(4, 8, requires_grad=True), [])
        x = torch.rand(4, 8, requires_grad=True).clone()
        with pytest.raises(ValueError, match="this call fails"):
            block(x, [])
        with pytest.raises(RecomputeError, match="modified its argument `x` in place, and the recomputation has no"):
            x.sum().backward()


def test_backward_through_an_excluded_child_of_a_failed_call_that_cannot_be_recomputed() -> None:
    block = Fails({2})
    with graphckpt.apply(block, {"": True, "linear": False}):
        block(torch.rand(4, 8), [])
        outputs: list[Tensor] = []
        block.linear.register_forward_hook(lambda *call: outputs.append(call[2]))
        with pytest.raises(ValueError, match="this call fails"):
            block(torch.rand(4, 8), [])
        outputs[0].sum().backward()  # which needs nothing of the block
    assert block.linear.weight.grad is not None


def test_a_failed_call_keeps_nothing_in_a_store() -> None:
    block = Fails({1, 2})
    with graphckpt.apply(block, {"": {"activation_checkpointing": True, "offload": Disk()}}) as handle:
        store: Any = handle._wrappers[0].context.store
        for _ in range(2):
            x = torch.rand(4096, 8, requires_grad=True).clone()
            with pytest.raises(ValueError, match="this call fails"):
                block(x, [])
            assert store.num_alive > 0
            del x
            assert store.num_alive == 0
