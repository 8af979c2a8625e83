"""The CUDA streams of host memory, on a model of streams that knows for each copy what it is ordered behind.

No GPU: a copy is made at once, and what is checked is that the order would hold on one, whatever its speed.
"""

from __future__ import annotations

import contextlib
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from graphckpt.stores import Host, TensorGroup, Traffic, pinned
from graphckpt.stores.host import CopyEngine, HostStore


class Stream:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.behind: set[int] = set()
        self.capture: int | None = None
        """The capture that it has been drawn into."""
        machine.streams.append(self)

    def wait_event(self, event: Event) -> None:
        assert event.behind is not None, "an event that nobody recorded"
        if event.capture is None:
            assert self.capture is None, "a capture waits for what is outside of it"
        else:
            assert event.capture == self.machine.capture_now, "an event of a capture that is over"
            self.capture = event.capture
        self.behind |= event.behind

    def wait_stream(self, other: Stream) -> None:
        event = Event(self.machine)
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        assert not self.machine.is_capturing, "CUDA forbids to wait on the host in a capture"
        self.machine.over |= self.behind


class Event:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.behind: set[int] | None = None
        self.capture: int | None = None
        machine.num_events += 1

    def record(self, stream: Stream) -> None:
        if self.machine.copies and stream is self.machine.current and stream is not self.machine.home:
            self.machine.copied(stream, *self.machine.copies.pop(0))
        self.behind, self.capture = set(stream.behind), stream.capture

    def synchronize(self) -> None:
        assert not self.machine.is_capturing

    def elapsed_time(self, end: Event) -> float:
        return 2000.0


class Machine:
    """Finds two copies of which one writes what the other touches, and that nothing orders."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.compute = self.current = Stream(self)
        self.capture_now: int | None = None
        self.num_captures = 0
        self.num_events = 0
        self.over: set[int] = set()
        self.touched: list[tuple[int, int, int, bool]] = []  # copy, first byte, last, whether it writes
        self.made_in_capture: list[int] = []
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # sources and targets, to be copied in turn
        self.home = self.current  # the compute stream that they are issued from
        self.copy_to: dict[int, int] = {}
        self.num_copies = self.num_computed = 0
        self.faults: list[str] = []
        self.runtime = Runtime(self)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        previous, self.current = self.current, stream
        yield
        self.current = previous

    def copied(self, stream: Stream, source: torch.Tensor, target: torch.Tensor) -> None:
        number = self.num_copies = self.num_copies + 1
        if not self.home.behind - self.over <= stream.behind:
            self.faults.append(f"copy {number} starts before what the compute stream was given earlier has ended")
        for tensor, writes in ((source, False), (target, True)):
            first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.numel()
            for other, low, high, wrote in self.touched:
                if low < last and first < high and (writes or wrote) and not self.is_behind(stream, other):
                    self.faults.append(f"copy {number} touches what copy {other} may still touch")
            self.touched.append((number, first, last, writes))
            weakref.finalize(tensor.untyped_storage(), self.freed, number, self.home)
        stream.behind.add(number)
        self.copy_to[target.data_ptr()] = number
        if self.is_capturing:
            self.made_in_capture.append(number)

    @property
    def is_capturing(self) -> bool:
        return self.capture_now is not None

    def compute_something(self) -> None:
        """An op on the compute stream, which all that is issued from now on must be behind."""
        self.num_computed += 1
        self.current.behind.add(-self.num_computed)

    def is_behind(self, stream: Stream, copy: int) -> bool:
        return copy in stream.behind or copy in self.over

    def freed(self, copy: int, home: Stream) -> None:
        if not self.is_behind(home, copy):
            self.faults.append(f"memory of copy {copy} was freed before its stream was behind it")
        self.touched = [entry for entry in self.touched if entry[0] != copy or copy not in self.over]

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """What ``torch.cuda.graph`` does: waits for the device, records on a stream of its own."""
        for stream in self.streams:
            stream.synchronize()
        self.num_captures += 1
        self.capture_now = self.num_captures
        with self.stream(Stream(self)):
            capture_stream = self.current
            capture_stream.capture = self.capture_now
            yield
        self.capture_now = None
        for stream in self.streams:
            stream.capture = None
        assert set(self.made_in_capture) <= capture_stream.behind, "a capture ends with copies that are not joined"
        self.made_in_capture.clear()
        self.compute.behind |= capture_stream.behind  # as if it was replayed at once


class Runtime:
    """What is pinned. Nothing may be unpinned before all copies to and from it are over, also by the host's clock."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert not self.machine.is_capturing
        self.pinned[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        end = address + self.pinned.pop(address)
        for copy, first, last, _ in self.machine.touched:
            if first < end and address < last and copy not in self.machine.over:
                self.machine.faults.append(f"memory was unpinned while copy {copy} may be under way")
        return 0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine()
    runtime = made.runtime
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(made))
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing=False: Event(made))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.current)
    monkeypatch.setattr(torch.cuda, "stream", made.stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.is_capturing)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: self.data_ptr() in runtime.pinned)
    issue = CopyEngine._issue

    def remember(self: CopyEngine, stream: Any, sources: Any, targets: Any, traffic: Any) -> Any:
        made.copies, made.home = list(zip(sources, targets, strict=True)), made.current
        return issue(self, stream, sources, targets, traffic)

    monkeypatch.setattr(CopyEngine, "_issue", remember)
    pinned._streams_of.cache_clear()
    yield made
    pinned._streams_of.cache_clear()
    assert made.faults == []
    assert runtime.pinned == {}


