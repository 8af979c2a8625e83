"""Places for kept tensors on a CUDA device: no race, less memory by the allocator's count, legal in a capture."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import graphckpt
from graphckpt import Segments, Selective
from graphckpt.stores import Disk, Host, Placement, TensorGroup
from graphckpt.stores.disk import BLOCK, CHUNK
from graphckpt.stores.host import HostStore
from graphckpt.stores.pinned import pin, streams_of
from graphckpt.stores.tensor_store import TensorStore

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.filterwarnings("ignore:offload to 'disk' saves"),  # where the temporary folder is in memory
]

MIB = 2**20
D = 128  # width
COUNTS = "it counts bytes, whatever the order of work"


class Pinned:
    """CUDA's runtime, with a record of what is registered."""

    def __init__(self, runtime: Any) -> None:
        self.runtime = runtime
        self.num_calls = 0
        self.alive: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> Any:
        self.num_calls += 1
        self.alive[address] = num_bytes
        return self.runtime.cudaHostRegister(address, num_bytes, flags)

    def cudaHostUnregister(self, address: int) -> Any:
        del self.alive[address]
        return self.runtime.cudaHostUnregister(address)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runtime, name)


@pytest.fixture(scope="session")
def why_not_registered() -> str | None:
    """Registers one page, which some sandboxes cannot."""
    notes: list[str] = []
    torch.zeros(1, device="cuda")
    _, unpin = pin(4096, torch.cuda.cudart(), lambda: None, notes.append)
    unpin()
    return notes[0] if notes else None


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch, why_not_registered: str | None) -> Iterator[Pinned]:
    if why_not_registered is not None:
        pytest.skip(why_not_registered)
    record = Pinned(torch.cuda.cudart())
    monkeypatch.setattr(torch.cuda, "cudart", lambda: record)
    yield record
    end = time.monotonic() + 5  # the thread of autograd may still hold what its last backward has used
    while record.alive and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    assert record.alive == {}, "pinned memory is left behind"


# --- the place by itself


def place_on_cuda(in_flight_bytes: int | None = None) -> HostStore:
    place = Host(in_flight_bytes).byte_store_for(torch.device("cuda", torch.cuda.current_device()), fail)
    assert isinstance(place, HostStore)
    return place


def fail(note: str) -> None:
    raise AssertionError(note)


def group(number: int) -> TensorGroup:
    made = TensorGroup(f"layers.{number}", list, fail)
    made.number = number
    return made


