"""The peak of a step, counted apart from the planner."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from graphckpt.ledger.live_memory import LiveBytes


def tracked_peak(model: nn.Module, step: Callable[[], object], optimizers: Iterable[Optimizer] = ()) -> int:
    """Returns the most bytes that are alive during a second step; it may leave gradients for the next one."""
    step()
    state = [v for o in optimizers for s in o.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    live = LiveBytes(record_timeline=False)
    live.track([*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters()), *state])
    with live:
        step()
    return live.peak_bytes
