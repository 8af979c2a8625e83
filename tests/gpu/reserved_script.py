"""Runs the first steps of a process on CUDA, within a share of the least memory that is predicted for them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

import graphckpt
from graphckpt.planning.steps import FakeStep, made_step
from graphckpt.simulation.fake_device import FakeDevice
from graphckpt.simulation.profile import load_profile

NUM_STEPS = 5


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def make() -> tuple[nn.Module, Callable[[], object]]:
    device = torch.device("cuda")
    model = nn.Sequential(*(Layer(1024) for _ in range(12)), nn.Linear(1024, 16384)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.zeros(4096, 1024, device=device)
    labels = torch.zeros(4096, dtype=torch.long, device=device)

    def step() -> None:
        F.cross_entropy(model(x), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("policy", choices=["keep", "full"])
    parser.add_argument("--share", type=float, help="of the least capacity that is predicted")
    options = parser.parse_args()
    policies = {} if options.policy == "keep" else {f"{number}": True for number in range(12)}
    capability = torch.cuda.get_device_capability()
    workspace = 32 * 2**20 if capability[0] >= 9 else 8_519_680
    machine = replace(load_profile("h100"), capability=capability, workspace_bytes=workspace)
    fake, model = made_step(make, FakeDevice(machine), "make")
    assert isinstance(fake, FakeStep)
    with graphckpt.apply(model, policies):
        run = fake.run()
    assert run.allocations is not None
    replayed = fake.replay(run.allocations)
    assert replayed is not None
    if options.share is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        limit = options.share * fake.least_capacity(run.allocations)
        torch.cuda.set_per_process_memory_fraction(limit / total)
    retries = [0]
    is_out_of_memory = False
    try:
        model, step = make()
        with graphckpt.apply(model, policies):
            for _ in range(NUM_STEPS):
                step()
                torch.cuda.synchronize()
                retries.append(torch.cuda.memory_stats()["num_alloc_retries"])
    except torch.OutOfMemoryError:
        is_out_of_memory = True
    print(
        json.dumps(
            {
                "peak_bytes": torch.cuda.max_memory_allocated(),
                "reserved_bytes": torch.cuda.max_memory_reserved(),
                "predicted_peak_bytes": run.peak_bytes,
                "predicted_reserved_bytes": replayed.reserved_bytes,
                "num_late_retries": retries[-1] - retries[2] if len(retries) > 3 else 0,
                "is_out_of_memory": is_out_of_memory,
            }
        )
    )


if __name__ == "__main__":
    main()
