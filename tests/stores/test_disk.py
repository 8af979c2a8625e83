"""The disk store: same bits, bounded memory, nothing left behind, and an error for whatever can fail."""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from graphckpt.errors import ConfigError, StoreError
from graphckpt.stores import Disk, Placement, TensorGroup, Traffic, parse_offload
from graphckpt.stores import disk as disk_store
from graphckpt.stores.disk import BLOCK, CHUNK, file_system_in_memory, in_blocks
from graphckpt.stores.tensor_store import TensorStore

KIB, MIB = 2**10, 2**20
SECONDS = 10.0  # until a test gives up on the thread


def opened(folder: Path, *, min_elements: int = 0, **settings: Any) -> TensorStore:
    return Placement(offload=Disk(folder, **settings), min_elements=min_elements).store


def group(block: str = "h.0", traffic: Traffic | None = None, notes: list[str] | None = None) -> TensorGroup:
    return TensorGroup(block, list, (notes if notes is not None else []).append, traffic)


def put_one(store: TensorStore, tensor: torch.Tensor, block: str = "h.0") -> Any:
    mine = store.open_group(group(block))
    key = store.put(tensor, mine)
    store.close_group(mine)
    return key


def put_numbers(store: TensorStore, count: int) -> list[Any]:
    """Stores as many tensors, each in a group of its own and full of its number."""
    return [put_one(store, torch.full((5000,), float(at)), f"h.{at}") for at in range(count)]


def place_of(store: TensorStore) -> Any:
    (found,) = store._open_stores()
    return found


def io_of(store: TensorStore) -> Any:
    return place_of(store)._file


def disk_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("graphckpt disk")]


def files_in(folder: Path) -> list[int]:
    """The open files of this process that lie in ``folder``, whether or not they have a name."""
    return [
        int(link.name) for link in Path("/proc/self/fd").iterdir() if os.path.realpath(link).startswith(str(folder))
    ]


def until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


def until_written(store: TensorStore) -> None:
    until(lambda: all(handle.write is None or handle.write.done() for handle in io_of(store)._unwritten))


def put_written(store: TensorStore, tensor: torch.Tensor, block: str = "h.0") -> Any:
    key = put_one(store, tensor, block)
    until_written(store)
    return key


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    def bits(x: torch.Tensor) -> torch.Tensor:
        return x.contiguous().flatten().view(torch.uint8) if x.numel() else x

    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.device == b.device
        and torch.equal(bits(a.resolve_conj()), bits(b.resolve_conj()))
    )


