"""The containers of random programmes: modules that call their children in some way."""

from __future__ import annotations

from typing import Any

import torch
from helpers.modules import as_module
from torch import Tensor, nn

import graphckpt
from fuzz.layers import D


class Chain(nn.Sequential):
    """Calls its children in order."""


@as_module(lambda *children, how="new": {"inner": nn.Sequential(*children), "how": how})
def Residual(self: Any, x: Tensor) -> Tensor:
    y = self.inner(x)
    if self.how == "new" or y is x:
        return y + x
    if self.how == "edits copy":
        y = y * 1
    y += x
    return y


@as_module(lambda *children: {"inner": nn.ModuleList(children)})
def Listed(self: Any, x: Tensor) -> Tensor:
    """Calls the items of a list, and uses what each of them returned."""
    seen = []
    for child in self.inner:
        x = child(x)
        seen.append(x)
    return torch.stack(seen).mean(0)


@as_module(lambda *children: {"inner": nn.Sequential(*children)})
def Twice(self: Any, x: Tensor) -> Tensor:
    """Calls the same children twice."""
    return self.inner(self.inner(x).tanh())


@as_module(lambda *children: {"inner": nn.Sequential(*children), "gate": nn.Linear(D, D)})
def Gate(self: Any, x: Tensor) -> Tensor:
    """Calls its children in two branches on one argument."""
    gate = torch.sigmoid(self.gate(x))
    return self.inner(x) * gate


@as_module(lambda *children: {"inner": nn.Sequential(*children)})
def WithoutGradients(self: Any, x: Tensor) -> Tensor:
    """Calls its children once without gradients, and once with."""
    with torch.no_grad():
        target = self.inner(x.clone())
    return self.inner(x) - 0.1 * target


@as_module(lambda *children, enabled=True: {"inner": nn.Sequential(*children), "enabled": enabled})
def Autocasted(self: Any, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16, enabled=self.enabled):
        y = self.inner(x)
    return y.to(x.dtype)


@as_module(lambda *children: {"inner": nn.Sequential(*children), "failures": 0})
def Catches(self: Any, x: Tensor) -> Tensor:
    """Tries its children on an argument that they cannot take, and then on one that they can."""
    try:
        self.inner(x[:, :3])
    except (RuntimeError, ValueError):
        self.failures += 1
    return self.inner(x)


@as_module(lambda *children: {"inner": RaisesAtTimes(*children)})
def Retries(self: Any, x: Tensor) -> Tensor:
    """Uses what its children have left behind in a call that raised."""
    results: list[Tensor] = []
    try:
        x = self.inner(x, results)
    except ValueError:
        x = x * 0.5
    return x + results[0].cos()


@as_module(lambda *children: {"inner": nn.Sequential(*children), "calls": 0})
def RaisesAtTimes(self: Any, x: Tensor, results: list[Tensor]) -> Tensor:
    """Raises at the end of every other call."""
    self.calls += 1
    y = self.inner(x)
    results.append(y.tanh())
    if self.calls % 2:
        raise ValueError(f"call {self.calls}")
    return y.sin()


@as_module(lambda *children: {"inner": FillsCache(*children)})
def Caches(self: Any, x: Tensor) -> Tensor:
    """Passes an object by reference to a child, which fills it."""
    cache: dict[str, Any] = {"seen": [], "n": 0}
    y = self.inner(x, cache=cache)
    y = self.inner(y, cache=cache)
    return y * cache["n"] + torch.stack(cache["seen"]).sum(0)


@as_module(lambda *children: {"inner": nn.Sequential(*children)})
def FillsCache(self: Any, x: Tensor, *, cache: dict[str, Any]) -> Tensor:
    cache["n"] += 1
    for earlier in cache["seen"]:
        x = x + earlier
    y = self.inner(x)
    cache["seen"].append(y)
    return y


class Hooked(nn.Module):
    """Children with hooks on the module."""

    def __init__(self, *children: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*children)
        self.inner.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
        self.inner.register_forward_hook(lambda module, args, output: output * 0.5)
        self.inner.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2,))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@as_module(lambda *children, how="module": {"inner": nn.Sequential(*children), "how": how})
def DropIn(self: Any, x: Tensor) -> Tensor:
    """Calls the package's ``checkpoint`` from its own forward."""
    if self.how == "module":
        return graphckpt.checkpoint(self.inner, x)
    if self.how == "closure":
        return graphckpt.checkpoint(lambda value: self.inner(value).sin(), x)
    return graphckpt.checkpoint_sequential(self.inner, 1 + len(self.inner) // 2, x)


@as_module(lambda *children: {"inner": nn.Sequential(*children)})
def Disables(self: Any, x: Tensor) -> Tensor:
    """Calls its children once without their policies, and once with them."""
    with graphckpt.blocks.disable_checkpointing():
        y = self.inner(x)
    return self.inner(y)


class TiesWeights(nn.Module):
    """Gives the first and the last of its linear layers one weight."""

    def __init__(self, *children: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*children)
        linears = [m for m in self.inner.modules() if type(m).__name__ == "Linear" and m.weight.shape == (D, D)]
        if linears and "weight" in linears[0]._parameters and "weight" in linears[-1]._parameters:
            linears[-1].weight = linears[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)
