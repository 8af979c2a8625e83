"""Runs forwards that use a skipped result of a ``selective`` block by other ways than ops, each in a process.

Prints a line for each: its name, and ``equal``, ``different``, the class of the error, or the signal that has ended it.
"""

from __future__ import annotations

import copy
import ctypes
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import graphckpt

COLLECTED: list[Any] = []


@torch.library.custom_op("graphckpt_tests::reads_memory", mutates_args=())
def reads_memory(x: Tensor) -> Tensor:
    return torch.full((1,), ctypes.c_float.from_address(x.data_ptr()).value)


class Block(nn.Module):
    """A linear layer, a frozen twin, and a result that the recomputation skips, which ``use`` gets."""

    def __init__(self, use: Callable[[Block, Tensor], object]) -> None:
        super().__init__()
        self.linear, self.frozen, self.use = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False), use

    def forward(self, x: Tensor) -> Tensor:
        h = (x * 2 + 1) / 3
        with torch.no_grad():
            self.use(self, h.detach())
        return torch.tanh(self.linear(h)) + self.frozen(x)


def average(block: Block, h: Tensor) -> None:
    weight = block.frozen.weight
    weight.data = weight.data * 0.9 + h.mean() * 0.1


def limit_norm(block: Block, h: Tensor) -> None:
    weight = block.frozen.weight
    weight.data = torch.renorm(weight.data, 2, 0, 0.1)


WAYS: dict[str, Callable[[Block, Tensor], object]] = {
    "data": average,
    "data, idempotent": limit_norm,
    "data of the bias": lambda block, h: setattr(block.frozen.bias, "data", h[0]),
    "set_": lambda block, h: block.frozen.bias.set_(h[0]),
    "swap_tensors": lambda block, h: torch.utils.swap_tensors(block.frozen.bias, nn.Parameter(h[0].clone(), False)),
    "resize_": lambda _, h: h.resize_(4),
    "numpy": lambda _, h: COLLECTED.append(float(h.numpy()[0, 0])),
    "dlpack": lambda _, h: COLLECTED.append(float(torch.from_dlpack(h).sum())),
    "capsule": lambda _, h: COLLECTED.append(float(torch.utils.dlpack.from_dlpack(h.__dlpack__()).sum())),
    "address": lambda _, h: COLLECTED.append(ctypes.c_float.from_address(h.data_ptr()).value),
    "bytes of the storage": lambda _, h: COLLECTED.append(bytes(h.untyped_storage())),
    "view of the storage": lambda _, h: COLLECTED.append(torch.empty(0).set_(h.untyped_storage()).sum().item()),
    "tolist": lambda _, h: COLLECTED.append(h.tolist()),
    "item": lambda _, h: COLLECTED.append(h[0, 0].item()),
    "pickle": lambda _, h: COLLECTED.append(pickle.loads(pickle.dumps(h)).sum().item()),
    "deepcopy": lambda _, h: COLLECTED.append(copy.deepcopy(h).sum().item()),
    "custom op": lambda _, h: COLLECTED.append(reads_memory(h).item()),
    "grad": lambda block, h: setattr(block.frozen.bias, "grad", h[0]),
    "attribute": lambda block, h: setattr(block, "last", h),
    "collected": lambda _, h: COLLECTED.append(h),
}


def run(use: Callable[[Block, Tensor], object], policy: object) -> list[list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(use), Block(use))
    if policy is not None:
        graphckpt.apply(model, {"*": policy})
    steps = []
    for seed in range(3):
        torch.manual_seed(seed)
        model.zero_grad()
        model(torch.randn(2, 8)).square().mean().backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None and p.requires_grad]
        steps.append([*gradients, *(p.detach().clone() for p in model.parameters())])
    return steps


def outcome(use: Callable[[Block, Tensor], object], policy: object) -> str:
    try:
        plain, ours = run(use, None), run(use, policy)
    except Exception as error:
        return type(error).__name__
    same = all(torch.equal(a, b) for then, now in zip(plain, ours, strict=True) for a, b in zip(then, now, strict=True))
    return "equal" if same else "different"


def main() -> None:
    torch.set_num_threads(1)
    graphckpt.apply(nn.Sequential(), {})  # loads what each child would load
    policy = True if sys.argv[1] == "full" else sys.argv[1]
    for name, use in WAYS.items():
        sys.stdout.flush()
        child = os.fork()
        if not child:
            print(name, outcome(use, policy), sep=": ", flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            print(name, f"signal {os.WTERMSIG(status)}", sep=": ")


if __name__ == "__main__":
    main()
