"""The graphs that the tests of Graph share, and the plain loop that they must equal in every bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from graphckpt import Graph

# Legend: B batch
B = 8


def mlp(seed: int = 0, p: float = 0.3) -> nn.Sequential:
    """Builds a small model with dropout and batch statistics, always with the same weights."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        block = [nn.Linear(6, 6), nn.BatchNorm1d(6), nn.GELU(), nn.Dropout(p)]
        return nn.Sequential(nn.Linear(4, 6), nn.Sequential(*block), nn.Linear(6, 3)).train()


def batches(count: int, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    stream = torch.Generator().manual_seed(seed)
    return [(torch.randn(B, 4, generator=stream), torch.randint(0, 3, (B,), generator=stream)) for _ in range(count)]


class Train(Graph):
    """The step that most tests run: a model, a loss, one optimizer."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None = None, scheduler: LRScheduler | None = None, **debug: Any
    ) -> None:
        super().__init__(**debug)
        self.model = model
        self.loss = nn.CrossEntropyLoss()
        if optimizer is not None:
            self.add_optimizer(optimizer, lr_sch=scheduler)

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.loss(self.model(x), y)
        if self.training:
            loss.backward()
        return loss


class SquareGraph(Graph):
    """Trains a model by the mean square of its output, with SGD unless another optimizer is given."""

    def __init__(
        self,
        model: nn.Module,
        flags: dict[str, Any] | None = None,
        optimizer: Optimizer | None = None,
        scheduler: LRScheduler | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        for name, flag in (flags or {}).items():
            self.model.get_submodule(name).config.activation_checkpointing = flag
        self.add_optimizer(optimizer or torch.optim.SGD(model.parameters(), lr=0.1), lr_sch=scheduler)

    def build(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = self.model(*args, **kwargs).float().pow(2).mean()
        loss.backward()
        return loss


class Predict(Graph):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def build(self, x: Tensor) -> Any:
        return self.model(x)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def run_graph(graph: Graph, count: int = 4, seed: int = 3) -> list[Tensor]:
    """Runs some steps of a graph and returns what they returned."""
    torch.manual_seed(seed)
    return [graph(x, y) for x, y in batches(count)]


def run_plain(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler | None = None,
    *,
    count: int = 4,
    seed: int = 3,
    dtype: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
    num_parts: int = 1,
) -> list[Tensor]:
    """Runs the same steps as a plain loop: what a Graph does around ``build``, with its outputs packed as it does."""
    torch.manual_seed(seed)
    losses = []
    for x, y in batches(count):
        parts = []
        for part_x, part_y in zip(x.chunk(num_parts), y.chunk(num_parts), strict=True):
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                loss = nn.functional.cross_entropy(model(part_x), part_y)
                (loss if scaler is None else scaler.scale(loss)).backward()
            parts.append(loss.detach())
        for parameter in model.parameters() if num_parts > 1 else ():
            parameter.grad.mul_(1 / num_parts)
        if scaler is not None:
            scaler.unscale_(optimizer)
        for group in optimizer.param_groups:
            if "clip_grad_max_norm" in group:
                norm_type = group.get("clip_grad_norm_type", 2.0)
                nn.utils.clip_grad_norm_(group["params"], group["clip_grad_max_norm"], norm_type)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(parts[0] if num_parts == 1 else torch.stack(parts))
    return losses


def same(ours: Any, plain: Any) -> bool:
    """Whether two lists of tensors or two modules' states are equal in every bit."""
    if isinstance(ours, nn.Module):
        ours, plain = ours.state_dict(), plain.state_dict()
    if isinstance(ours, dict):
        assert list(ours) == list(plain)
        ours, plain = list(ours.values()), list(plain.values())
    return len(ours) == len(plain) and all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
