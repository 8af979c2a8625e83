"""What CUDA graphs share, and what a failed one leaves to the others, by a stand-in for CUDA."""

from __future__ import annotations

import pytest
import torch
from helpers.fake_cuda import FakeCuda

from graphckpt.capture.cuda_graph import CudaGraphBackend


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    made = FakeCuda()
    made.install(monkeypatch, (2, 13))  # the later ones need less healing, which the stand-in does not have
    return made


@pytest.fixture
def graphs(cuda: FakeCuda) -> CudaGraphBackend:
    return CudaGraphBackend(torch.device("cuda", 0))


def test_releasing_one_capture_leaves_the_others_their_workspace(cuda: FakeCuda, graphs: CudaGraphBackend) -> None:
    with graphs.warmup():
        cuda.matmul()
    train, evaluate = graphs.capture(cuda.matmul), graphs.capture(cuda.matmul)
    train.release()
    evaluate.replay()
    with graphs.warmup():
        cuda.matmul()
    evaluate.replay()


def test_a_graph_of_another_pool_does_not_share_the_workspace(cuda: FakeCuda, graphs: CudaGraphBackend) -> None:
    other = CudaGraphBackend(torch.device("cuda", 0))
    first, second = graphs.capture(cuda.matmul), other.capture(cuda.matmul)
    first.release()
    second.replay()
    assert not cuda.workspaces, "eager steps would write to memory that belongs to a capture's pool"


def fail(cuda: FakeCuda, graphs: CudaGraphBackend) -> None:
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        graphs.capture(cuda.synchronize_in_capture)


def test_a_capture_after_a_failed_one_beside_a_live_one(cuda: FakeCuda, graphs: CudaGraphBackend) -> None:
    live = graphs.capture(cuda.matmul)
    fail(cuda, graphs)
    later = graphs.capture(cuda.matmul)
    live.replay()
    later.replay()
    assert graphs.pool_bytes() == 20, "both pools count"
    later.release()
    live.release()
    assert set(cuda.pool_uses.values()) == {0}
    assert graphs.pool_bytes() == 0


def test_a_capture_that_does_not_begin_leaves_no_allocator_recording(cuda: FakeCuda, graphs: CudaGraphBackend) -> None:
    live = graphs.capture(cuda.matmul)
    cuda.host_records.add(graphs._pool)  # as an earlier failure of another library leaves it
    with pytest.raises(RuntimeError, match="already recording to mempool_id"):
        graphs.capture(cuda.matmul)
    cuda.empty_cache()
    live.replay()
    graphs.capture(cuda.matmul).replay()


def test_a_capture_that_does_not_begin_at_all_gives_back_no_pool_of_others(
    cuda: FakeCuda, graphs: CudaGraphBackend
) -> None:
    live = graphs.capture(cuda.matmul)
    pool = graphs._pool

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("generator is captured already")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("helpers.fake_cuda.FakeGraph.capture_begin", refuse)
        with pytest.raises(RuntimeError, match="generator"):
            graphs.capture(cuda.matmul)
    assert cuda.pool_uses[pool] == 1
    live.replay()
