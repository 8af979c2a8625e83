"""Writes a plan, a device profile and the state of a Graph by the code of another commit: see README.md."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path


def main(code: str, target: str) -> None:
    sys.path.insert(0, code)
    import torch  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415

    import graphckpt  # noqa: PLC0415

    for module in ("simulation.profile", "planning.profile", "planning.device.profile"):  # the newest one first
        try:
            load_profile = importlib.import_module(f"graphckpt.{module}").load_profile
            break
        except ImportError:
            continue

    torch.manual_seed(0)
    folder = Path(target)
    model, x, y = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)), torch.randn(8, 2), torch.randint(2, (8,))
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(4)))
    data = torch.randn(64, 8)
    graphckpt.plan(layers, lambda: layers(data).sum().backward(), memory_budget="min").save(folder / "plan.yaml")
    load_profile("h200").save(folder / "profile.yaml", comment="a comment")
    model.zero_grad()
    optimizer = torch.optim.AdamW(model.parameters())

    class Train(graphckpt.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.loss = model, nn.CrossEntropyLoss()
            self.add_optimizer(optimizer, lr_sch=torch.optim.lr_scheduler.StepLR(optimizer, 2))

        def build(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.loss(self.model(x), y)
            loss.backward()
            return loss

    graph = Train()
    for _ in range(3):
        graph(x, y)
    torch.save(dict(graph.state_dict()), folder / "graph.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
