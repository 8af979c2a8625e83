"""The bytes that a step saves, and its peak, counted apart from what explain() and the planner say."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from graphckpt.ledger.live_memory import LiveBytes


def tracked_peak(model: nn.Module, step: Callable[[], object], optimizers: Iterable[Optimizer] = ()) -> int:
    """Returns the most bytes that are alive during a second step; it may leave gradients for the next one."""
    step()
    return peak_of(model, step, optimizers)


def peak_of(model: nn.Module, step: Callable[[], object], optimizers: Iterable[Optimizer] = ()) -> int:
    """Returns the most bytes that are alive during a step."""
    state = [v for o in optimizers for s in o.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    live = LiveBytes(record_timeline=False)
    live.track([*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters()), *state])
    with live:
        step()
    return live.peak_bytes


def saved_bytes(
    model: nn.Module, x: torch.Tensor | dict[str, Any], loss_of: Callable[[Any], torch.Tensor] = torch.sum
) -> int:
    """Returns the bytes that a forward adds, without the loss of its output; a step before it learns.

    ``x`` is the input, or a dictionary of keyword arguments.
    """

    def loss() -> torch.Tensor:
        return loss_of(model(**x) if isinstance(x, dict) else model(x))

    model.zero_grad()
    loss().backward()
    model.zero_grad()
    with LiveBytes(record_timeline=False) as live:
        inputs = x.values() if isinstance(x, dict) else [x]
        live.track(t for t in (*model.parameters(), *model.buffers(), *inputs) if isinstance(t, torch.Tensor))
        before = live.live_bytes
        value = loss()
        added = live.live_bytes - before - value.untyped_storage().nbytes()
    value.backward()
    return added
