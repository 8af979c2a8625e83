"""Several CUDA graphs: shared pools, and the state of the others after one fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphckpt._compat import clear_cublas_workspaces
from graphckpt.graph.capture import Capture, CudaGraphBackend

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

N = 8


@pytest.fixture
def graphs() -> CudaGraphBackend:
    """A backend after a warm-up, which makes a workspace of cuBLAS on the stream of the capture."""
    graphs = CudaGraphBackend(torch.device("cuda", 0))
    with graphs.warmup():
        product()
    return graphs


def product() -> torch.Tensor:
    x = torch.full((N, N), 2.0, device="cuda")
    return x @ x


def replay(graphs: CudaGraphBackend, capture: Capture) -> None:
    """The result is right, and nothing is written to memory that was let go since the capture: it belongs to others."""
    with graphs.warmup():  # on the stream of the captures
        others = [torch.zeros(128, device="cuda") for _ in range(8)]
    capture.output.zero_()
    capture.replay()
    assert torch.equal(capture.output, torch.full((N, N), 4.0 * N, device="cuda"))
    assert all(torch.equal(other, torch.zeros(128, device="cuda")) for other in others)


def test_releasing_one_capture_leaves_the_others_their_workspace(graphs: CudaGraphBackend) -> None:
    train, evaluate = graphs.capture(product), graphs.capture(product)
    train.release()
    torch.cuda.empty_cache()
    replay(graphs, evaluate)
    with graphs.warmup():
        product()
    replay(graphs, evaluate)


def test_a_graph_of_another_pool_does_not_share_the_workspace(graphs: CudaGraphBackend) -> None:
    first, second = graphs.capture(product), CudaGraphBackend(torch.device("cuda", 0)).capture(product)
    first.release()
    torch.cuda.empty_cache()
    replay(graphs, second)


def test_a_capture_after_a_failed_one_beside_a_live_one(graphs: CudaGraphBackend) -> None:
    live = graphs.capture(product)
    num_bytes = graphs.pool_bytes()
    assert num_bytes > 0
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        graphs.capture(torch.cuda.synchronize)
    later = graphs.capture(product)
    replay(graphs, live)
    replay(graphs, later)
    assert graphs.pool_bytes() == 2 * num_bytes, "both pools count"
    later.release()
    live.release()
    assert graphs.pool_bytes() == 0


def test_a_warm_up_has_its_workspaces_in_place_of_those_of_eager_steps() -> None:
    """A plan is checked in eager steps: what the warm-up allocates beside their workspaces exceeds its budget."""
    clear_cublas_workspaces()
    product()
    torch.cuda.synchronize()
    eager = torch.cuda.memory_allocated()
    backend = CudaGraphBackend(torch.device("cuda", 0))
    for _ in range(2):
        with backend.warmup():
            product()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= eager


def test_a_capture_that_does_not_begin_leaves_no_allocator_recording(
    graphs: CudaGraphBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator of device memory has begun when that of pinned memory refuses."""
    live = graphs.capture(product)
    begin = torch.cuda.CUDAGraph.capture_begin

    def refuse(graph: torch.cuda.CUDAGraph, pool: tuple[int, int] | None = None, **how: Any) -> None:
        if pool is None:  # up to torch 2.12 another capture, of nothing, then puts the random generator in order
            begin(graph, **how)
            return
        torch._C._cuda_beginAllocateToPool(0, pool)
        raise RuntimeError("already recording to mempool_id")

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda.CUDAGraph, "capture_begin", refuse)
        with pytest.raises(RuntimeError, match="already recording to mempool_id"):
            graphs.capture(product)
    torch.cuda.empty_cache()
    replay(graphs, live)
    replay(graphs, graphs.capture(product))
    live.release()
    torch.cuda.empty_cache()


def test_a_capture_that_does_not_begin_gives_back_no_pool_of_others(
    graphs: CudaGraphBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = graphs.capture(product)

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("generator is captured already")

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda.CUDAGraph, "capture_begin", refuse)
        with pytest.raises(RuntimeError, match="generator"):
            graphs.capture(product)
    torch.cuda.empty_cache()
    assert graphs.pool_bytes() > 0
    replay(graphs, live)
    replay(graphs, graphs.capture(product))
