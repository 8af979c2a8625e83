"""Host memory: every line of its logic."""

from __future__ import annotations

import gc
import logging
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.watched_copies import WatchedCopies

from graphckpt.errors import StoreError
from graphckpt.stores import Host, Placement, TensorGroup, Traffic
from graphckpt.stores.host import HostStore
from graphckpt.stores.pinned import HostBuffer
from graphckpt.stores.tensor_store import TensorStore

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


def group(number: int = 0, traffic: Traffic | None = None) -> TensorGroup:
    made = TensorGroup(f"layers.{number}", list, lambda note: None, traffic)
    made.number = number
    return made


def data(num_bytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(256, (num_bytes,), dtype=torch.uint8, device="cuda", generator=generator)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> WatchedCopies:
    engine = WatchedCopies()
    monkeypatch.setattr("graphckpt.stores.host.CopyEngine", lambda device, note: engine)
    return engine


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[HostStore]:
    """A store with the default bound, or that of ``bound``. At the end it holds nothing, which ``copies`` checks."""
    copies = request.getfixturevalue("copies") if "copies" in request.fixturenames else None
    place = Host(getattr(request, "param", None)).byte_store_for(torch.device("cuda", 0), print)
    assert isinstance(place, HostStore)
    yield place
    place.close()
    assert copies is None or copies.live_bytes == 0


def bound(*in_flight_bytes: int | None) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("place", in_flight_bytes, indirect=True)


def test_bytes_go_and_come_back(copies: WatchedCopies, place: HostStore) -> None:
    """The plain case, to be read first."""
    place.begin_step()
    block = group()
    handle = place.put(data(1000), block)
    place.close_group(block)
    place.prefetch([handle], block)
    assert torch.equal(place.get(handle, block), data(1000))
    assert torch.equal(place.get(handle, block), data(1000)), "a graph that was retained asks twice"
    place.free(handle)


def in_backward(call: Callable[[], None]) -> None:
    class Calls(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            call()
            return grad

    Calls.apply(torch.zeros(1, device="cuda", requires_grad=True)).backward()


@bound(None, 0, 3000, 10**9)
def test_no_race_in_random_steps(copies: WatchedCopies, place: HostStore, request: pytest.FixtureRequest) -> None:
    """Memory that is let go is overwritten at once by whatever the allocator gives it to next."""
    most = request.node.callspec.params["place"]
    dice = random.Random(f"{most}")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    saved: list[tuple[Any, TensorGroup, int, int]] = []

    def overwrite() -> None:
        for size in (1, 255, 700, 2000, 2001):
            torch.full((size,), 0x5A, dtype=torch.uint8, device="cuda")

    def use(leave: int = 0) -> None:
        """Sends for, takes and frees what is saved, in any order, but for some that it leaves."""
        while len(saved) > leave:
            if dice.random() < 0.5:
                chosen = dice.sample(saved, dice.randint(1, len(saved)))
                place.prefetch([handle for handle, *_ in chosen], chosen[0][1])
            handle, block, size, seed = saved.pop()
            overwrite()
            if dice.random() < 0.9:
                wrong.add_((place.get(handle, block) != data(size, seed)).sum())
            if dice.random() < 0.2:
                saved.insert(dice.randint(0, len(saved)), (handle, block, size, seed))
            else:
                place.free(handle)

    for _ in range(30):
        place.begin_step()
        for number in range(dice.randint(1, 6)):
            block = group(number)
            for _ in range(dice.randint(0, 4)):
                size, seed = dice.choice((1, 255, 700, 2000, 2001)), dice.randrange(2**30)
                saved.append((place.put(data(size, seed), block), block, size, seed))
                assert most is None or place._in_flight_bytes <= most
                if dice.random() < 0.1:
                    place.free(saved.pop(dice.randrange(len(saved)))[0])
            place.close_group(block)
            overwrite()
        dice.shuffle(saved)
        if dice.random() < 0.8:
            in_backward(lambda: use(dice.choice((0, 0, 3))))
        use()
        assert not place._offloading
        assert not place._reloading
        assert place._in_flight_bytes == 0
    assert wrong.item() == 0


def test_a_source_is_held_until_its_copy_is_joined(copies: WatchedCopies, place: HostStore) -> None:
    place.begin_step()
    first, second, third = (group(number) for number in range(3))
    source = data(500)
    seen = weakref.ref(source.untyped_storage())
    handle = place.put(source, first)
    del source
    place.close_group(first)
    assert seen() is not None
    place.put(data(500, 1), second)
    assert seen() is not None
    place.close_group(second)
    assert seen() is None, "one group behind: the first group's copies are joined when the second is over"
    assert torch.equal(place.get(handle, third), data(500))


def test_a_tensor_still_on_the_device_is_not_copied_back(copies: WatchedCopies, place: HostStore) -> None:
    """The last block's bytes have not been let go when backward begins with it."""
    block = group()
    taken: list[torch.Tensor] = []
    source = data(500)
    address = source.data_ptr()
    handle = place.put(source, block)
    del source
    place.close_group(block)

    def read() -> None:
        place.prefetch([handle], block)
        taken.append(place.get(handle, block))

    in_backward(read)
    assert taken[0].data_ptr() == address
    assert [copy.what for copy in copies.history] == ["out"]
    assert copies.history[0].joined_at, "a capture must not end with a copy that is not joined"


def test_a_tensor_still_on_the_device_is_freed_when_backward_has_moved_on(
    copies: WatchedCopies, place: HostStore
) -> None:
    """Not only at its end: else the last block's bytes would lie beside the peak."""
    blocks = [group(0), group(1)]
    source = data(500, 1)
    seen = weakref.ref(source.untyped_storage())
    handles = [place.put(data(500, 0), blocks[0]), place.put(source, blocks[1])]
    del source
    place.close_group(blocks[1])

    def read() -> None:
        place.get(handles[1], blocks[1])
        assert seen() is not None
        place.get(handles[0], blocks[0])
        assert seen() is None

    in_backward(read)


def test_all_copies_are_joined_when_backward_is_over(copies: WatchedCopies, place: HostStore) -> None:
    """Also those of a group that was sent for and never taken. It stays: the next backward may want it."""
    blocks = [group(number) for number in range(3)]
    handles = []
    for block in blocks:
        handles.append(place.put(data(500, block.number), block))
        place.close_group(block)
    in_backward(lambda: place.prefetch(handles, blocks[2]))
    assert [copy.what for copy in copies.history] == ["out"] * 3 + ["back"] * 2
    assert all(copy.joined_at for copy in copies.history)
    in_backward(lambda: place.prefetch(handles[:2], blocks[1]))
    in_backward(lambda: compare(place.get(handles[0], blocks[0]), data(500, 0)))
    assert len(copies.history) == 5, "begun twice is begun once"


def compare(one: torch.Tensor, other: torch.Tensor) -> None:
    assert torch.equal(one, other)


def test_outside_of_a_backward_copies_are_joined_at_once(copies: WatchedCopies, place: HostStore) -> None:
    """Nobody will say there when it is over."""
    handles = [place.put(data(500, seed), group()) for seed in range(2)]
    place.prefetch(handles[:1], group())
    assert [bool(copy.joined_at) for copy in copies.history] == [True, True, False]
    compare(place.get(handles[1], group()), data(500, 1))
    assert all(copy.joined_at for copy in copies.history)


@bound(0)
def test_begun_and_never_taken_is_joined_before_its_memory_goes(copies: WatchedCopies, place: HostStore) -> None:
    handle = place.put(data(500), group())
    place.prefetch([handle], group())
    landing = weakref.ref(handle.reload_buffer.untyped_storage())  # type: ignore[attr-defined]
    place.free(handle)
    assert landing() is None
    assert copies.history[-1].joined_at


def run_step(place: HostStore, sizes: list[int], order: list[int] | None = None) -> None:
    place.begin_step()
    block = group()
    handles = [place.put(data(size, seed), block) for seed, size in enumerate(sizes)]
    place.close_group(block)
    for number in order if order is not None else reversed(range(len(sizes))):
        assert torch.equal(place.get(handles[number], block), data(sizes[number], number))
        place.free(handles[number])


def test_the_slab_is_as_big_as_the_step_and_nothing_is_allocated_after_the_second(
    copies: WatchedCopies, place: HostStore
) -> None:
    sizes = [1000, 3 * 2**20 + 1, 256]
    run_step(place, sizes)
    assert copies.num_buffers == 3
    for _ in range(5):
        run_step(place, sizes)
        assert copies.num_buffers == 4
        assert place.host_bytes == copies.live_bytes == 1024 + 3 * 2**20 + 256 + 256, "256 bytes are the grain"


def test_the_slab_reuses_what_is_freed_within_a_step(copies: WatchedCopies, place: HostStore) -> None:
    """Several forwards before a backward lie side by side, one after the other in the same place."""
    for _ in range(3):
        place.begin_step()
        outer = place.put(data(256, 9), group())
        for seed in range(4):
            handle = place.put(data(1024, seed), group(1))
            assert torch.equal(place.get(handle, group(1)), data(1024, seed))
            place.free(handle)
        assert torch.equal(place.get(outer, group()), data(256, 9))
        place.free(outer)
    assert place.host_bytes == 256 + 1024


def test_a_step_of_another_shape_fits_or_grows_with_one_line(
    copies: WatchedCopies, caplog: pytest.LogCaptureFixture, place: HostStore
) -> None:
    caplog.set_level(logging.INFO, "graphckpt")
    run_step(place, [4096, 4096])
    run_step(place, [4096, 4096])
    made = copies.num_buffers
    for sizes in ([1024] * 8, [8192], [256, 4096, 100], [4096, 4096]):
        run_step(place, sizes)
        assert copies.num_buffers == made, f"{sizes} fit in gaps of the slab"
    assert len(caplog.messages) == 1
    run_step(place, [4096, 4096, 4096])
    assert copies.num_buffers == made + 1, "one single buffer"
    run_step(place, [4096, 4096, 4096])
    assert copies.num_buffers == made + 2, "one bigger slab"
    assert caplog.messages[1:] == ["offload: the slab in host memory grows from 8.00 KiB to 12.0 KiB"]
    run_step(place, [4096, 4096])
    run_step(place, [4096, 4096, 4096])
    assert copies.num_buffers == made + 2
    assert place.host_bytes == copies.live_bytes == 3 * 4096


def test_steps_without_puts_change_nothing(copies: WatchedCopies, place: HostStore) -> None:
    run_step(place, [5000, 256])
    for _ in range(3):
        place.begin_step()
    run_step(place, [5000, 256])
    for _ in range(3):
        place.begin_step()
    run_step(place, [5000, 256])
    assert copies.num_buffers == 3


def make_poor(copies: WatchedCopies, patch: pytest.MonkeyPatch, limit: int, error: type[Exception]) -> None:
    """Leaves so many bytes of host memory and no more."""
    rich = copies.buffer

    def buffer(num_bytes: int) -> HostBuffer:
        if copies.live_bytes + num_bytes > limit:
            raise error("CUDA error: out of memory\nlong story")
        return rich(num_bytes)

    patch.setattr(copies, "buffer", buffer)


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
def test_no_host_memory_is_one_error_and_leaves_nothing(
    copies: WatchedCopies, monkeypatch: pytest.MonkeyPatch, error: Any, place: HostStore
) -> None:
    make_poor(copies, monkeypatch, 2000, error)
    place.begin_step()
    kept = place.put(data(1500), group(1))
    with pytest.raises(StoreError) as caught:
        place.put(data(1000), group(7))
    assert str(caught.value) == (
        "layers.7: offload: expected 1000 B of host memory besides the 1.46 KiB in use, got none "
        "(CUDA error: out of memory) · fix: offload fewer blocks, set activation_checkpointing as well, or "
        "offload = 'disk'"
    )
    compare(place.get(kept, group(1)), data(1500))
    place.free(kept)
    place.begin_step()
    kept = place.put(data(1500), group(1))
    compare(place.get(kept, group(1)), data(1500))


def test_without_memory_for_a_slab_single_buffers_go_on(
    copies: WatchedCopies, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: HostStore
) -> None:
    """The slab is rounded up to 256 bytes a piece, which is too much here."""
    make_poor(copies, monkeypatch, 1999, MemoryError)
    for _ in range(4):
        run_step(place, [1000, 999])
    assert caplog.messages == [
        "graphckpt: offload: cannot allocate a slab of 2.00 KiB of host memory: CUDA error: out of memory\nlong story"
    ]
    assert copies.num_buffers == 4


def test_a_copy_that_cannot_be_issued_gives_its_room_back(
    copies: WatchedCopies, monkeypatch: pytest.MonkeyPatch, place: HostStore
) -> None:
    run_step(place, [1000])
    with monkeypatch.context() as patch:
        patch.setattr(copies, "offload", fail)
        place.begin_step()
        with pytest.raises(RuntimeError, match="no stream"):
            place.put(data(1000), group())
    for _ in range(3):
        run_step(place, [1000])
    assert place.host_bytes == 1024


def fail(*_: object) -> None:
    raise RuntimeError("no stream")


def test_garbage_gives_everything_back(copies: WatchedCopies) -> None:
    place: Any = Host().byte_store_for(torch.device("cuda", 0), print)
    run_step(place, [100, 100])
    run_step(place, [100, 100])
    handle = place.put(data(100), group())
    assert copies.live_bytes > 0
    del place, handle
    gc.collect()
    assert copies.live_bytes == 0


@bound(0)
def test_seconds_of_copies_are_counted_when_watched(copies: WatchedCopies, place: HostStore) -> None:
    traffic = Traffic()
    watched = group(0, traffic)
    handle = place.put(data(10**6), watched)
    in_backward(lambda: compare(place.get(handle, watched), data(10**6)))
    assert traffic.copy_seconds > 0


# --- a capture, as far as the host's side of it goes


def test_nothing_is_allocated_or_given_back_in_a_capture(
    copies: WatchedCopies, monkeypatch: pytest.MonkeyPatch, place: HostStore
) -> None:
    sizes = [1000, 256]
    run_step(place, sizes)
    monkeypatch.setattr(copies, "is_capturing", lambda: True)
    run_step(place, sizes)  # after one step: there is no slab yet, but the pieces of that step are there
    assert copies.num_buffers == 2
    monkeypatch.setattr(copies, "is_capturing", lambda: False)
    run_step(place, sizes)
    run_step(place, sizes)
    assert copies.num_buffers == 3
    assert copies.live_bytes == 1000 + 256 + 1280, "what the graph copies to is not given back"
    monkeypatch.setattr(copies, "is_capturing", lambda: True)
    run_step(place, sizes)
    run_step(place, [5000])
    assert copies.num_buffers == 3
    monkeypatch.setattr(copies, "is_capturing", lambda: False)
    run_step(place, [5000])
    run_step(place, [5000])
    assert copies.live_bytes == 1000 + 256 + 1280 + 5120


@bound(0)
def test_a_tensor_that_exists_only_in_a_capture_stays_and_pushes_nothing_out(
    copies: WatchedCopies, monkeypatch: pytest.MonkeyPatch, place: HostStore
) -> None:
    """An attention mask among blocks: these lie where they lay before, in a slab of their exact size."""
    blocks = [1000, 256, 1000]
    for _ in range(3):
        run_step(place, blocks)
    begins = [0, 1024, 1280]
    slab = place._memory._slab.flat.data_ptr()
    monkeypatch.setattr(copies, "is_capturing", lambda: True)
    notes: list[str] = []
    for _ in range(2):
        copies.history.clear()
        place.begin_step()
        block = TensorGroup("layers.0", list, notes.append)
        handles: list[Any] = [place.put(data(n, n), block) for n in (1000, 300, 256, 300, 1000)]
        place.close_group(block)
        assert [copy.what for copy in copies.history] == ["out"] * 3
        assert [t.block.flat.data_ptr() - slab for t in handles if t.block is not None] == begins
        assert handles[1].data is not None
        in_backward(lambda handles=handles, block=block: place.prefetch(handles, block))
        for handle in handles:
            assert torch.equal(place.get(handle, block), data(handle.num_bytes, handle.num_bytes))
        kept = weakref.ref(handles[1].data.untyped_storage())
        for handle in handles:
            place.free(handle)
        assert kept() is None
    assert len(set(notes)) == 1
    assert "stay on the device" in notes[0]
    monkeypatch.setattr(copies, "is_capturing", lambda: False)
    run_step(place, blocks)
    assert copies.num_buffers == 4, "the slab is not planned anew"


def test_a_capture_cannot_be_the_first_step(
    copies: WatchedCopies, monkeypatch: pytest.MonkeyPatch, place: HostStore
) -> None:
    monkeypatch.setattr(copies, "is_capturing", lambda: True)
    with pytest.raises(StoreError, match=r"layers.0: offload: expected a step before the capture.* run two steps"):
        run_step(place, [1000])


@bound(0, 10**9)
def test_a_capture_between_eager_steps(place: HostStore) -> None:
    """It begins while copies of an eager step are not waited for, pins nothing, and waits for all of its own."""
    sizes = [500, 1000, 700]
    for _ in range(2):
        run_step(place, sizes)
    num_bytes, sources = place.host_bytes, [data(size, seed) for seed, size in enumerate(sizes)]
    for _ in range(3):
        place.begin_step()
        unused = place.put(data(500), group())
        graph = torch.cuda.CUDAGraph()
        reloaded: list[torch.Tensor] = []
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            place.free(unused)
            place.begin_step()
            block = group()
            handles = [place.put(source.clone(), block) for source in sources]
            place.close_group(block)
            in_backward(lambda: reloaded.extend(place.get(handle, block).clone() for handle in reversed(handles)))
            for handle in handles:
                place.free(handle)
        assert place.host_bytes == num_bytes
        for _ in range(2):
            graph.replay()
            assert all(map(torch.equal, reloaded, reversed(sources)))
            run_step(place, sizes)


def test_memory_returns_to_the_stream_of_its_copy(place: HostStore) -> None:
    """A copy that starts on one stream may be waited for on another, where backward begins."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        source = data(2**16)
        handle = place.put(source, group(0))
        del source
    place.close_group(group(1))
    with torch.cuda.stream(side):
        others = [torch.zeros(2**16, dtype=torch.uint8, device="cuda") for _ in range(2)]
    side.synchronize()
    compare(place.get(handle, group(0)), data(2**16))
    del others


@bound(0)
def test_another_compute_stream_waits_for_host_memory(place: HostStore) -> None:
    """Memory that one stream still reloads from is written by copies that start from another."""
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    sources = [data(2**16, seed) for seed in range(20)]
    torch.cuda.synchronize()
    for step, source in enumerate(sources):
        with torch.cuda.stream(streams[step % 2]):
            place.begin_step()
            handles = [place.put(source.clone(), group()) for _ in range(3)]
            for handle in handles:
                wrong += (place.get(handle, group()) != source).sum()
                place.free(handle)
    torch.cuda.synchronize()
    assert wrong.item() == 0


def test_events_are_reused(monkeypatch: pytest.MonkeyPatch, place: HostStore) -> None:
    events: list[Any] = []
    create = torch.cuda.Event

    def count(**settings: Any) -> Any:
        events.append(create(**settings))
        return events[-1]

    monkeypatch.setattr(torch.cuda, "Event", count)
    for step in range(8):
        run_step(place, [500] * 8)
        if step == 1:
            num_events = len(events)
    assert len(events) == num_events


@bound(0)
def test_a_capture_adds_no_seconds_of_copies(place: HostStore) -> None:
    run_step(place, [500])
    traffic, source = Traffic(), data(500)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        place.begin_step()
        handle = place.put(source, group(0, traffic))
        in_backward(lambda: place.get(handle, group(0, traffic)))
        place.free(handle)
    run_step(place, [500])  # collects times
    assert traffic.copy_seconds == traffic.wait_seconds == 0


# --- behind the front end


def store_of(in_flight_bytes: int | None) -> TensorStore:
    store = Placement(offload=Host(in_flight_bytes), min_elements=1).store
    assert isinstance(store, TensorStore)
    return store


class Chain:
    """Blocks that keep one tensor each, forward and backward by hand."""

    def __init__(self, store: TensorStore, num_blocks: int) -> None:
        self.store = store
        self.keys: list[Any] = []
        for n in range(num_blocks):
            opened = store.open_group(TensorGroup(f"layers.{n}", list, print))
            self.keys.append(store.put(torch.full((1000,), float(n), device="cuda"), opened))
            store.close_group(opened)

    def ask(self, number: int) -> None:
        found = self.store.get(self.keys[number])
        assert found is not None
        assert torch.equal(found, torch.full((1000,), float(number), device="cuda"))
        self.keys[number] = None


@pytest.mark.parametrize("in_flight_bytes", [None, 0])
def test_the_next_group_is_under_way_before_it_is_asked_for(copies: WatchedCopies, in_flight_bytes: int | None) -> None:
    """The order is learnt in one step, used in the next, and corrected when it changes."""
    store = store_of(in_flight_bytes)
    backwards, other = [4, 3, 2, 1, 0], [4, 1, 3, 0, 2]
    for order, ahead in (
        (backwards, [{3}, {2}, {1}, {0}, set()]),  # not learnt yet, but backward goes backwards
        (other, [{3}, {3, 0}, {0, 2}, {2}, set()]),  # as before: 4 3, 1 0, 3 2; what came too early stays
        (other, [{1}, {3}, {0}, {2}, set()]),  # learnt
    ):
        chain = Chain(store, 5)
        for number, expected in zip(order, ahead, strict=True):
            chain.ask(number)
            assert {
                n for n, key in enumerate(chain.keys) if key is not None and key.piece.handle.is_on_device
            } == expected
        del chain
    assert store.num_alive == 0
    store.close()
    assert copies.live_bytes == 0
