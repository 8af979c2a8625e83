"""Chains of layers that are hard for recompute, and the step that the contract is checked on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from fuzz.bench import differing  # noqa: F401 - of what two runs return
from fuzz.layers import (
    Attention,
    Codebook,
    Counts,
    D,
    EditsChildsOutput,
    EditsItsInput,
    LowRank,
    Mlp,
    Noise,
    Parametrized,
    Recurrent,
    Tied,
    UsesContainers,
)
from torch import Tensor, nn

from helpers.modules import as_module

B = 6  # batch; D is the width


@as_module(lambda: {"linear": nn.Linear(D, D), "norm": nn.BatchNorm1d(D), "relu": nn.ReLU(inplace=True)})
def BatchNorm(self: Any, x: Tensor) -> Tensor:
    return self.relu(self.norm(self.linear(x)))


ZOO: dict[str, Callable[[], nn.Module]] = {
    "mlp": Mlp,
    "batch_norm": BatchNorm,
    "spectral_norm": Parametrized,
    "rnn": lambda: Recurrent("RNN"),
    "lstm": lambda: Recurrent("LSTM"),
    "gru": lambda: Recurrent("GRU"),
    "attention": Attention,
    "edits_its_input": EditsItsInput,
    "edits_childs_output": EditsChildsOutput,
    "counts": Counts,
    "codebook": Codebook,
    "frozen": LowRank,
    "containers": UsesContainers,
    "tied": Tied,
    "noise": Noise,
}
if torch.cuda.is_available():  # cuDNN's are not deterministic, and fused cells have no kernels on the simulated device
    ZOO = {kind: build for kind, build in ZOO.items() if kind not in ("rnn", "lstm", "gru")}


def chain(kind: str, length: int = 3) -> nn.Sequential:
    """Builds a chain of blocks of one kind, between two layers that train; always the same weights."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(D, D), *[ZOO[kind]() for _ in range(length)], nn.Linear(D, 4)).train()


def run_steps(
    model: nn.Module, *, steps: int = 3, autocast: bool = False, needs_grad: bool = True, device: str = "cpu"
) -> dict[str, Any]:
    """Runs some training steps and returns losses, gradients, buffers, attributes and the RNG state after them."""
    torch.manual_seed(5)
    seen: dict[str, Any] = {}
    for number in range(steps):
        x = torch.randn(B, D, device=device, requires_grad=needs_grad)
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            loss = model(x).float().pow(2).mean()
        loss.backward()
        seen[f"loss {number}"] = loss.detach()
        seen[f"input grad {number}"] = x.grad
    seen |= {f"grad {name}": p.grad for name, p in model.named_parameters()}
    seen |= {f"buffer {name}": b.clone() for name, b in model.named_buffers()}
    seen |= {
        f"{key} {name}": value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if key in ("count", "last", "seen")
    }
    return seen | {"RNG state": rng_state(device)}


def rng_state(device: str) -> Tensor:
    return torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()


@functools.cache
def plain_steps(
    kind: str, *, length: int = 3, autocast: bool = False, needs_grad: bool = True, device: str = "cpu"
) -> dict[str, Any]:
    """What the steps of a chain without policies return: once a process, as it is the same for all policies."""
    return run_steps(chain(kind, length).to(device), autocast=autocast, needs_grad=needs_grad, device=device)
