"""Steps of a Graph in a process whose address space is limited: prints ``same`` if its weights are those without."""

from __future__ import annotations

import resource
from pathlib import Path

import torch
from torch import nn

from graphckpt import Graph

ROWS, WIDTH, MIB = 40_000, 256, 2**20
NUM_STEPS, LIMITED, HEADROOM = 3, 1, 650 * MIB


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).tanh().sin().cos().exp()


class Step(Graph):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.add_optimizer(torch.optim.SGD(self.layers.parameters(), lr=0.01))
        self.config.on_out_of_memory = "replan"
        self.config.measure = False

    def build(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        loss = x.square().mean()
        loss.backward()
        return loss


def train(*, is_limited: bool) -> list[torch.Tensor]:
    step, x = Step(), torch.ones(ROWS, WIDTH)
    losses = []
    for number in range(NUM_STEPS):
        if is_limited and number == LIMITED:
            used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + HEADROOM, resource.RLIM_INFINITY))
        losses.append(step(x))
    return [*losses, *(p.detach().clone() for p in step.layers.origin.parameters())]


if __name__ == "__main__":
    expected = train(is_limited=False)
    limited = train(is_limited=True)
    print("same" if all(map(torch.equal, expected, limited)) else "different")
