"""Records steps as CUDA graphs. The only file of the capture that calls CUDA."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import torch

from graphckpt._compat import override_stale_capture_stream
from graphckpt.capture.runner import Recording, Runner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@final
class CudaGraphs(Runner):
    """One CUDA graph for each recording; they share a stream and a memory pool.

    Args:
        device: The device of the modules.
    """

    name = "cuda_graph"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def warming(self) -> Iterator[None]:
        """Runs on the stream of the recording: autograd's nodes remember the stream that they were made on."""
        present = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(present)
        with torch.cuda.stream(self._stream):
            yield
        present.wait_stream(self._stream)

    def pool_bytes(self) -> int:
        """Returns the bytes of the segments of the recordings' pool."""
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s.get("segment_pool_id", ())) == tuple(self._pool))

    def record(self, step: Callable[[], Any]) -> Recording:
        """Records ``step`` as one graph."""
        graph = torch.cuda.CUDAGraph()
        gc.collect()  # what is freed while a graph is recorded may belong to another one
        was_collecting = gc.isenabled()
        gc.disable()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # the recording has a pool of its own, and the steps before it had all the rest
        try:
            with (
                override_stale_capture_stream(),
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                output = step()
        except BaseException:
            graph.reset()
            raise
        finally:
            if was_collecting:
                gc.enable()
        return _CudaGraph(graph, output)


@final
class _CudaGraph(Recording):
    def __init__(self, graph: torch.cuda.CUDAGraph, output: Any) -> None:
        self.output = output
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()

    def release(self) -> None:
        self.output = None
        self._graph.reset()
