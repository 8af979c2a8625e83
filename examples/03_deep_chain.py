"""A chain of 1000 layers: keep all, sqrt(n) segments, log(n) segments. Run: python examples/03_deep_chain.py."""

import argparse
import time

import torch
from torch import nn

import graphckpt
from graphckpt.units import format_bytes

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--layers", type=int, default=1000)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--batch", type=int, default=256)
args = parser.parse_args()


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


torch.manual_seed(0)
model = nn.Sequential(*[Layer(args.width) for _ in range(args.layers)])
x = torch.randn(args.batch, args.width)
wanted: list[torch.Tensor] | None = None

print(f"{args.layers} layers of width {args.width}, batch {args.batch}")
print(f"{'segments':10} {'kept':>10} {'peak':>10} {'seconds':>8}")
for segments in (None, "sqrt", "log"):
    rules = {"": {"segments": segments}} if segments else {"": False}
    with graphckpt.apply(model, rules) as handle:
        begin = time.perf_counter()
        model(x).square().mean().backward()
        seconds = time.perf_counter() - begin
        grads = [p.grad for p in model.parameters()]
        model.zero_grad()
        with handle.measure():
            model(x).square().mean().backward()
        seen = handle.explain(show=False)
        model.zero_grad()
    kept, peak = format_bytes(seen.bytes_after), format_bytes(seen.peak_bytes or 0)
    print(f"{segments or 'none':10} {kept:>10} {peak:>10} {seconds:8.2f}")
    wanted = wanted or grads
    assert all(torch.equal(a, b) for a, b in zip(grads, wanted, strict=True)), "gradients differ"
print("the gradients are equal in every bit")
