"""Partitions saved tensors over ranks: each stores a slice of a tensor that is equal on all, and all-gathers it."""

from __future__ import annotations

import json
import time
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, final

import torch
import torch.distributed as dist

from graphckpt._compat import all_gather_bytes, assert_on_device, is_watched, unseen_by_modes
from graphckpt.errors import ConfigError, StoreError
from graphckpt.stores.base import ByteHandle, ByteStore, TensorGroup, Tier

_LONGEST_SLEEP = 0.01  # seconds between two checks for the other ranks' messages


@final
class RendezvousTimeout(Exception):  # noqa: N818  # torch.distributed's word; the caller raises the error for users
    """Some ranks, given by their global numbers, did not join in time."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(f"rank {', '.join(map(str, ranks))} did not join")
        self.ranks = ranks


def exchange(process_group: Any, members: list[int], message: bytes, *, topic: str, seconds: float) -> list[bytes]:
    """Returns the messages of all ranks, in order of rank. Blocks the host, but no stream.

    Unlike a collective, ranks at different points of the program do not deadlock, messages may differ in length, and
    the ranks that did not join can be named. So it goes through the group's key-value store. The exchanges of a
    ``topic`` are counted: each rank's first one belongs together, and so on.

    Raises:
        RendezvousTimeout: Some ranks did not join in time.
    """
    store = process_group.get_group_store()
    this_rank = process_group.rank()
    number = store.add(f"{topic}/{this_rank}", 1)
    keys = [f"{topic}/{number}/{rank}" for rank in range(len(members))]
    store.set(keys[this_rank], message)
    deadline = time.monotonic() + seconds
    pause = _LONGEST_SLEEP / 100
    # Not `store.wait(keys)`, whose error does not say which ranks are missing.
    while not store.check(keys):
        if time.monotonic() > deadline:
            raise RendezvousTimeout(
                [member for member, key in zip(members, keys, strict=True) if not store.check([key])]
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_SLEEP)
    messages: list[bytes] = store.multi_get(keys)
    if number > 1:  # all ranks that are here have read the previous messages
        store.delete_key(f"{topic}/{number - 1}/{this_rank}")
    return messages


@final
class RankGroup:
    """The ranks of a process group, at least two, of which this rank is a member; waits for each other are limited."""

    __slots__ = ("limit", "members", "process_group", "rank", "size")

    def __init__(self, process_group: Any, timeout_seconds: float) -> None:
        self.process_group = process_group
        self.rank: int = process_group.rank()
        self.size: int = process_group.size()
        self.members: list[int] = dist.get_process_group_ranks(process_group)
        """Global ranks."""
        self.limit = timedelta(seconds=timeout_seconds)

    def gather(self, slices: Sequence[torch.Tensor], block: str) -> PendingGather:
        """Starts one all-gather of all ranks' ``slices``, which must have equal sizes on all ranks."""
        return PendingGather(self, slices, block)

    def exchange(self, message: bytes, block: str) -> list[bytes]:
        seconds = self.limit.total_seconds()
        try:
            return exchange(self.process_group, self.members, message, topic="graphckpt", seconds=seconds)
        except RendezvousTimeout as timeout:
            self.fail(block, f"{timeout} at this block")
        except RuntimeError as error:
            self.fail(block, "failed to exchange messages", error)

    def fail(self, block: str, what: str, cause: Exception | None = None) -> NoReturn:
        reason = f" ({str(cause).splitlines()[0][:200]})" if cause is not None and str(cause) else ""
        raise StoreError(
            f"{block}: partition: {what} over {self.size} ranks {self.members} within"
            f" {self.limit.total_seconds():g} s{reason} · fix: check why a rank is gone, late, or runs other blocks or"
            " policies than this one; for slow ranks use Partition(timeout_seconds=...)"
        ) from cause


# Note [A counted all-gather is synchronous]
# A thread of gloo frees the bytes of an all-gather some time after it is done, so that live bytes counted by a dispatch
# mode would differ from run to run. While they are counted, copies that are not counted are gathered, and the counted
# bytes are held as long as the gather's object, as gloo and NCCL do.


