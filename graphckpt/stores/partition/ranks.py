"""The ranks of a process group: all-gathers of bytes and exchanges of messages, with a timeout."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn, final

import torch
import torch.distributed as dist

from graphckpt._compat import all_gather_bytes, is_watched, unseen_by_modes
from graphckpt.errors import StoreError
from graphckpt.stores.partition.rendezvous import RendezvousTimeout, exchange

# Note [A counted all-gather is synchronous]
# A thread of gloo frees the bytes of an all-gather some time after it is done, so that live bytes counted by a dispatch
# mode would differ from run to run. While they are counted, copies that are not counted are gathered, and the counted
# bytes are held as long as the gather's object, as gloo and NCCL do.


@final
class _FinishedGather:
    """Stands for an all-gather that is done, and holds its tensors."""

    __slots__ = ("_held",)

    def __init__(self, *held: torch.Tensor) -> None:
        self._held = held

    def wait(self) -> None:
        """Returns at once."""


def _all_gather_now(process_group: Any, output: torch.Tensor, sent: torch.Tensor, limit: timedelta) -> Any:
    """Gathers as :func:`all_gather_bytes`; see Note [A counted all-gather is synchronous]."""
    if output.device.type != "cpu":
        return all_gather_bytes(process_group, output, sent, limit)
    with unseen_by_modes():
        copy = torch.empty_like(output)
        all_gather_bytes(process_group, copy, sent.clone(), limit).wait()
        output.copy_(copy)
    return _FinishedGather(output, sent)


@final
class PendingGather:
    """An all-gather in progress: runs of bytes, of each of which every rank sends one slice.

    ::

        sent by rank 0   [ a0 | b0 ]
        sent by rank 1   [ a1 | b1 ]
        whole            [ a0 | b0 | a1 | b1 ]
        runs             [ a0 | a1 ]  [ b0 | b1 ]     each its own memory, so that one does not hold the other
    """

    __slots__ = ("_block", "_lengths", "_ranks", "_runs", "_whole", "_work")

    def __init__(self, ranks: RankGroup, slices: Sequence[torch.Tensor], block: str) -> None:
        self._ranks = ranks
        self._block = block
        self._lengths = [piece.numel() for piece in slices]
        sent = slices[0] if len(slices) == 1 else torch.cat(list(slices))
        self._whole: torch.Tensor | None = sent.new_empty(sent.numel() * ranks.size)
        self._runs: list[torch.Tensor | None] = []
        try:
            self._work: Any = (_all_gather_now if is_watched() else all_gather_bytes)(
                ranks.process_group, self._whole, sent, ranks.limit
            )
        except RuntimeError as error:
            ranks.fail(block, f"failed to all-gather {self._whole.numel()} bytes", error)

    def take(self, index: int) -> torch.Tensor:
        """Returns one run, ready for the current stream, and drops its reference.

        Raises:
            StoreError: A rank is gone, or did not join in time.
        """
        try:
            self._work.wait()  # on CUDA the current stream waits, which may differ from call to call
        except RuntimeError as error:
            self._runs = [None] * len(self._lengths)
            self._whole = None
            self._ranks.fail(self._block, f"failed to all-gather {sum(self._lengths) * self._ranks.size} bytes", error)
        if self._whole is not None:
            rows = self._whole.view(self._ranks.size, -1)
            self._whole = None
            self._runs = [part.reshape(-1) for part in rows.split(self._lengths, dim=1)]
        run, self._runs[index] = self._runs[index], None
        assert run is not None
        return run

    def drop(self, index: int) -> None:
        """Drops a run that will not be used."""
        if self._runs:
            self._runs[index] = None


@final
class RankGroup:
    """The ranks of a process group, at least two.

    Args:
        process_group: The ``ProcessGroup``; this rank is a member.
        timeout_seconds: How long to wait for the others.
    """

    __slots__ = ("limit", "members", "process_group", "rank", "size")

    def __init__(self, process_group: Any, timeout_seconds: float) -> None:
        self.process_group = process_group
        self.rank: int = process_group.rank()
        self.size: int = process_group.size()
        self.members: list[int] = dist.get_process_group_ranks(process_group)
        """Global ranks."""
        self.limit = timedelta(seconds=timeout_seconds)

    def gather(self, slices: Sequence[torch.Tensor], block: str) -> PendingGather:
        """Starts one all-gather of all ranks' ``slices``, which must have equal sizes on all ranks.

        Raises:
            StoreError: The group has failed before.
        """
        return PendingGather(self, slices, block)

    def exchange(self, message: bytes, block: str) -> list[bytes]:
        """Returns the messages of all ranks, in order of rank; see ``rendezvous.exchange``.

        Raises:
            StoreError: A rank is gone, or did not join in time.
        """
        try:
            return exchange(
                self.process_group, self.members, message, topic="graphckpt", seconds=self.limit.total_seconds()
            )
        except RendezvousTimeout as timeout:
            self.fail(block, f"{timeout} at this block")
        except RuntimeError as error:
            self.fail(block, "failed to exchange messages", error)

    def fail(self, block: str, what: str, cause: Exception | None = None) -> NoReturn:
        """Raises the error for a rank that is gone or late."""
        said = f" ({str(cause).splitlines()[0][:200]})" if cause is not None and str(cause) else ""
        raise StoreError(
            f"{block}: partition: {what} over {self.size} ranks {self.members} within"
            f" {self.limit.total_seconds():g} s{said} · fix: check why a rank is gone, late, or runs other blocks or"
            " policies than this one; for slow ranks use Partition(timeout_seconds=...)"
        ) from cause