def data(num_bytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(256, (num_bytes,), dtype=torch.uint8, device="cuda", generator=generator)


def test_memory_is_pinned_and_as_big_as_the_step(pinned: Pinned) -> None:
    """PyTorch's own pinned memory would take 8 MiB for 5."""
    place = place_on_cuda()
    block = group(0)
    for step in range(5):
        place.begin_step()
        handle = place.put(data(5 * MIB, step), block)
        assert handle.block.flat.is_pinned()  # type: ignore[attr-defined]
        place.close_group(block)
        assert torch.equal(place.get(handle, block), data(5 * MIB, step))
        place.free(handle)
        assert place.host_bytes == sum(pinned.alive.values()) == 5 * MIB
    assert pinned.num_calls == 2, "one buffer in the first step, one slab in the second"
    place.close()


@pytest.mark.serial
@pytest.mark.real_gpu("it measures time")
def test_the_way_back_overlaps_with_computation(pinned: Pinned) -> None:
    place = place_on_cuda(0)
    block = group(0)

    def seconds(call: Callable[[], object]) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3

    handle = place.put(data(256 * MIB, 0), block)
    place.get(handle, block)  # once to get everything going
    copying = seconds(lambda: place.get(handle, block))
    cycles = 10_000_000
    cycles = int(cycles * copying / seconds(lambda: torch.cuda._sleep(cycles)))
    computing = seconds(lambda: torch.cuda._sleep(cycles))

    def both() -> None:
        place.prefetch([handle], block)
        torch.cuda._sleep(cycles)
        place.get(handle, block)

    together = seconds(both)
    assert together < 0.75 * (copying + computing), (copying, computing, together)
    place.free(handle)
    place.close()


def test_another_compute_stream(pinned: Pinned) -> None:
    """What was sent for from one stream and is taken on another comes in memory of the other."""
    place = place_on_cuda(0)
    side = torch.cuda.Stream()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for step in range(50):
        place.begin_step()
        block = group(0)
        handles = [place.put(data(MIB, step + n), block) for n in range(3)]
        place.prefetch(handles, block)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for n, handle in enumerate(handles):
                wrong += (place.get(handle, block) != data(MIB, step + n)).sum()
                place.free(handle)
        torch.cuda.current_stream().wait_stream(side)
    assert wrong.item() == 0
    place.close()


# --- the disk by itself


def store_on_disk(folder: Path) -> TensorStore:
    return Placement(offload=Disk(str(folder)), min_elements=0).store


def put(store: TensorStore, tensor: torch.Tensor, block: str = "h.0", note: Callable[[str], None] = print) -> Any:
    opened = store.open_group(TensorGroup(block, list, note))
    key = store.put(tensor, opened)
    store.close_group(opened)
    return key


def test_a_chunk_is_pinned_for_all_that_goes_to_disk_and_one_for_the_way_back(pinned: Pinned, tmp_path: Path) -> None:
    store = store_on_disk(tmp_path)
    sizes = (5000, CHUNK + 5000, 10)
    keys = [put(store, data(size, seed)) for seed, size in enumerate(sizes)]
    for seed in (2, 1, 0):
        torch.full((sizes[seed],), 0x5A, dtype=torch.uint8, device="cuda")
        assert torch.equal(store.get(keys[seed]), data(sizes[seed], seed))
    assert list(pinned.alive.values()) == [CHUNK + BLOCK] * 2
    del keys
    store.close()


def test_bytes_from_disk_on_another_stream(tmp_path: Path) -> None:
    """They come in memory of the stream that they were prefetched on."""
    store, side = store_on_disk(tmp_path), torch.cuda.Stream()
    keys = [put(store, data(5000, seed), f"h.{seed}") for seed in range(3)]
    store.get(keys[2])  # prefetches the one before
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for seed in (1, 0):
            assert torch.equal(store.get(keys[seed]), data(5000, seed))
    torch.cuda.current_stream().wait_stream(side)
    del keys
    store.close()


def test_memory_for_the_disk_that_cannot_be_registered_falls_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2))
    store, notes = store_on_disk(tmp_path), []
    key = put(store, data(5000, 0), note=notes.append)
    assert any("CUDA error 2" in note for note in notes)
    assert torch.equal(store.get(key), data(5000, 0))
    del key
    store.close()


# --- as a user sets it


def wide_chain(*, has_dropout: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    parts = [(nn.Linear(D, 4 * D), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * D, D)) for _ in range(8)]
    layers = [[part for part in layer if has_dropout or not isinstance(part, nn.Dropout)] for layer in parts]
    return nn.Sequential(*(nn.Sequential(*layer) for layer in layers)).cuda()


def allocated(model: nn.Module, x: torch.Tensor) -> tuple[int, int]:
    """Bytes that a forward leaves allocated, and the peak of the step, by the allocator's count."""
    for _ in range(2):
        model(x).sum().backward()  # learns, fills cuBLAS's workspace, makes gradients and slabs
    gc.collect()  # of other tests: what the collector frees in between would be counted
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = model(x).sum()
    after = torch.cuda.memory_allocated()
    loss.backward()
    return after - before, torch.cuda.max_memory_allocated() - before


RULES = {"keep": None, "full": True, "selective": Selective("matmul"), "segments": Segments("sqrt")}