@final
class PendingGather:
    """An all-gather in progress: runs of bytes, of each of which every rank sends one slice.

    ::

        sent by rank 0   [ a0 | b0 ]
        sent by rank 1   [ a1 | b1 ]
        output           [ a0 | b0 | a1 | b1 ]
        runs             [ a0 | a1 ]  [ b0 | b1 ]     in separate memory, so that one does not hold the other
    """

    __slots__ = ("_block", "_counted", "_lengths", "_output", "_ranks", "_runs", "_work")

    def __init__(self, ranks: RankGroup, slices: Sequence[torch.Tensor], block: str) -> None:
        self._ranks = ranks
        self._block = block
        self._lengths = [piece.numel() for piece in slices]
        sent = slices[0] if len(slices) == 1 else torch.cat(list(slices))
        output = sent.new_empty(sent.numel() * ranks.size)
        self._output: torch.Tensor | None = output
        self._runs: list[torch.Tensor | None] = []
        self._work: Any = None
        try:
            if output.device.type != "cpu" or not is_watched():
                self._work = all_gather_bytes(ranks.process_group, output, sent, ranks.limit)
                return
            self._counted = output, sent  # see Note [A counted all-gather is synchronous]
            with unseen_by_modes():
                copy = torch.empty_like(output)
                all_gather_bytes(ranks.process_group, copy, sent.clone(), ranks.limit).wait()
                output.copy_(copy)
        except RuntimeError as error:
            self._fail(error)

    def take(self, index: int) -> torch.Tensor:
        try:
            if self._work is not None:
                self._work.wait()  # on CUDA the current stream waits, which may differ from call to call
        except RuntimeError as error:
            self._runs, self._output = [None] * len(self._lengths), None
            self._fail(error)
        if self._output is not None:
            rows = self._output.view(self._ranks.size, -1)
            self._output = None
            # Of several runs each is a copy, as its rows are not adjacent, and the output is freed here.
            self._runs = [run.reshape(-1) for run in rows.split(self._lengths, dim=1)]
        run, self._runs[index] = self._runs[index], None
        assert run is not None
        return run

    def drop(self, index: int) -> None:
        if self._runs:
            self._runs[index] = None

    def _fail(self, error: RuntimeError) -> NoReturn:
        num_bytes = sum(self._lengths) * self._ranks.size
        self._ranks.fail(self._block, f"failed to all-gather {num_bytes} bytes", error)


_ALIGN = 16  # bytes; slices begin where vectorised kernels may load
_CHUNK = 1 << 18  # words of 8 bytes per iteration, so that a checksum takes a few MiB besides the tensor
_PROBED = 256  # words compared in each call: data-parallel ranks differ in nearly all of them
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 over the golden ratio, as a signed word: multiplying by it spreads bits


@final
@dataclass(frozen=True)
class Partition:
    """The ranks that share saved tensors, each with one slice.

    All of them must run the same blocks on equal tensors, as tensor-parallel ranks do, in every step and in
    ``explain()``.

    Args:
        group: A ``ProcessGroup``; a ``DeviceMesh`` with one dimension, or with a dimension called ``"tp"``; ``True``
            for the mesh of the DTensor parameters of the first block that saves something, or all ranks if it has none.
        timeout_seconds: How long a rank waits for the others. NCCL all-gathers use the ``timeout`` of their process
            group instead, because enforcing another one would block the host.

    Raises:
        ConfigError: ``group`` is of another type, or ``timeout_seconds`` is not positive.
    """

    group: Any = True
    timeout_seconds: float = 300.0

    def __post_init__(self) -> None:
        if _is_mesh(self.group):
            _tensor_parallel_group(self.group)
        elif self.group is not True and not (
            dist.is_available()
            and (isinstance(self.group, dist.ProcessGroup) or self.group == dist.GroupMember.NON_GROUP_MEMBER)
        ):
            raise ConfigError(
                f"expected a process group or a device mesh, got {self.group!r} · "
                "fix: use True, a ProcessGroup, a DeviceMesh, Partition(...) or False"
            )
        if isinstance(self.timeout_seconds, bool) or not self.timeout_seconds > 0:
            raise ConfigError(
                f"timeout_seconds: expected a positive number, got {self.timeout_seconds!r} · fix: use seconds"
            )


def parse_partition(value: Any) -> Partition | None:
    """Parses a value of ``partition``; ``None`` and ``False`` are ``None``."""
    if value is None or value is False:
        return None
    return value if isinstance(value, Partition) else Partition(value)


def group_for(partition: Any, group: TensorGroup) -> RankGroup | None:
    """Returns the ranks that ``partition`` means for the block; ``None``, with a note, if there is only this rank."""
    settings = parse_partition(partition)
    assert settings is not None
    if not (dist.is_available() and dist.is_initialized()):
        group.note("partition has no effect: torch.distributed is not initialized")
        return None
    named = settings.group
    if named is True:
        meshes = (getattr(tensor, "device_mesh", None) for tensor in group.tensors())
        named = next((mesh for mesh in meshes if mesh is not None), None)
    try:
        members = _tensor_parallel_group(named) if _is_mesh(named) else named or dist.group.WORLD
    except ConfigError as error:
        raise ConfigError(f"{group.block}.partition: {error}") from None
    if members is None or members == dist.GroupMember.NON_GROUP_MEMBER:
        group.note("partition has no effect: this rank is not in the group")
        return None
    if members.size() == 1:
        group.note("partition has no effect: the group has one rank")
        return None
    return RankGroup(members, settings.timeout_seconds)


