"""A step in OneFlow's style: two blocks, one recomputed. Run: python examples/01_blocks.py [--steps 100]."""

import argparse

import torch
from torch import nn

from graphckpt import Graph

# Legend: B batch, D input width
B, D = 64, 256

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=100)
args = parser.parse_args()

torch.manual_seed(0)
part_1 = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
part_2 = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
model = nn.Sequential(part_1, part_2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


class TrainStep(Graph):
    def __init__(self) -> None:
        super().__init__()
        self.model = model  # a module becomes a block, and so does every module in it
        self.loss_fn = nn.CrossEntropyLoss()
        self.model[0].config.activation_checkpointing = True  # part_1 runs again in backward
        self.add_optimizer(optimizer)  # step and zero_grad follow each backward

    def build(self, x_BD: torch.Tensor, y_B: torch.Tensor) -> torch.Tensor:
        loss = self.loss_fn(self.model(x_BD), y_B)
        loss.backward()
        return loss


step = TrainStep()
centers = torch.randn(10, D)
for number in range(args.steps):
    y_B = torch.randint(0, 10, (B,))
    x_BD = centers[y_B] + 2.0 * torch.randn(B, D)
    loss = step(x_BD, y_B)
    if number % 20 == 0 or number == args.steps - 1:
        print(f"step {number:3d}  loss {loss.item():.4f}")

step.explain()
