"""Steps, captured or not, and all that they leave.

References run with the optimizer's own kernels for captured steps, and with learning rates in tensors: other kernels
round otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fuzz.bench import same
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from graphckpt import Graph
from graphckpt.graph.captured_step import CapturedStep
from helpers.hard_modules import D, chain, rng_state

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def rate() -> Tensor:
    return torch.tensor(0.01, device=DEVICE)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=rate(), fused=True, capturable=DEVICE == "cuda")


def adamw_of_ops(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=rate(), capturable=True)


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def scaler(growth_interval: int = 2) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(DEVICE, init_scale=4.0, growth_interval=growth_interval)


class Train(Graph):
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler | None = None,
        *,
        capture: str = "cuda_graph",
    ) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer, lr_sch=scheduler)
        self.config.capture = capture

    def build(self, x: Tensor) -> Tensor:
        loss = self.model(x).float().pow(2).mean()
        loss.backward()
        return loss


def captured(graph: Graph) -> CapturedStep | None:
    return graph._step.captured


def num_alive(captures: CapturedStep) -> int:
    return sum(capture.is_alive for capture in captures.backend._captures)


def model_of(kind: str = "mlp") -> nn.Sequential:
    return chain(kind).to(DEVICE)


def batches(count: int, rows: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, D, generator=generator).to(DEVICE) for _ in range(count)]


def run(
    capture: str,
    *,
    build_model: Callable[[], nn.Module] = model_of,
    make: MakeOptimizer = adamw,
    set_up: Callable[[Train], object] = lambda graph: None,
    inputs: list[Tensor] | None = None,
    between: Callable[[int, Train], None] = lambda number, graph: None,
    schedule: bool = True,
    graph_class: type[Train] = Train,
) -> tuple[list[Any], Train]:
    """Runs ten steps, and returns all that they left: outputs, parameters, buffers, rates, RNG states."""
    model = build_model()
    optimizer = make(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if schedule else None
    graph = graph_class(model, optimizer, scheduler, capture=capture)
    set_up(graph)
    torch.manual_seed(5)
    results: list[Any] = []
    for number, x in enumerate(inputs or batches(10)):
        between(number, graph)
        results += [graph(x), float(optimizer.param_groups[0]["lr"])]
    results += [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
    return [*results, torch.get_rng_state(), rng_state(DEVICE)], graph


def both(num_replays: int | None = 7, plain: list[Any] | None = None, **settings: Any) -> Train:
    """Compares captured steps with plain ones, and returns the graph. Calls before the capture are real steps."""
    plain = plain or run("eager", **settings)[0]
    ours, graph = run("cuda_graph", **settings)
    assert same(ours, plain)
    assert captured(graph).reason is None
    if num_replays is not None:
        assert captured(graph).num_replays == num_replays
    return graph
