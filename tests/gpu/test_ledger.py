"""LiveBytes against what CUDA's caching allocator gave out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graphckpt.ledger.live_memory import LiveBytes

pytestmark = pytest.mark.gpu


def test_on_cuda_it_equals_what_the_caching_allocator_gave_out():
    layers = [nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Dropout(0.5), nn.LayerNorm(128)) for _ in range(4)]
    model, x = nn.Sequential(*layers).cuda(), torch.randn(512, 128, device="cuda")
    model(x).square().mean().backward()
    model.zero_grad()
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    with LiveBytes(device="cuda") as live:
        live.track([*model.parameters(), x])
        before = live.live_bytes
        out = model(x)
        assert live.live_bytes - before == torch.cuda.memory_allocated() - start
        out.square().mean().backward()
    assert live.live_bytes > before
