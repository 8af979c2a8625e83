"""Captures steps as CUDA graphs. The only module of this package that calls CUDA."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch

from graphckpt._compat import abandon_capture, clear_cublas_workspaces, override_stale_capture_stream
from graphckpt.capture.backend import Capture, CaptureBackend
from graphckpt.capture.host_random import HostRandom
from graphckpt.errors import GraphError
from graphckpt.stores.streams import streams_of
from graphckpt.tree import tensors_in

# Note [A pool lives as long as a graph in it]
# Graphs share a memory pool by its handle. Once the last of them is gone, the allocator destroys the pool and refuses
# to capture into it. So a capture that finds no other one alive starts a new pool. So does one after a failed capture:
# up to torch 2.12 the allocator of pinned memory treats the failed one as pending for good, and refuses its pool
# ("already recording to mempool_id").

# Note [Every capture has cuBLAS workspaces of its own]
# cuBLAS keeps a workspace for each thread and stream, and its address is part of a captured graph. Captures share one
# stream, so they would share the workspace too; from torch 2.12 on, `CUDAGraph.reset()` frees it under the others
# (pytorch#193402). So workspaces are freed before a capture and after it, as in torch/_inductor/cudagraph_trees.py:
# those that a capture uses are allocated within it, and their memory belongs to its pool.


@final
class CudaGraphBackend(CaptureBackend):
    """One CUDA graph per capture; they share a memory pool.

    Args:
        device: The device of the modules.
    """

    name = "cuda_graph"
    device: torch.device

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream, *self._copy_streams, _ = streams_of(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._captures: weakref.WeakSet[_CapturedCudaGraph] = weakref.WeakSet()

    @contextmanager
    def warmup(self) -> Iterator[None]:
        """Runs on the stream of the capture: autograd nodes remember the stream they were created on."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    def pass_on(self, output: Any) -> None:
        """Lets tensors from the stream of the capture be used on the current one: once freed, they wait for that."""
        current = torch.cuda.current_stream(self.device)
        for tensor in tensors_in(output):
            if tensor.is_cuda:
                tensor.record_stream(current)

    def pool_bytes(self) -> int:
        """Returns the bytes of the segments of the captures' pools."""
        pools = {tuple(capture.pool) for capture in self._captures if capture.is_alive}
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s.get("segment_pool_id", ())) in pools)

    def capture(self, step: Callable[[], Any]) -> Capture:
        """Captures ``step`` as one graph."""
        if torch.cuda.is_current_stream_capturing():
            raise GraphError("it is called inside another capture · fix: config.capture = 'eager'")
        if not any(capture.is_alive for capture in self._captures):
            self._pool = torch.cuda.graph_pool_handle()  # see Note [A pool lives as long as a graph in it]
        graph = torch.cuda.CUDAGraph()
        host_random = HostRandom()
        gc.collect()  # memory freed during a capture may belong to another one
        was_collecting = gc.isenabled()
        try:
            gc.disable()
            torch.cuda.synchronize(self.device)  # raises what an earlier kernel has failed with
            clear_cublas_workspaces()  # see Note [Every capture has cuBLAS workspaces of its own]
            torch.cuda.empty_cache()  # the capture has its own pool; cached memory of earlier steps is released for it
            torch.clear_autocast_cache()  # weights cast outside of the capture would not be cast in it
            output = self._run_capture(graph, step)
            host_random.check()
        except BaseException:
            graph.reset()
            self._pool = torch.cuda.graph_pool_handle()  # see Note [A pool lives as long as a graph in it]
            host_random.restore()
            raise
        finally:
            torch.clear_autocast_cache()
            if was_collecting:
                gc.enable()
        capture = _CapturedCudaGraph(graph, self._pool, output, self._stream)
        self._captures.add(capture)
        return capture

    def _run_capture(self, graph: torch.cuda.CUDAGraph, step: Callable[[], Any]) -> Any:
        # Not `torch.cuda.graph`: when a capture has failed, its exit raises again, which hides the first error and
        # leaves the thread on the stream of the capture.
        with override_stale_capture_stream(), torch.cuda.stream(self._stream):
            has_begun = False
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                has_begun = True
                output = step()
                self._join_copies()
                graph.capture_end()
            except BaseException:
                abandon_capture(graph, self.device, self._pool, has_begun=has_begun)
                raise
            finally:
                clear_cublas_workspaces()  # see Note [Every capture has cuBLAS workspaces of its own]
        return output

    def _join_copies(self) -> None:
        """Waits for copies of blocks outside of the loss: no backward does, and a capture must not end without."""
        for stream in self._copy_streams:
            with torch.cuda.stream(stream):
                is_part = torch.cuda.is_current_stream_capturing()
            if is_part:
                self._stream.wait_stream(stream)


@final
class _CapturedCudaGraph(Capture):
    def __init__(
        self, graph: torch.cuda.CUDAGraph, pool: tuple[int, int], output: Any, stream: torch.cuda.Stream
    ) -> None:
        self.output = output
        self.pool = pool
        self.is_alive = True
        self._graph = graph
        self._stream = stream

    def replay(self) -> None:
        self._graph.replay()
        # Gradients and optimizer states were allocated in the warm-up, on the stream of the capture. Once they are
        # freed, that stream reuses their memory at once, and must not overtake a replay on this one.
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def release(self) -> None:
        self.output = None
        self.is_alive = False
        self._graph.reset()
