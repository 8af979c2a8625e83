"""The bytes that `memory_budget="max"` stands for on a CUDA device, by a stand-in for its allocator."""

from __future__ import annotations

import pytest
import torch

from graphckpt.planning.options import available_bytes


def segment(total: int, allocated: int, pool: tuple[int, int] = (0, 0), device: int = 0) -> dict[str, object]:
    return {"device": device, "total_size": total, "allocated_size": allocated, "segment_pool_id": pool}


def test_free_blocks_in_the_pool_of_a_capture_are_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = [segment(100, 60), segment(1000, 10, (0, 1)), segment(500, 0, (0, 1), device=1)]
    of_this = [s for s in segments if s["device"] == 0]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7000, 8000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: sum(s["total_size"] for s in of_this))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: sum(s["allocated_size"] for s in of_this))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for device in ("cuda:0", "cuda"):
        assert available_bytes(torch.device(device), alive=5) == 7000 + 40 + 5
        assert available_bytes(torch.device(device), alive=5, sharers=2) == 3500 + 40 + 5