def _is_mesh(value: Any) -> bool:
    if not dist.is_available():
        return False
    from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415 - missing in a build without distributed

    return isinstance(value, DeviceMesh)


def _tensor_parallel_group(mesh: Any) -> Any:
    """Returns this rank's group in the unambiguous dimension; ``None`` if this rank is not in the mesh."""
    names = mesh.mesh_dim_names or ()
    if mesh.ndim != 1 and "tp" not in names:
        raise ConfigError(
            f"expected a mesh with one dimension or one called 'tp', got {mesh.ndim} dimensions"
            f" {names or 'without names'} · fix: use one dimension, such as mesh['tp']"
        )
    if mesh.get_coordinate() is None:
        return None
    return mesh.get_group("tp" if mesh.ndim != 1 else 0)


# Note [Same calls on all ranks]
# Collectives match by their order. Which groups are gathered, and when, follows from what a step saves and requests, so
# ranks that run the same blocks on the same shapes issue the same all-gathers. That they do is checked on the first
# call of each block and sequence of sizes, by messages that cannot get out of order (`RankGroup.exchange`). From then
# on each rank compares a few words of what it gathers with what it saved: ranks may get other data later, or run in
# another order.


@final
class _ShardedHandle(ByteHandle):
    """Bytes as this rank stores them: in full, until the ranks have compared them."""

    __slots__ = ("__weakref__", "data", "gather", "inner", "is_split", "probe", "run", "slice")

    def __init__(self, data: torch.Tensor) -> None:
        super().__init__(data.numel())
        self.data: torch.Tensor | None = data
        """All bytes, an alias of the tensor's memory."""
        self.is_split = False
        self.slice: torch.Tensor | None = None
        """This rank's bytes, if no inner store holds them."""
        self.inner: ByteHandle | None = None
        """The inner store's handle: to this rank's bytes, or to all of them."""
        self.probe: torch.Tensor | int = 0
        """The sum of a few words of all bytes."""
        self.gather: PendingGather | None = None
        """The all-gather of the slices in progress, which holds its references."""
        self.run = 0
        """The position of the bytes in it."""

    def release(self) -> None:
        self.slice = self.data = None

    def is_lost(self) -> bool:
        return self.inner is not None and self.inner.is_lost()