class Gate:
    """Stands in for a call of ``os``: counts, lets through only when open, and notes what ``measure`` returns then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, measure: Callable[[], int] = lambda: 0) -> None:
        self._call = getattr(os, name)
        self.measure = measure
        self.is_open = threading.Event()
        self.is_open.set()
        self.offsets: list[int] = []
        self.measured: list[int] = []
        monkeypatch.setattr(os, name, self)

    def __call__(self, number: int, buffers: Any, offset: int) -> int:
        self.offsets.append(offset)
        assert self.is_open.wait(SECONDS)
        self.measured.append(self.measure())
        return self._call(number, buffers, offset)


def with_held_writes(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[TensorStore, Gate]:
    """Returns a store whose file is open, and the gate that its next writes wait for."""
    store = opened(folder, **settings)
    put_written(store, torch.zeros(10))
    writes = Gate(monkeypatch, "pwritev")
    writes.is_open.clear()
    return store, writes


@pytest.fixture(autouse=True, scope="module")
def no_store_of_others() -> None:
    """Frees what other modules have left in cycles that were alive when older objects were frozen: it has threads."""
    gc.unfreeze()
    gc.collect()
    until(lambda: not disk_threads())
    gc.freeze()  # each test collects: after all other modules a second, else milliseconds


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    gc.collect()
    until(lambda: not set(disk_threads()) - before)
    assert not files_in(tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.fixture
def store(tmp_path: Path, nothing_left: None) -> Iterator[TensorStore]:
    store = opened(tmp_path)
    yield store
    for place in store._open_stores():
        place.close()  # pytest holds it until the check


# ---- what comes back

TENSORS = {
    "float32": lambda: torch.randn(70, 30),
    "bool": lambda: torch.rand(5000) > 0.5,
    "bfloat16": lambda: torch.randn(3000).bfloat16(),
    "complex64": lambda: torch.randn(2000, dtype=torch.complex64),
    "conjugated": lambda: torch.randn(2000, dtype=torch.complex64).conj(),
    "int64": lambda: torch.randint(-(2**60), 2**60, (999,)),
    "nan payloads": lambda: torch.randint(0, 2**31 - 1, (3000,), dtype=torch.int32).view(torch.float32),
    "zero-dim": lambda: torch.tensor(1.5),
    "transposed": lambda: torch.randn(40, 60).t(),
    "expanded": lambda: torch.randn(1, 50).expand(40, 50),
    "every third": lambda: torch.randn(9000)[1::3],
    "small part, far in": lambda: torch.randn(100, 1000)[90, 7:300],
    "most of it": lambda: torch.randn(100, 100)[10:],
    "channels last": lambda: torch.randn(2, 8, 10, 10).to(memory_format=torch.channels_last),
    "several chunks": lambda: torch.randn(CHUNK // 2 + 77),
    "one block": lambda: torch.randn(BLOCK // 4),
    "a byte more": lambda: torch.zeros(BLOCK + 1, dtype=torch.uint8).random_(0, 256),
}


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)
@pytest.mark.parametrize("is_written", [True, False])
def test_a_reloaded_tensor_is_the_same_in_every_bit(
    store: TensorStore, make: Callable[[], torch.Tensor], is_written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = Gate(monkeypatch, "pwritev")
    before = put_one(store, torch.zeros(10))  # opens the file, and takes its first block
    if not is_written:
        writes.is_open.clear()
    tensor = make()
    twin = copy.deepcopy(tensor)
    key = put_one(store, tensor)
    if is_written:
        until_written(store)
        tensor = None
    back = store.get(key)
    assert same(back, twin)
    assert same(store.get(key), twin)
    assert io_of(store).ranges.end > BLOCK
    writes.is_open.set()
    del before


def test_a_written_tensor_leaves_memory_and_is_read_from_the_file(store: TensorStore, tmp_path: Path) -> None:
    tensor = torch.arange(5000.0)
    gone = []
    weakref.finalize(tensor.untyped_storage(), gone.append, 1)
    key = put_written(store, tensor)
    del tensor
    assert gone
    offset = key.piece.handle.offset
    (number,) = files_in(tmp_path)
    with Path(f"/proc/self/fd/{number}").open("r+b", buffering=0) as other:
        other.seek(offset)
        other.write(torch.tensor([7.0]).numpy().tobytes())
        os.fsync(other.fileno())
    back = store.get(key)
    assert back[0] == 7
    assert torch.equal(back[1:], torch.arange(5000.0)[1:])


def test_reloaded_bytes_are_freed_with_the_tensor_that_was_read(store: TensorStore) -> None:
    key = put_written(store, torch.arange(5000.0))
    back = store.get(key)
    freed = []
    weakref.finalize(back.untyped_storage(), freed.append, 1)
    del back
    assert freed, "the key is alive, as in a graph that is retained"
    assert torch.equal(store.get(key), torch.arange(5000.0))


def test_tensors_read_from_a_closed_file_are_freed_with_their_keys(store: TensorStore) -> None:
    keys = put_numbers(store, 3)
    until_written(store)
    store.get(keys[2])
    read = weakref.ref(keys[1].piece.handle.read.result().untyped_storage())
    gc.disable()  # no cycle holds it
    try:
        place_of(store).close()
        del keys
        assert store.num_alive == 0
        assert read() is None
    finally:
        gc.enable()


def test_a_tensor_saved_again_after_an_edit_has_its_new_bytes(store: TensorStore) -> None:
    tensor = torch.zeros(5000)
    mine = store.open_group(group())
    before = store.put(tensor, mine)
    tensor.add_(1)
    after = store.put(tensor, mine)
    store.close_group(mine)
    assert store.get(before) is None
    assert torch.equal(store.get(after), torch.ones(5000))


def test_views_of_one_storage_go_once_and_come_back_as_views_of_one(store: TensorStore) -> None:
    qkv = torch.randn(64, 300)
    mine = store.open_group(group())
    keys = [store.put(part, mine) for part in (qkv, *qkv.split(100, dim=1))]
    assert store.num_alive == 1
    until_written(store)
    whole, *parts = [store.get(key) for key in keys]
    assert len({part.untyped_storage().data_ptr() for part in (whole, *parts)}) == 1
    assert all(same(part, twin) for part, twin in zip(parts, qkv.split(100, dim=1), strict=True))


def test_keys_that_die_free_their_bytes_with_or_without_backward(store: TensorStore) -> None:
    for _ in range(2):
        keys = [put_one(store, torch.randn(3000), f"h.{at}") for at in range(5)]
        store.get(keys[2])
        assert store.num_alive == 5
        assert io_of(store).ranges.end == 5 * in_blocks(12000)
        del keys
        assert store.num_alive == 0
        assert io_of(store).ranges.end == 0
        until_written(store)
        assert io_of(store)._loaded_bytes == 0


# ---- memory, files, threads


def test_nothing_is_opened_before_the_first_put(tmp_path: Path) -> None:
    store = opened(tmp_path, min_elements=1024)
    put_one(store, torch.randn(1000))
    assert not files_in(tmp_path)
    assert not disk_threads()


@pytest.mark.parametrize("how", ["close", "collected"])
def test_file_and_thread_end_with_the_place_even_while_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    store = opened(tmp_path)
    key = put_written(store, torch.randn(3000))
    writes = Gate(monkeypatch, "pwritev")
    writes.is_open.clear()
    busy = put_one(store, torch.randn(3000))
    until(lambda: writes.offsets)
    threading.Timer(0.05, writes.is_open.set).start()
    if how == "close":
        place_of(store).close()  # the store itself does that only when nothing is kept
        with pytest.raises(StoreError, match=r"closed.*fix: run backward before"):
            store.get(key)
        assert store.num_alive == 2
    else:
        del store, key, busy
        gc.collect()
    assert_gone(tmp_path)


def test_no_thread_is_waited_for_when_the_program_ends(tmp_path: Path) -> None:
    script = f"""