CPU = torch.device("cpu")


def place_of(in_flight_bytes: int | None = None) -> HostStore:
    return HostStore(CPU, CopyEngine(CPU, print), in_flight_bytes)


def test_stores_share_two_streams_that_are_not_the_captures(machine: Machine) -> None:
    """PyTorch hands out 32 in turn: of a store made later, one would be that of the capture."""
    made = [CopyEngine(CPU, print) for _ in range(40)]
    assert len({id(stream) for copies in made for stream in (copies._offload_stream, copies._reload_stream)}) == 2
    assert len(machine.streams) == 1 + 4
    capture, out, back, _ = pinned.streams_of(CPU)
    assert {id(out), id(back)} == {id(made[0]._offload_stream), id(made[0]._reload_stream)}
    assert id(capture) not in (id(out), id(back))


def group(number: int = 0, traffic: Traffic | None = None) -> TensorGroup:
    made = TensorGroup(f"layers.{number}", list, print, traffic)
    made.number = number
    return made


def data(num_bytes: int, seed: int) -> torch.Tensor:
    return torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def random_step(place: HostStore, machine: Machine, dice: random.Random, sizes: list[int]) -> None:
    place.begin_step()
    kept = []
    for number, size in enumerate(sizes):
        block = group(number // 2)
        machine.compute_something()
        kept.append((place.put(data(size, number), block), block, size, number))
        if number % 2:
            place.close_group(block)
    dice.shuffle(kept)
    if dice.random() < 0.8:
        in_backward(lambda: use(place, machine, dice, kept, leave=dice.choice((0, 0, 3))))
    use(place, machine, dice, kept, leave=0)


def use(place: HostStore, machine: Machine, dice: random.Random, kept: list[Any], leave: int) -> None:
    while len(kept) > leave:
        if dice.random() < 0.5:
            place.prefetch([handle for handle, *_ in dice.sample(kept, dice.randint(1, len(kept)))], kept[0][1])
        handle, block, size, seed = kept.pop()
        if dice.random() < 0.9:
            take(place, machine, handle, block, size, seed)
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

    Calls.apply(torch.zeros(1, requires_grad=True)).backward()


def take(place: HostStore, machine: Machine, handle: Any, block: TensorGroup, size: int, seed: int) -> None:
    machine.compute_something()
    flat = place.get(handle, block)
    if flat is not handle.data:
        assert machine.is_behind(machine.current, machine.copy_to[flat.data_ptr()]), "read before its copy is joined"
    assert torch.equal(flat, data(size, seed))


@pytest.mark.parametrize("in_flight_bytes", [None, 0, 2000, 10**9])
def test_every_copy_is_ordered(machine: Machine, in_flight_bytes: int | None) -> None:
    dice = random.Random(f"{in_flight_bytes}")
    place = place_of(in_flight_bytes)
    for _ in range(50):
        random_step(place, machine, dice, [dice.choice((1, 700, 2000)) for _ in range(dice.randint(0, 10))])
    place.close()


def test_another_compute_stream_waits_too(machine: Machine) -> None:
    """Room in host memory that one stream has read from is written from another."""
    dice = random.Random(0)
    place = place_of(0)
    streams = [machine.compute, Stream(machine)]
    for step in range(20):
        with machine.stream(streams[step % 2]):
            random_step(place, machine, dice, [500, 1000, 500])
    place.begin_step()
    with machine.stream(streams[0]):
        handle = place.put(data(500, 0), group())
        place.prefetch([handle], group())
    with machine.stream(streams[1]):
        streams[1].wait_stream(streams[0])
        before = machine.num_copies
        take(place, machine, handle, group(), 500, 0)
        assert machine.num_copies == before + 1, "memory of another stream is not read: it is copied anew"
    place.free(handle)
    place.close()


def test_events_are_used_again(machine: Machine) -> None:
    place = place_of()
    dice = random.Random(0)
    for step in range(20):
        random_step(place, machine, dice, [500] * 8)
        if step == 3:
            most = machine.num_events
    assert machine.num_events <= most + 8
    place.close()


def test_a_capture_between_eager_steps(machine: Machine) -> None:
    """It begins while copies of the last eager step are not joined, pins nothing, and joins all of its own."""
    dice = random.Random(0)
    place = place_of(10**9)
    sizes = [500, 1000, 700]
    for _ in range(2):
        random_step(place, machine, dice, sizes)
    for _ in range(3):
        place.begin_step()
        left = place.put(data(500, 0), group())
        pinned = dict(machine.runtime.pinned)
        with machine.capture():
            place.free(left)
            random_step(place, machine, dice, sizes)
            assert machine.runtime.pinned == pinned
        for _ in range(3):
            random_step(place, machine, dice, sizes)
    place.close()


def test_a_capture_with_two_compute_streams(machine: Machine) -> None:
    """What one of them sent is joined on the other too, where backward began and the capture will end."""
    place = place_of(0)
    for _ in range(2):
        random_step(place, machine, random.Random(0), [500, 500])
    side = Stream(machine)
    with machine.capture():
        main = machine.current
        side.wait_stream(main)
        place.begin_step()
        with machine.stream(side):
            handles = [place.put(data(500, n), group(n)) for n in range(2)]
        main.wait_stream(side)

        def backward() -> None:
            with machine.stream(side):
                place.prefetch(handles, group(1))

        in_backward(backward)
    for handle in handles:
        place.free(handle)
    place.close()


def test_seconds_are_read_from_events_but_not_in_a_capture(machine: Machine) -> None:
    place = place_of(0)
    traffic = Traffic()
    for _ in range(2):
        place.begin_step()
        handle = place.put(data(500, 0), group(0, traffic))
        take(place, machine, handle, group(0, traffic), 500, 0)
        place.free(handle)
    assert traffic.copy_seconds == 8.0
    assert traffic.wait_seconds == 8.0, "of the compute stream, which no clock of the host sees"
    with machine.capture():
        place.begin_step()
        handle = place.put(data(500, 0), group(0, traffic))
        take(place, machine, handle, group(0, traffic), 500, 0)
        place.free(handle)
    assert traffic.copy_seconds == traffic.wait_seconds == 8.0
    place.close()


def test_cuda_is_what_a_cuda_device_gets(machine: Machine) -> None:
    place = Host().byte_store_for(torch.device("cuda", 0), print)
    assert isinstance(place, HostStore)
    assert isinstance(place._engine, CopyEngine)
    place.close()
