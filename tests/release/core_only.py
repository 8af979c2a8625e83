"""Uses the core as an installation without extras has it; run by ``installed_wheel.py`` and ``test_core_only.py``."""

import torch
from torch import nn

import graphckpt

model = nn.Module()
model.layers = nn.ModuleList([nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(2)])
model.forward = lambda x: model.layers[1](model.layers[0](x))
handle = graphckpt.apply(model, {"layers.*": True})
x = torch.randn(4, 16)
model(x).sum().backward()
with handle.measure():
    model(x).sum().backward()
explanation = handle.explain()
assert explanation.bytes_after < explanation.bytes_before, explanation
