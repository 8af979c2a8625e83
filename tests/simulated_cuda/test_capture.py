"""Captures on the simulated device: what is recorded, what replays draw, and CUDA's errors."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from simulated_cuda.library import use_schedule

pytestmark = pytest.mark.gpu

N = 64


@pytest.fixture
def stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Graphs in the tracebacks of expected errors hold their pools."""
    yield
    gc.collect()


def capture(stream: torch.cuda.Stream, step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step()
    return graph


def fails(match: str = "due to a previous error during capture", kind: type[Exception] = torch.AcceleratorError) -> Any:
    return pytest.raises(kind, match=match)


@contextmanager
def failed_capture(stream: torch.cuda.Stream) -> Iterator[torch.cuda.CUDAGraph]:
    """A capture in which something is not permitted, so that it cannot end."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        yield graph
        with fails():
            graph.capture_end()


# --- what is recorded


def test_a_capture_runs_nothing_and_a_replay_everything(schedule: str, stream: torch.cuda.Stream) -> None:
    tensor = torch.zeros(N, device="cuda")

    def step() -> None:
        assert torch.cuda.is_current_stream_capturing()
        tensor.add_(1)

    graph = capture(stream, step)
    assert not torch.cuda.is_current_stream_capturing()
    assert tensor.tolist() == [0.0] * N
    for number in range(3):
        graph.replay()
        assert tensor.tolist() == [number + 1.0] * N


def test_streams_join_by_events(schedule: str, stream: torch.cuda.Stream, side: torch.cuda.Stream) -> None:
    tensor, other = torch.zeros(N, device="cuda"), torch.zeros(N, device="cuda")

    def step() -> None:
        tensor.add_(1)
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            assert torch.cuda.is_current_stream_capturing()
            other.copy_(tensor)
        stream.wait_stream(side)
        tensor.add_(other)

    graph = capture(stream, step)
    for value in (2.0, 6.0, 14.0):
        graph.replay()
        assert tensor.tolist() == [value] * N


def test_a_wait_left_out_in_a_capture_shows(stream: torch.cuda.Stream, side: torch.cuda.Stream) -> None:
    tensor, other = torch.zeros(N, device="cuda"), torch.zeros(N, device="cuda")

    def step() -> None:
        tensor.zero_()
        side.wait_stream(stream)
        tensor.add_(1)
        with torch.cuda.stream(side):
            other.copy_(tensor)  # before or after the addition
        stream.wait_stream(side)

    graph = capture(stream, step)
    results = set()
    for seed in range(20):
        use_schedule(f"random:{seed}")
        graph.replay()
        results.add(other.tolist()[0])
    assert results == {0.0, 1.0}


def test_memory_of_a_graph_is_its_own(schedule: str, stream: torch.cuda.Stream) -> None:
    x = torch.ones(N, device="cuda")
    out: list[torch.Tensor] = []
    graph = capture(stream, lambda: out.append((x * 2) * 3))  # the first product is freed in the capture
    with torch.cuda.stream(stream):
        others = [torch.empty(N, device="cuda") for _ in range(8)]
    segments = {s["address"]: s["segment_pool_id"] for s in torch.cuda.memory_snapshot()}
    assert segments[out[0].data_ptr()] == graph.pool()
    assert all(segments[other.data_ptr()] == (0, 0) for other in others)
    graph.replay()
    assert out[0].tolist() == [6.0] * N


def test_a_use_after_free_in_a_capture_shows(stream: torch.cuda.Stream, side: torch.cuda.Stream) -> None:
    x = torch.ones(N, device="cuda")
    out: list[torch.Tensor] = []

    def step() -> None:
        source = x * 2
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            copied = source * 1
        del source  # before the stream waits for its reader
        out.append(torch.zeros(N, device="cuda"))
        stream.wait_stream(side)
        out.append(copied * 1)

    graph = capture(stream, step)
    use_schedule("lazy")
    graph.replay()
    assert out[1].tolist() == [0.0] * N, "what was written to the block since"


def test_a_graph_that_is_gone_leaves_no_memory(stream: torch.cuda.Stream) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    x = torch.ones(2**20, device="cuda")
    graph = capture(stream, partial(torch.mul, x, 2))
    assert torch.cuda.memory_reserved() > before + x.nbytes
    graph.reset()
    del x
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before


def test_a_replay_does_not_use_memory_that_was_freed(stream: torch.cuda.Stream) -> None:
    x = torch.ones(2**20, device="cuda")
    holder = [x]
    graph = capture(stream, lambda: holder[0].add_(1))
    holder.clear()
    del x
    torch.cuda.empty_cache()
    graph.replay()
    with fails("an illegal memory access"):
        torch.cuda.synchronize()


# --- random numbers


def test_replays_draw_new_numbers_and_those_of_eager_ops(schedule: str, stream: torch.cuda.Stream) -> None:
    x = torch.ones(256, device="cuda")
    out: list[torch.Tensor] = []

    def step() -> None:
        out[:] = [nn.functional.dropout(x, 0.5), torch.randn(4, device="cuda")]

    def draws(call: Callable[[], None]) -> list[torch.Tensor]:
        call()
        seen = [torch.cuda.get_rng_state()]
        for _ in range(2):
            call()
            seen += [t.clone() for t in out]
        return seen

    torch.cuda.manual_seed(5)
    eager = draws(step)
    torch.cuda.manual_seed(5)
    replays = draws(capture(stream, step).replay)
    assert all(torch.equal(a, b) for a, b in zip(replays, eager, strict=True))
    assert not torch.equal(replays[1], replays[3])


def test_the_state_can_be_put_back_in_a_capture(stream: torch.cuda.Stream) -> None:
    out: list[torch.Tensor] = []

    def step() -> None:
        state = torch.cuda.get_rng_state()
        out.append(torch.rand(8, device="cuda"))
        torch.cuda.set_rng_state(state)
        out.append(torch.rand(8, device="cuda"))

    graph = capture(stream, step)
    results = []
    for _ in range(2):
        graph.replay()
        assert torch.equal(*out)
        results.append(out[0].clone())
    assert not torch.equal(*results)


# --- what is not permitted

FORBIDDEN: dict[str, Callable[[], object]] = {
    "synchronize the device": torch.cuda.synchronize,
    "synchronize the stream": lambda: torch.cuda.current_stream().synchronize(),
    "query the stream": lambda: torch.cuda.current_stream().query(),
    "query an event": lambda: torch.cuda.default_stream().record_event().query(),
    "synchronize an event": lambda: torch.cuda.default_stream().record_event().synchronize(),
    "item": lambda: torch.ones((), device="cuda").item(),
    "nonzero": lambda: torch.ones(3, device="cuda").nonzero(),
    "a mask as index": lambda: torch.ones(3, device="cuda")[torch.ones(3, device="cuda") > 0],
    "copy from pageable memory": lambda: torch.ones(N).to("cuda"),
    "copy from pageable memory, not blocking": lambda: torch.ones(N).to("cuda", non_blocking=True),
    "copy to pageable memory": lambda: torch.ones(N, device="cuda").cpu(),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_capture_does_not_permit_calls_that_synchronize(name: str, stream: torch.cuda.Stream) -> None:
    with failed_capture(stream) as graph:
        with fails("operation not permitted when stream is capturing"):
            FORBIDDEN[name]()
        with fails():
            torch.ones(3, device="cuda")
    assert not torch.cuda.is_current_stream_capturing()
    torch.cuda.synchronize()
    with fails("without a preceding successful capture", RuntimeError):
        graph.pool()


@pytest.mark.parametrize(("call", "arguments"), [("cudaHostRegister", (4096, 1)), ("cudaHostUnregister", ())])
def test_pinning_in_a_capture(call: str, arguments: tuple[int, ...], stream: torch.cuda.Stream) -> None:
    flat = torch.frombuffer(bytearray(4096), dtype=torch.uint8)
    with failed_capture(stream):
        assert getattr(torch.cuda.cudart(), call)(flat.data_ptr(), *arguments) == 900


def test_a_copy_of_pinned_memory_is_recorded(schedule: str, stream: torch.cuda.Stream) -> None:
    source = torch.ones(N).pin_memory()
    target = torch.zeros(N, device="cuda")
    graph = capture(stream, lambda: target.copy_(source, non_blocking=True))
    source.fill_(4.0)
    graph.replay()
    assert target.tolist() == [4.0] * N


def test_unjoined_work(stream: torch.cuda.Stream, side: torch.cuda.Stream) -> None:
    tensor = torch.zeros(N, device="cuda")

    def step() -> None:
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            tensor.add_(1)

    with fails("capturing stream has unjoined work"):
        capture(stream, step)
    torch.cuda.set_stream(torch.cuda.default_stream())  # torch.cuda.graph leaves its own


def test_an_event_of_a_capture_that_has_ended(stream: torch.cuda.Stream) -> None:
    event = torch.cuda.Event()
    graph = capture(stream, lambda: event.record(stream))
    for use in (event.query, event.synchronize, lambda: torch.cuda.current_stream().wait_event(event)):
        with fails("event last recorded in a capturing stream"):
            use()
    graph.reset()


def test_an_event_of_another_capture(stream: torch.cuda.Stream, side: torch.cuda.Stream) -> None:
    graphs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
    for graph, own in zip(graphs, (stream, side), strict=True):
        with torch.cuda.stream(own):
            graph.capture_begin()
    with fails("merge of separate capture sequences"):
        side.wait_event(stream.record_event())
    for graph, own in zip(graphs, (stream, side), strict=True):
        with torch.cuda.stream(own), fails():
            graph.capture_end()


def test_the_default_stream_and_an_event_of_outside(stream: torch.cuda.Stream) -> None:
    event = torch.cuda.default_stream().record_event()
    with failed_capture(stream), fails("dependency created on uncaptured work"):
        stream.wait_event(event)
    with fails("non-default stream", RuntimeError):
        torch.cuda.CUDAGraph().capture_begin()
    with failed_capture(stream), fails("legacy stream"):
        torch.cuda.default_stream().wait_stream(stream)


def test_a_pool_is_gone_with_its_last_graph(stream: torch.cuda.Stream) -> None:
    graph = capture(stream, lambda: torch.ones(N, device="cuda"))
    pool = graph.pool()
    graph.reset()
    with fails("use_count > 0", RuntimeError), torch.cuda.stream(stream):
        torch.cuda.CUDAGraph().capture_begin(pool=pool)