@final
class ShardedStore(ByteStore):
    """Stores one slice per rank; bytes that are not equal on all ranks are stored in full."""

    def __init__(self, ranks: RankGroup, device: torch.device, inner: ByteStore | None) -> None:
        self._ranks = ranks
        self._inner = inner
        self.label = "part" if inner is None else f"{inner.label} part"
        self._policy = f"{self.label} on {device.type} over ranks {ranks.members}"
        # Hashes of strings differ between processes: they are keys of this rank alone, and are never sent.
        self._is_equal: dict[int, bool] = {}  # by the hash of a block and of the sizes of its pieces up to this one
        self._calls: weakref.WeakKeyDictionary[TensorGroup, _OpenCall] = weakref.WeakKeyDictionary()
        self._warned: set[str] = set()

    @property
    def tier(self) -> Tier:
        return "device" if self._inner is None else self._inner.tier

    def stored_bytes(self, num_bytes: int) -> int:
        return self._bytes_here(self._slice_bytes(num_bytes))

    def gathered_bytes(self, num_bytes: int) -> int:
        return self._slice_bytes(num_bytes) * self._ranks.size

    def put(self, data: torch.Tensor, group: TensorGroup) -> ByteHandle:
        """Splits bytes known to be equal on all ranks; others stay as they are until the group is closed."""
        # The key of a piece covers the sizes before it in the call: of calls that save 8 and 4 bytes, and 8 and 2, the
        # first entry is the same, and the second is compared for each.
        handle = _ShardedHandle(data)
        call = self._calls.setdefault(group, _OpenCall(group.block))
        call.key = hash((call.key, handle.num_bytes))
        is_equal = self._is_equal.get(call.key)
        if is_equal is None:
            call.handles.append((call.key, handle))
        else:
            self._store_slice(handle, group, is_equal=is_equal)
        return handle

    def close_group(self, group: TensorGroup) -> None:
        """Compares the group's new sizes between ranks, then splits the tensors that are equal."""
        call = self._calls.pop(group, None)
        # Bytes may be freed before the call is over, with a graph that forward drops.
        entries = [] if call is None else [entry for entry in call.handles if entry[1].data is not None]
        if entries:  # they hold no tensors: each is freed as soon as its slice is stored
            equal = self._compare_ranks([handle.data for _, handle in entries if handle.data is not None], group)
            for (key, handle), is_equal in zip(entries, equal, strict=True):
                self._is_equal[key] = is_equal
                self._store_slice(handle, group, is_equal=is_equal)
        if self._inner is not None:
            self._inner.close_group(group)

    def hint(self, handles: Sequence[ByteHandle], group: TensorGroup) -> None:
        inner = [handle.inner for handle in _sharded(handles) if handle.inner is not None]
        if self._inner is not None and inner:
            self._inner.prefetch(inner, group)

    def prefetch(self, handles: Sequence[ByteHandle], group: TensorGroup) -> None:
        missing = [handle for handle in _sharded(handles) if handle.data is None and handle.gather is None]
        self.hint(missing, group)
        if split := [handle for handle in missing if handle.is_split]:
            self._start_gather(split, group)

    def get(self, handle: ByteHandle, group: TensorGroup) -> torch.Tensor:
        """Returns the bytes, gathering them now if they were not prefetched (on every rank)."""
        assert isinstance(handle, _ShardedHandle)
        if handle.data is not None:
            return handle.data
        if not handle.is_split:
            return self._stored(handle, group)
        if handle.gather is None:
            self._start_gather([handle], group)
        gather, handle.gather = handle.gather, None
        assert gather is not None
        full = gather.take(handle.run)[: handle.num_bytes]  # without the padding of the slices
        self._check_gathered(full, handle, group)
        return full

    def free(self, handle: ByteHandle) -> None:
        assert isinstance(handle, _ShardedHandle)
        if self._inner is not None and handle.inner is not None:
            self._inner.free(handle.inner)
        if handle.gather is not None:
            handle.gather.drop(handle.run)
        handle.gather = handle.data = handle.slice = handle.inner = None

    def begin_step(self) -> None:
        if self._inner is not None:
            self._inner.begin_step()

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()

    def _store_slice(self, handle: _ShardedHandle, group: TensorGroup, *, is_equal: bool) -> None:
        data = handle.data
        assert data is not None
        stored = data
        if is_equal:
            stored = self._slice_of(data)
            handle.is_split, handle.data, handle.probe = True, None, probe(data)
        elif group.traffic is not None:  # `TensorStore` has counted a slice
            more = self._bytes_here(handle.num_bytes) - self.stored_bytes(handle.num_bytes)
            group.traffic.count(self.tier, more, handle)
        if self._inner is not None:
            handle.inner = self._inner.put(stored, group)
            handle.data = None
        elif is_equal:
            handle.slice = stored

    def _slice_of(self, data: torch.Tensor) -> torch.Tensor:
        """Returns a copy of this rank's slice, padded with zeros."""
        num_bytes = self._slice_bytes(data.numel())
        piece = data[self._ranks.rank * num_bytes :][:num_bytes]
        if piece.numel() == num_bytes:
            return piece.clone()
        padded = data.new_zeros(num_bytes)
        padded[: piece.numel()] = piece
        return padded

    def _stored(self, handle: _ShardedHandle, group: TensorGroup) -> torch.Tensor:
        if handle.slice is not None:
            return handle.slice
        assert self._inner is not None
        assert handle.inner is not None
        return self._inner.get(handle.inner, group)

    def _start_gather(self, handles: Sequence[_ShardedHandle], group: TensorGroup) -> None:
        gather = self._ranks.gather([self._stored(handle, group) for handle in handles], group.block)
        for run, handle in enumerate(handles):
            handle.gather, handle.run = gather, run

    def _check_gathered(self, full: torch.Tensor, handle: _ShardedHandle, group: TensorGroup) -> None:
        """Checks that the ranks still save the same tensors: on the host for CPU tensors, else on the device."""
        ok = probe(full) == handle.probe
        what = "gathered bytes differ from those that this rank saved: ranks save other tensors, or in another order"
        if isinstance(ok, torch.Tensor):
            # Not on the host: it would wait for the device at each tensor, and could not in a capture.
            assert_on_device(ok, f"{group.block}: partition: {what} · fix: partition over ranks with the same data")
        elif not ok:
            raise StoreError(
                f"{group.block}: partition: {what} · fix: partition only over ranks with the same data, such as"
                " tensor-parallel ranks, and run the same blocks in the same order on all of them"
            )

    def _compare_ranks(self, pieces: Sequence[torch.Tensor], group: TensorGroup) -> list[bool]:
        """Returns for each piece whether it is equal on all ranks; see Note [Same calls on all ranks]."""
        if pieces[0].is_cuda and torch.cuda.is_current_stream_capturing():
            raise StoreError(
                f"{group.block}: partition: expected shapes seen before the capture, got new ones, which ranks cannot"
                " compare in it · fix: run one step with these shapes first"
            )
        description = {
            "block": group.block,
            "store": self._policy,
            "sizes in bytes": [piece.numel() for piece in pieces],
        }
        checksums = torch.stack([checksum(piece) for piece in pieces]).tolist()
        message = json.dumps([description, checksums]).encode()
        answers = [json.loads(text) for text in self._ranks.exchange(message, group.block)]
        first, members = answers[0][0], self._ranks.members
        for what in description:
            for member, (other, _) in zip(members, answers, strict=True):
                if other[what] != first[what]:
                    raise StoreError(
                        f"{group.block}: partition: expected the same {what} on all ranks, got {first[what]!r} on rank"
                        f" {members[0]} and {other[what]!r} on rank {member} · fix: use the same policies on all ranks,"
                        " and run the same blocks with the same shapes in the same order"
                    )
        equal = [len(set(sums)) == 1 for sums in zip(*(sums for _, sums in answers), strict=True)]
        if not all(equal):
            num_differ, num_all = equal.count(False), len(equal)
            text = "its tensors" if num_differ == num_all else f"{num_differ} of its {num_all} tensors"
            verb = "differs" if num_differ == 1 < num_all else "differ"
            text = f"partition: {text} {verb} between ranks: already sharded, left whole"
            group.note(text)
            if group.block not in self._warned:
                self._warned.add(group.block)
                warnings.warn(f"graphckpt: {group.block}: {text}", stacklevel=2)
        return equal

    def _slice_bytes(self, num_bytes: int) -> int:
        # The same on all ranks, as an all-gather needs: 100 bytes of 4 ranks are slices of 32, of which the last has 4
        # bytes and 28 zeros; `get` cuts the 128 that it gathers to 100.
        return -(-num_bytes // (self._ranks.size * _ALIGN)) * _ALIGN

    def _bytes_here(self, num_bytes: int) -> int:
        return num_bytes if self._inner is None else self._inner.stored_bytes(num_bytes)


class _OpenCall:
    """The pieces of one call of a block that the ranks compare when it is over, each with its key."""

    __slots__ = ("handles", "key")

    def __init__(self, block: str) -> None:
        self.key = hash(block)
        self.handles: list[tuple[int, _ShardedHandle]] = []


def checksum(data: torch.Tensor) -> torch.Tensor:
    """Returns an ``int64`` that depends on every bit of ``data``, flat bytes, and on its position; no host sync.

    >>> one = torch.arange(32, dtype=torch.uint8)
    >>> bool(checksum(one) == checksum(one.clone())), bool(checksum(one) == checksum(one.flip(0)))
    (True, False)
    """
    size = data.numel() // 8 * 8
    total = torch.full((), data.numel(), dtype=torch.int64, device=data.device)
    keys = torch.arange(1, 2 * min(size // 8, _CHUNK) + 16, 2, device=data.device).mul_(_ODD)
    for chunk in (*data[:size].view(torch.int64).split(_CHUNK), data[size:].to(torch.int64)):
        # A key is odd, so no bit is lost, but the highest one moved between words would not show without the shift.
        total = total * _ODD + ((chunk ^ (chunk >> 32)) * keys[: chunk.numel()]).sum()
    return total


def probe(data: torch.Tensor) -> torch.Tensor | int:
    """Returns the sum of some words of ``data``, flat bytes, spread over it: an int on the CPU, else a scalar tensor.

    >>> one = torch.arange(64, dtype=torch.uint8)
    >>> probe(one) == probe(one.clone()), probe(one) == probe(one + 1)
    (True, False)
    """
    num_words = data.numel() // 8
    sample = data[: 8 * num_words].view(torch.int64)[:: num_words // _PROBED + 1] if num_words else data.to(torch.int64)
    total = sample.sum()
    return total if data.device.type != "cpu" else int(total)


def unsplit_bytes(handle: ByteHandle) -> torch.Tensor | None:
    return handle.data if isinstance(handle, _ShardedHandle) else None


def _sharded(handles: Sequence[ByteHandle]) -> list[_ShardedHandle]:
    return [handle for handle in handles if isinstance(handle, _ShardedHandle)]