@pytest.mark.one_schedule(COUNTS)
@pytest.mark.parametrize("is_offloaded", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_the_allocator_confirms_what_explain_says(
    request: pytest.FixtureRequest, rule: Any, is_offloaded: bool
) -> None:
    """But for the last block, whose copies are under way when forward ends: with nothing in flight, to the byte."""
    x = torch.randn(256, D, device="cuda")
    plain_kept, plain_peak = allocated(wide_chain(has_dropout=True), x)
    model = wide_chain(has_dropout=True)
    fields = {"activation_checkpointing": RULES[rule], "offload": Host(in_flight_bytes=0) if is_offloaded else False}
    with graphckpt.apply(model, {"" if rule == "segments" else "[0-7]": fields}) as handle:
        pinned: Pinned | None = request.getfixturevalue("pinned") if is_offloaded else None
        kept, peak = allocated(model, x)
        with handle.measure():
            model(x).sum().backward()
        explanation = handle.explain(show=False)
        assert pinned is None or sum(pinned.alive.values()) >= explanation.bytes_host > 0
    rounding = 512 * 64  # the allocator rounds each block up to 512 bytes
    assert abs((plain_kept - kept) - explanation.bytes_saved) <= rounding
    assert peak < plain_peak or (rule == "keep" and not is_offloaded)
    model.zero_grad()
    torch.cuda.synchronize()


@pytest.mark.one_schedule(COUNTS)
def test_in_flight_is_one_block(pinned: Pinned) -> None:
    x = torch.randn(1024, D, device="cuda")
    kept = {}
    for bound in (None, 0):
        model = wide_chain()
        with graphckpt.apply(model, {"[0-7]": {"offload": Host(in_flight_bytes=bound)}}):
            kept[bound], _ = allocated(model, x)
    plain_kept, _ = allocated(wide_chain(), x)
    assert 0 < kept[None] - kept[0] <= plain_kept / 8 * 1.1


@pytest.mark.serial
@pytest.mark.one_schedule(COUNTS)
def test_device_memory_does_not_grow(pinned: Pinned) -> None:
    model = wide_chain()
    x = torch.randn(128, D, device="cuda")
    with graphckpt.apply(model, {"[0-7]": {"offload": True}}):
        for step in range(100):
            model(x).sum().backward()
            if step == 2:
                torch.cuda.synchronize()
                reserved = torch.cuda.memory_reserved()
        torch.cuda.synchronize()
        assert torch.cuda.memory_reserved() == reserved


@pytest.mark.parametrize("rule", [None, True], ids=["all that is saved", "full"])
@pytest.mark.parametrize("bound", [None, 0])
def test_a_whole_step_in_a_cuda_graph(pinned: Pinned, bound: int | None, rule: Any) -> None:
    """Captured by hand: nothing is pinned in it, it needs less memory than without offload, replays give the bits."""

    def captured(model: nn.Module) -> tuple[torch.cuda.CUDAGraph, torch.Tensor, int]:
        static = torch.randn(256, D, device="cuda")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                model.zero_grad(set_to_none=True)
                model(static).square().sum().backward()
        torch.cuda.current_stream().wait_stream(stream)
        model.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.synchronize()
        calls = pinned.num_calls
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            model(static).square().sum().backward()
        assert pinned.num_calls == calls
        return graph, static, torch.cuda.max_memory_allocated() - before

    plain, ours = wide_chain(), wide_chain()
    plain_graph, plain_input, plain_peak = captured(plain)
    fields = {"activation_checkpointing": rule, "offload": Host(in_flight_bytes=bound)}
    with graphckpt.apply(ours, {"[0-7]": fields}):
        our_graph, our_input, our_peak = captured(ours)
        assert our_peak < plain_peak
        for seed in range(5):
            torch.manual_seed(seed)
            x = torch.randn(256, D, device="cuda")
            plain_input.copy_(x)
            our_input.copy_(x)
            plain_graph.replay()
            our_graph.replay()
            torch.cuda.synchronize()
            assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))
        ours.zero_grad(set_to_none=True)
        ours(x).square().sum().backward()  # an eager step after it
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))
        torch.cuda.synchronize()
        del our_graph


# --- in a capture made by hand


@pytest.mark.parametrize("what", ["buffer", "store"])
def test_a_buffer_or_store_collected_in_a_capture_is_unpinned_after_it(pinned: Pinned, what: str) -> None:
    """Python's garbage collector may run there, and CUDA forbids to unpin memory, or to wait, in a capture."""
    place: HostStore | None = place_on_cuda()
    block = group(0)
    place.begin_step()
    handle: Any = place.put(data(MIB, 0), block)
    place.close_group(block)
    buffer = handle.block.buffer
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    x = torch.zeros(4, device="cuda")
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
        x.add_(1)
        if what == "buffer":
            buffer.release()
        else:
            place = handle = buffer = None
            gc.collect()
        assert pinned.alive
    graph.replay()
    assert x.tolist() == [1.0] * 4
    del handle, buffer
    place = None
    gc.collect()
    _, unpin = pin(4096, torch.cuda.cudart(), lambda: None, fail)  # what was postponed comes first
    unpin()


def test_stores_share_streams_that_are_not_the_captures() -> None:
    """PyTorch hands out 32 in turn: of a store made later, one would be that of the capture."""
    device = torch.device("cuda", 0)
    used, copying = set(), set()
    for _ in range(40):
        store = Disk().byte_store_for(device, fail)
        assert store is not None
        handle = store.put(data(4096, 0), group(0))
        used.add(store._file._writer._stream)  # type: ignore[attr-defined]
        store.free(handle)
        store.close()
        engine = place_on_cuda()._engine
        copying.add((engine._offload_stream, engine._reload_stream))
    assert used == {streams_of(device).disk}
    assert copying == {(streams_of(device).offload, streams_of(device).reload)}
    assert len(set(streams_of(device))) == 4
