"""A stand-in for CUDA's capture API: pools, cuBLAS workspaces and what a failed capture leaves behind.

It follows torch 2.11 to 2.13 in what they do worst: `CUDAGraph.reset()` frees the cuBLAS workspaces of its stream
(2.12, 2.13), and `capture_end()` of an invalid capture leaves the allocators recording (device memory: 2.11; pinned
memory: 2.11, 2.12).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from graphckpt.stores.streams import Streams

Pool = tuple[int, int]
MAIN: Pool = (0, 0)


class FakeStream:
    device = 0

    def wait_stream(self, other: FakeStream) -> None:
        pass


class FakeGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.blocks: list[int] = []  # whose addresses are part of the graph
        self.taken: Pool | None = None
        self.is_done = False

    def capture_begin(self, pool: Pool, capture_error_mode: str) -> None:
        cuda = self.cuda
        if pool in cuda.device_records:
            raise RuntimeError("captures_underway: beginAllocateToPool: already recording to mempool_id")
        cuda.device_records.add(pool)
        cuda.pool_uses[pool] = cuda.pool_uses.get(pool, 0) + 1
        if pool in cuda.host_records:
            raise RuntimeError("CachingHostAllocator: beginAllocateToPool: already recording to mempool_id")
        cuda.host_records.add(pool)
        cuda.capturing = self
        self.taken = pool

    def capture_end(self) -> None:
        cuda = self.cuda
        if cuda.capturing is not self:
            raise RuntimeError("no capture on this stream")
        cuda.capturing = None
        if cuda.is_invalid:
            cuda.is_invalid = False
            raise RuntimeError("operation failed due to a previous error during capture")
        assert self.taken is not None
        cuda.device_records.discard(self.taken)
        cuda.host_records.discard(self.taken)
        self.is_done = True

    def pool(self) -> Pool:
        if not self.is_done:
            raise RuntimeError("pool() without a successful capture")
        assert self.taken is not None
        return self.taken

    def reset(self) -> None:
        if self.is_done:
            self.is_done = False
            self.cuda.release_pool(self.taken)
        self.cuda.clear_workspaces()

    def replay(self) -> None:
        assert self.is_done
        for block in self.blocks:
            pool = self.cuda.pool_of[block]
            is_held = block in self.cuda.alive or (pool != MAIN and self.cuda.pool_uses.get(pool, 0) > 0)
            assert is_held, f"the graph writes to block {block}, which belongs to others now"
            assert block in self.cuda.alive or pool == self.taken, "another graph's pool holds it"


class FakeCuda:
    def __init__(self) -> None:
        self.capturing: FakeGraph | None = None
        self.is_invalid = False
        self.device_records: set[Pool] = set()
        self.host_records: set[Pool] = set()
        self.pool_uses: dict[Pool, int] = {}
        self.pool_of: list[Pool] = []
        self.alive: set[int] = set()
        self.workspaces: dict[Any, int] = {}
        self.stream = FakeStream()
        self.num_pools = 0

    def matmul(self) -> None:
        """Uses the workspace of the present stream."""
        if self.stream not in self.workspaces:
            pool = MAIN if self.capturing is None else self.capturing.taken
            assert pool is not None
            self.pool_of.append(pool)
            self.workspaces[self.stream] = len(self.pool_of) - 1
            self.alive.add(len(self.pool_of) - 1)
        if self.capturing is not None:
            self.capturing.blocks.append(self.workspaces[self.stream])

    def synchronize_in_capture(self) -> None:
        """What no capture allows: it makes it invalid."""
        self.is_invalid = True
        raise RuntimeError("operation not permitted when stream is capturing")

    def clear_workspaces(self) -> None:
        self.alive -= set(self.workspaces.values())
        self.workspaces.clear()

    def new_pool(self) -> Pool:
        self.num_pools += 1
        return 0, self.num_pools

    def end_allocate(self, index: int, pool: Pool) -> None:
        if pool not in self.device_records:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.device_records.discard(pool)

    def release_pool(self, pool: Pool | None) -> None:
        assert pool is not None
        assert self.pool_uses.get(pool, 0) > 0, "a pool is given back that nothing holds"
        self.pool_uses[pool] -= 1

    def snapshot(self) -> list[dict[str, Any]]:
        return [{"total_size": 10 * uses, "segment_pool_id": pool} for pool, uses in self.pool_uses.items()]

    def empty_cache(self) -> None:
        assert not self.device_records, "INTERNAL ASSERT captures_underway.empty()"

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def install(self, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int]) -> None:
        shared = FakeStream()
        stand_ins = {
            "CUDAGraph": lambda: FakeGraph(self),
            "Stream": lambda device: FakeStream(),
            "current_device": lambda: 0,
            "current_stream": lambda device: self.stream,
            "empty_cache": self.empty_cache,
            "graph_pool_handle": self.new_pool,
            "is_current_stream_capturing": lambda: self.capturing is not None,
            "memory_snapshot": self.snapshot,
            "stream": self.on,
            "synchronize": lambda device: None,
        }
        for name, value in stand_ins.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", self.clear_workspaces, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end_allocate, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda index, pool: self.release_pool(pool), raising=False)
        monkeypatch.setattr("graphckpt._compat.torch_version", lambda: version)
        streams = Streams(shared, FakeStream(), FakeStream(), FakeStream())  # type: ignore[arg-type]
        monkeypatch.setattr("graphckpt.capture.cuda_graph.streams_of", lambda device: streams)