import torch
from graphckpt.stores import Disk, TensorGroup, Placement
store = Placement(offload=Disk({str(tmp_path)!r})).store
key = store.put(torch.ones(10**6), store.open_group(TensorGroup("h.0", list, print)))
"""
    subprocess.run([sys.executable, "-c", script], timeout=60, check=True)


# ---- bounds, reading ahead, cancelling


def test_no_more_than_the_bound_is_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, writes = with_held_writes(tmp_path, monkeypatch, in_flight_bytes=100 * KIB)
    alive = []
    number_put = []

    def put_all() -> None:
        for at in range(8):
            tensor = torch.full((10 * KIB,), float(at))  # 40 KiB
            alive.append(weakref.ref(tensor.untyped_storage()))
            number_put.append(put_one(store, tensor))
            del tensor

    thread = threading.Thread(target=put_all)
    thread.start()
    until(lambda: len(alive) == 3)
    time.sleep(0.05)
    assert len(number_put) == 2  # the third waits
    assert io_of(store)._unwritten_bytes == 80 * KIB
    writes.measured.clear()
    writes.measure = lambda: sum(ref() is not None for ref in alive)
    writes.is_open.set()
    thread.join(SECONDS)
    assert len(number_put) == 8
    assert max(writes.measured) <= 3  # two held by the store, one by the thread that waits
    until_written(store)
    assert [store.get(key)[0].item() for key in number_put] == list(range(8))


def test_the_next_group_is_read_before_anybody_takes_it(store: TensorStore, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = put_numbers(store, 6)
    until_written(store)
    reads = Gate(monkeypatch, "preadv")
    store.get(keys[5])
    ahead = [keys[at].piece.handle for at in (4, 3)]
    until(lambda: all(handle.read is not None and handle.read.done() for handle in ahead))
    assert reads.offsets == [keys[at].piece.handle.offset for at in (5, 4, 3)]
    reads.is_open.clear()  # what was read ahead needs no read
    assert store.get(keys[4])[0] == 4
    reads.is_open.set()


def test_reading_ahead_stays_within_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path, in_flight_bytes=100 * KIB)
    mine = store.open_group(group())
    keys = [store.put(torch.full((10 * KIB,), float(at)), mine) for at in range(8)]  # 40 KiB each, in one group
    until_written(store)
    reads = Gate(monkeypatch, "preadv", lambda: io_of(store)._loaded_bytes)
    assert [store.get(key)[0].item() for key in reversed(keys)] == list(range(8))[::-1]
    assert reads.offsets == [key.piece.handle.offset for key in reversed(keys)], "what was saved last is read first"
    assert max(reads.measured) <= 80 * KIB
    del keys
    assert store.num_alive == 0
    until(lambda: io_of(store)._loaded_bytes == 0)


def test_a_tensor_prefetched_while_it_is_written_needs_no_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, writes = with_held_writes(tmp_path, monkeypatch)
    reads = Gate(monkeypatch, "preadv")
    keys = put_numbers(store, 3)
    store.get(keys[2])  # asks for 1 and 0 as well
    writes.is_open.set()
    until_written(store)
    assert [store.get(key)[0].item() for key in keys] == [0, 1, 2]
    assert not [offset for offset in reads.offsets if offset != keys[2].piece.handle.offset]


def test_a_tensor_returned_while_its_write_ends_is_not_held_by_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, writes = with_held_writes(tmp_path, monkeypatch)
    has_saved, ends = threading.Event(), threading.Event()
    save = disk_store.Transfer.save

    def save_and_wait(transfer: Any, handle: Any, ready: Any) -> None:
        save(transfer, handle, ready)
        has_saved.set()
        assert ends.wait(SECONDS)

    monkeypatch.setattr(disk_store.Transfer, "save", save_and_wait)
    key = put_one(store, torch.ones(5000))
    io_of(store).prefetch([key.piece.handle])
    writes.is_open.set()
    assert has_saved.wait(SECONDS)
    memory = weakref.ref(store.get(key).untyped_storage())
    ends.set()
    until_written(store)
    assert memory() is None


def test_a_freed_key_cancels_its_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, writes = with_held_writes(tmp_path, monkeypatch)
    keys = put_numbers(store, 5)
    until(lambda: writes.offsets)
    offsets = [key.piece.handle.offset for key in keys]
    first, _, last = keys[0], keys.pop(2), keys[-1]
    del keys, _
    assert store.num_alive == 2
    writes.is_open.set()
    until_written(store)
    assert writes.offsets == [offsets[0], offsets[4]]
    assert (store.get(first)[0], store.get(last)[0]) == (0, 4)


def test_a_range_that_is_reused_while_it_is_written_holds_the_new_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, writes = with_held_writes(tmp_path, monkeypatch)
    old = put_one(store, torch.zeros(5000))
    until(lambda: writes.offsets)
    offset = old.piece.handle.offset
    del old
    assert store.num_alive == 0
    new = put_one(store, torch.ones(5000))
    assert new.piece.handle.offset == offset
    writes.is_open.set()
    until_written(store)
    assert torch.equal(store.get(new), torch.ones(5000))


def test_asking_twice_reads_once_and_taking_twice_reads_twice(
    store: TensorStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = store.open_group(group())
    key = store.put(torch.arange(5000.0), mine)
    until_written(store)
    reads = Gate(monkeypatch, "preadv")
    place, handle = place_of(store), key.piece.handle
    for _ in range(3):
        place.prefetch([handle], mine)
    first = place.get(handle, mine)
    assert reads.offsets == [handle.offset]
    second = place.get(handle, mine)
    assert reads.offsets == [handle.offset] * 2
    assert torch.equal(first, second)


def test_several_threads(tmp_path: Path) -> None:
    store = opened(tmp_path, in_flight_bytes=50 * KIB)
    faults = []

    def work(number: int) -> None:
        try:
            for step in range(40):
                value = 1000.0 * number + step
                keys = [put_one(store, torch.full((3000 + number,), value + at)) for at in range(4)]
                for at in reversed(range(4)):
                    back = store.get(keys.pop())
                    assert torch.equal(back, torch.full((3000 + number,), value + at))
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not faults
    assert store.num_alive == 0
    assert len(disk_threads()) == 2


def test_a_thread_stores_while_another_one_is_in_the_destructor_of_a_piece(
    store: TensorStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = put_one(store, torch.zeros(3000))
    others = []

    def release(handle: Any) -> None:
        monkeypatch.undo()
        others.append(put_one(store, torch.full((3000,), 1.0)))

    monkeypatch.setattr(disk_store._DiskHandle, "release", release)
    del key
    others.append(put_one(store, torch.full((3000,), 2.0)))
    assert store.num_alive == 2
    for number in (2.0, 1.0):
        assert torch.equal(store.get(others.pop()), torch.full((3000,), number))
    assert store.num_alive == 0


def test_the_time_of_copies_and_the_bytes_are_counted(store: TensorStore) -> None:
    traffic = Traffic()
    key = store.put(torch.randn(5000), store.open_group(group(traffic=traffic)))
    until_written(store)
    written = traffic.copy_seconds
    assert written > 0
    store.get(key)
    assert traffic.copy_seconds > written
    assert traffic.bytes_at == {"device": 0, "host": 0, "disk": 5 * BLOCK}


# ---- what can fail


def failing(monkeypatch: pytest.MonkeyPatch, name: str, fault: Any, *, owner: Any = os, after: int = 0) -> None:
    call, count = getattr(owner, name), [0]

    def fails(*arguments: Any, **_: object) -> Any:
        count[0] += 1
        if count[0] <= after:
            return call(*arguments)
        if isinstance(fault, int):
            return fault
        raise type(fault)(*fault.args)  # a new one: its traceback holds what it came through

    monkeypatch.setattr(owner, name, fails)


def assert_gone(folder: Path) -> None:
    until(lambda: not disk_threads())  # those of failed tests hold theirs, so the first failure is the one to look at
    assert not files_in(folder)


WRITE_FAULTS = {
    "disk full": (OSError(errno.ENOSPC, "No space left on device"), r"ENOSPC.*fix: free space there"),
    "quota": (OSError(errno.EDQUOT, "Disk quota exceeded"), r"EDQUOT.*fix: free space there"),
    "read-only": (OSError(errno.EROFS, "Read-only file system"), r"EROFS.*fix: give this user write access"),
    "disk broken": (OSError(errno.EIO, "Input/output error"), r"EIO.*fix: check the system log for disk errors"),
    "nothing written": (0, r"expected \d+ bytes to be written, got 0 \(EIO\)"),
    "thread killed": (SystemExit("killed"), r"SystemExit: killed"),
    "no memory": (MemoryError(), r"MemoryError.*fix: lower Disk\(in_flight_bytes"),
}


@pytest.mark.parametrize(("fault", "says"), WRITE_FAULTS.values(), ids=WRITE_FAULTS)
@pytest.mark.parametrize("asks", ["put", "seal", "get"])
def test_a_write_that_fails_is_one_error_and_the_next_step_begins_anew(
    store: TensorStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any, says: str, asks: str
) -> None:
    good = put_written(store, torch.zeros(10), "h.6")
    with monkeypatch.context() as broken:
        failing(broken, "pwritev", fault)
        mine = store.open_group(group("h.7"))
        key = store.put(torch.randn(5000), mine)
        until(lambda: io_of(store).failure)
        with pytest.raises(StoreError, match=says) as caught:  # noqa: PT012
            if asks == "put":
                store.put(torch.randn(9), mine)
            elif asks == "seal":
                store.close_group(mine)
            else:
                store.get(key)
    for part in ("h.7: offload", "failed to write 19.5 KiB", str(tmp_path), "fix: "):
        assert part in str(caught.value)
    assert_gone(tmp_path)
    for lost in (key, good):  # whoever still asks is told the same
        with pytest.raises(StoreError, match=r"h.7: offload"):
            store.get(lost)
    fresh = put_one(store, torch.arange(5000.0))
    assert torch.equal(store.get(fresh), torch.arange(5000.0))
    del key, good, lost, fresh, caught  # whose traceback holds keys
    gc.collect()
    assert store.num_alive == 0


@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "No space left on device"), SystemExit("killed")])
def test_a_put_that_waits_for_room_learns_of_the_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    store = opened(tmp_path, in_flight_bytes=1)
    put_written(store, torch.zeros(10))
    failing(monkeypatch, "pwritev", fault)
    mine = store.open_group(group("h.7"))
    keys = []
    with pytest.raises(StoreError, match=r"h.7: offload"):
        keys += [store.put(torch.randn(5000), mine) for _ in range(3)]
    assert_gone(tmp_path)


READ_FAULTS = {
    "disk broken": (os, "preadv", OSError(errno.EIO, "Input/output error"), r"EIO.*fix: check the system log"),
    "short": (os, "preadv", 0, r"expected 20480 bytes to be read, got 0"),
    "thread killed": (os, "preadv", SystemExit("killed"), r"SystemExit: killed"),
    "anything": (os, "preadv", ValueError("surprise"), r"ValueError: surprise"),
    "no memory": (torch, "empty", RuntimeError("can't allocate memory"), r"can't allocate memory.*fix: lower Disk"),
}


@pytest.mark.parametrize(("owner", "name", "fault", "says"), READ_FAULTS.values(), ids=READ_FAULTS)
def test_a_read_that_fails_is_one_error(
    store: TensorStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: Any, fault: Any, says: str
) -> None:
    key = put_written(store, torch.randn(5000), "h.7")
    with monkeypatch.context() as broken:
        failing(broken, name, fault, owner=owner)
        with pytest.raises(StoreError, match=says) as caught:
            store.get(key)
    assert "h.7: offload: failed to read 19.5 KiB" in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert_gone(tmp_path)
    assert store.get(put_one(store, torch.ones(5000))).sum() == 5000


def test_a_failure_while_reading_ahead_is_told_at_the_next_call(
    store: TensorStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = put_numbers(store, 3)
    until_written(store)
    failing(monkeypatch, "preadv", OSError(errno.EIO, "Input/output error"), after=1)
    with contextlib.suppress(StoreError):  # the thread may be quick
        store.get(keys[2])
    until(lambda: io_of(store) is None or io_of(store).failure)
    with pytest.raises(StoreError, match=r"h.1: offload"):
        store.get(keys[1])
    assert_gone(tmp_path)


@pytest.mark.parametrize("where", ["put", "get", "between"])
def test_after_an_interrupt_the_next_step_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Ctrl-C ends a method that waits for a thread, or a step between two of them; nothing hangs, nothing is left."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        store = opened(tmp_path, in_flight_bytes=1)
        put_written(store, torch.zeros(10))
        mine = store.open_group(group("h.7"))
        keys = [store.put(torch.randn(5000), mine)]
        until_written(store)
        gate = Gate(monkeypatch, "preadv" if where == "get" else "pwritev")
        gate.is_open.clear()
        main = threading.get_ident()  # a signal to another thread would not end a wait of this one
        timer = threading.Timer(0.1, signal.pthread_kill, [main, signal.SIGINT])
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            if where == "between":
                place_of(store).put(torch.zeros(5000, dtype=torch.uint8), mine)  # its handle is lost
                raise KeyboardInterrupt
            timer.start()
            if where == "get":
                store.get(keys[0])
            # Held, since the write of a freed one is cancelled if it has not begun.
            keys.extend(store.put(torch.randn(5000), mine) for _ in range(3))
        threading.Timer(0.1, gate.is_open.set).start()
        del keys, mine
        gc.collect()
        assert store.num_alive == 0
        for _ in range(2):
            keys = put_numbers(store, 3)
            assert [store.get(key)[-1].item() for key in reversed(keys)] == [2, 1, 0]
            del keys
        until(lambda: len(files_in(tmp_path)) == 1)
        assert io_of(store).ranges.end == 0 or store.num_alive == 0
        until(lambda: len(disk_threads()) == 2)
    finally:
        signal.signal(signal.SIGINT, previous)


def test_an_interrupted_step_that_is_still_held_does_not_fail_the_next_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A traceback holds the keys of the interrupted step; the input is the same tensor in the next one."""

    def interrupt(self: Any, handle: Any) -> None:
        raise KeyboardInterrupt

    store, x = opened(tmp_path), torch.randn(5000)
    held = put_one(store, x)
    with monkeypatch.context() as patch:
        patch.setattr(disk_store._OpenFile, "get", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.get(held)
    for _ in range(2):
        key, again = put_one(store, x), put_one(store, x)
        assert key.piece is again.piece  # the new bytes are shared
        assert same(store.get(key), x)
        assert same(store.get(again), x)
    with pytest.raises(StoreError, match="closed before its bytes were read"):
        store.get(held)


OPEN_FAULTS = {
    "full": (os, "pwritev", OSError(errno.ENOSPC, "No space left on device"), "ENOSPC.*fix: free space"),
    "too many files": (os, "open", OSError(errno.EMFILE, "Too many open files"), r"EMFILE.*fix: raise.*ulimit -n"),
    "read-only": (os, "open", OSError(errno.EROFS, "Read-only file system"), "EROFS.*fix: give this user write access"),
    "no thread": (threading.Thread, "start", RuntimeError("can't start new thread"), "can't start new thread"),
}


@pytest.mark.parametrize(("owner", "name", "fault", "says"), OPEN_FAULTS.values(), ids=OPEN_FAULTS)
def test_a_file_that_cannot_be_opened(
    store: TensorStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: Any, fault: Any, says: str
) -> None:
    with monkeypatch.context() as broken:
        failing(broken, name, fault, owner=owner)
        with pytest.raises(StoreError, match=rf"h.7: offload: .* 19.5 KiB in {tmp_path}.*{says}"):
            put_one(store, torch.randn(5000), "h.7")
    assert_gone(tmp_path)
    assert store.num_alive == 0
    assert put_one(store, torch.randn(5000)) is not None


def test_a_folder_that_is_missing(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scrath.txt").touch()  # nearer, but a file
    store = opened(tmp_path / "scrath")
    says = rf"h.7: offload: .*ENOENT.*fix: create the folder · did you mean '{tmp_path}/scratch'\?, or use offload"
    with pytest.raises(StoreError, match=says):
        put_one(store, torch.randn(5000), "h.7")
    (tmp_path / "scrath.txt").unlink()
    (tmp_path / "scrath").mkdir()
    assert put_one(store, torch.randn(5000)) is not None


def test_a_forked_child_has_a_file_of_its_own(store: TensorStore, tmp_path: Path) -> None:
    key = put_written(store, torch.arange(5000.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of any fork beside threads
        child = os.fork()
    if not child:
        code = 1
        try:
            with pytest.raises(StoreError, match=r"19.5 KiB.*belong to process \d+, and this process is a fork of it"):
                store.get(key)
            fresh = [put_one(store, torch.full((5000,), 7.0 + at)) for at in range(3)]
            until_written(store)
            good = [store.get(each)[0].item() for each in fresh] == [7, 8, 9] and len(files_in(tmp_path)) == 1
            code = 0 if good else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(store.get(key), torch.arange(5000.0))


# ---- kinds of file systems


@pytest.mark.parametrize("lacks", [("O_DIRECT",), ("O_TMPFILE",), ("O_DIRECT", "O_TMPFILE")])
def test_without_what_linux_has(
    store: TensorStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: tuple[Any, ...]
) -> None:
    for name in lacks:
        monkeypatch.delattr(os, name)
    tensor = torch.randn(3 * MIB)
    key = put_one(store, tensor)
    assert io_of(store)._writer._file.is_direct == ("O_DIRECT" not in lacks)
    assert not list(tmp_path.iterdir())
    until_written(store)
    assert torch.equal(store.get(key), tensor)


@pytest.mark.parametrize("name", ["pwritev", "open"])
def test_a_file_system_that_refuses_direct_writes(
    store: TensorStore, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    call = getattr(os, name)

    def refuses(*arguments: Any) -> Any:
        if name == "open" and not arguments[1] & os.O_DIRECT:
            return call(*arguments)
        if name == "pwritev" and count:
            return call(*arguments)
        count.append(1)
        raise OSError(errno.EINVAL, "Invalid argument")

    count: list[int] = []
    monkeypatch.setattr(os, name, refuses)
    settled = []
    monkeypatch.setattr(os, "fdatasync", settled.append)
    key = put_written(store, torch.arange(5000.0))
    assert count
    assert settled
    assert torch.equal(store.get(key), torch.arange(5000.0))


def test_writes_and_reads_that_stop_half_way_go_on(store: TensorStore, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev, preadv = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda number, data, offset: min(pwritev(number, data, offset), 2 * BLOCK + 100))
    monkeypatch.setattr(os, "preadv", lambda number, data, offset: min(preadv(number, data, offset), BLOCK + 7))
    tensor = torch.randn(50_000)
    key = put_written(store, tensor)
    assert torch.equal(store.get(key), tensor)


IN_MEMORY = pytest.mark.skipif(file_system_in_memory("/dev/shm") is None, reason="no tmpfs here")


@IN_MEMORY
def test_a_folder_in_memory_is_said_to_save_nothing() -> None:
    store = opened("/dev/shm", min_elements=1024)
    notes: list[str] = []
    mine = store.open_group(group(notes=notes))
    with pytest.warns(UserWarning, match=r"saves no memory: /dev/shm is on tmpfs.* · fix: set offload"):
        key = store.put(torch.arange(5000.0), mine)
    assert any("/dev/shm is on tmpfs" in note for note in notes)
    assert torch.equal(store.get(key), torch.arange(5000.0))


def test_tensors_of_an_unknown_device_stay(tmp_path: Path) -> None:
    notes: list[str] = []
    assert Disk(tmp_path).byte_store_for(torch.device("mps"), notes.append) is None
    assert notes == ["offload to 'disk' has no effect: tensors on 'mps' are not supported"]


# ---- settings


def test_settings_are_read() -> None:
    assert parse_offload("disk") == Disk()
    assert parse_offload("disk:/scratch/run:7") == Disk("/scratch/run:7")
    assert Disk.parse("~/scratch").folder == str(Path.home() / "scratch")
    assert Disk(Path("/scratch"), in_flight_bytes="64MiB") == Disk("/scratch", in_flight_bytes=64 * MIB)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: parse_offload("disk:"), r"expected a folder after 'disk:', got none · fix: use 'disk:/path"),
        (lambda: Disk(7), r"Disk.folder: expected a path or None, got 7 · fix"),
        (lambda: Disk(""), r"Disk.folder: expected a path or None, got '' · fix"),
        (lambda: Disk(in_flight_bytes=0), r"Disk.in_flight_bytes: expected at least 1 byte, got 0 · fix"),
        (lambda: Disk(in_flight_bytes=-5), r"Disk.in_flight_bytes: .*expected 0 or more bytes, got -5 · fix"),
        (lambda: Disk(in_flight_bytes="12 G"), r"Disk.in_flight_bytes: .*'12 G'.* · fix"),
        (lambda: Disk(in_flight_bytes=1.5), r"Disk.in_flight_bytes: .* · fix"),
    ],
)
def test_settings_without_meaning(make: Callable[..., Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()
