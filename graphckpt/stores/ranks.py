"""The ranks of a process group: all-gathers of bytes and exchanges of messages, with a timeout."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn, final

import torch
import torch.distributed as dist

from graphckpt._compat import all_gather_bytes, is_watched, unseen_by_modes
from graphckpt.errors import StoreError

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
    the ranks that did not join can be named. So it goes through the group's key-value store.

    Args:
        process_group: The group; this rank is a member.
        members: Global ranks of the group.
        message: This rank's message.
        topic: The exchanges of a topic are counted: each rank's first one belongs together, and so on.
        seconds: How long to wait for the others.

    Raises:
        RendezvousTimeout: Some ranks did not join in time.
        RuntimeError: The key-value store is gone.
    """
    store = process_group.get_group_store()
    own = process_group.rank()
    number = store.add(f"{topic}/{own}", 1)
    keys = [f"{topic}/{number}/{rank}" for rank in range(len(members))]
    store.set(keys[own], message)
    deadline = time.monotonic() + seconds
    pause = _LONGEST_SLEEP / 100
    while not store.check(keys):
        if time.monotonic() > deadline:
            raise RendezvousTimeout(
                [member for member, key in zip(members, keys, strict=True) if not store.check([key])]
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_SLEEP)
    messages: list[bytes] = store.multi_get(keys)
    if number > 1:  # all ranks that are here have read the previous messages
        store.delete_key(f"{topic}/{number - 1}/{own}")
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
        """Returns the messages of all ranks, in order of rank."""
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


@final
class PendingGather:
    """An all-gather in progress: runs of bytes, of each of which every rank sends one slice.

    ::

        sent by rank 0   [ a0 | b0 ]
        sent by rank 1   [ a1 | b1 ]
        output           [ a0 | b0 | a1 | b1 ]
        runs             [ a0 | a1 ]  [ b0 | b1 ]     each its own memory, so that one does not hold the other
    """

    __slots__ = ("_block", "_lengths", "_output", "_ranks", "_runs", "_work")

    def __init__(self, ranks: RankGroup, slices: Sequence[torch.Tensor], block: str) -> None:
        self._ranks = ranks
        self._block = block
        self._lengths = [piece.numel() for piece in slices]
        sent = slices[0] if len(slices) == 1 else torch.cat(list(slices))
        self._output: torch.Tensor | None = sent.new_empty(sent.numel() * ranks.size)
        self._runs: list[torch.Tensor | None] = []
        try:
            self._work = _start_gather(ranks.process_group, self._output, sent, ranks.limit)
        except RuntimeError as error:
            self._fail(error)

    def take(self, index: int) -> torch.Tensor:
        """Returns one run, ready for the current stream, and drops its reference."""
        try:
            self._work.wait()  # on CUDA the current stream waits, which may differ from call to call
        except RuntimeError as error:
            self._runs, self._output = [None] * len(self._lengths), None
            self._fail(error)
        if self._output is not None:
            rows = self._output.view(self._ranks.size, -1)
            self._output = None
            self._runs = [part.reshape(-1) for part in rows.split(self._lengths, dim=1)]
        run, self._runs[index] = self._runs[index], None
        assert run is not None
        return run

    def drop(self, index: int) -> None:
        if self._runs:
            self._runs[index] = None

    def _fail(self, error: RuntimeError) -> NoReturn:
        num_bytes = sum(self._lengths) * self._ranks.size
        self._ranks.fail(self._block, f"failed to all-gather {num_bytes} bytes", error)


# Note [A counted all-gather is synchronous]
# A thread of gloo frees the bytes of an all-gather some time after it is done, so that live bytes counted by a dispatch
# mode would differ from run to run. While they are counted, copies that are not counted are gathered, and the counted
# bytes are held as long as the gather's object, as gloo and NCCL do.


@final
class _FinishedGather:
    """Stands for an all-gather that is done, and holds its tensors."""

    __slots__ = ("_tensors",)

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._tensors = tensors

    def wait(self) -> None:
        """Returns at once."""


def _start_gather(process_group: Any, output: torch.Tensor, sent: torch.Tensor, limit: timedelta) -> Any:
    if output.device.type != "cpu" or not is_watched():
        return all_gather_bytes(process_group, output, sent, limit)
    with unseen_by_modes():
        copy = torch.empty_like(output)
        all_gather_bytes(process_group, copy, sent.clone(), limit).wait()
        output.copy_(copy)
    return _FinishedGather(output, sent)
