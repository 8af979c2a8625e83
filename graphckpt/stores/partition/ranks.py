"""The ranks of a process group: bytes gathered from all of them, words exchanged with all of them, in bounded time."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, final

import torch
import torch.distributed as dist

from graphckpt._compat import all_gather_bytes, is_watched, unseen_by_modes
from graphckpt.errors import StoreError
from graphckpt.stores.partition.rendezvous import Absent, meet

if TYPE_CHECKING:
    from collections.abc import Sequence


# Note [A watched gather is over at once]
# A thread of gloo lets go of the bytes of a gather some time after it is over, so that where a dispatch mode counts
# live bytes, they would differ from run to run. There the bytes are gathered in copies that nobody counts, and what
# counts is held as long as the gather's object is, which is what gloo and NCCL do.


@final
class _Over:
    """Stands for a gather that is over, and holds what it held."""

    __slots__ = ("_held",)

    def __init__(self, *held: torch.Tensor) -> None:
        self._held = held

    def wait(self) -> None:
        """Returns at once."""


def _watched(process_group: Any, output: torch.Tensor, sent: torch.Tensor, limit: timedelta) -> Any:
    """Gathers as :func:`all_gather_bytes`; see Note [A watched gather is over at once]."""
    if output.device.type != "cpu":
        return all_gather_bytes(process_group, output, sent, limit)
    with unseen_by_modes():
        copy = torch.empty_like(output)
        all_gather_bytes(process_group, copy, sent.clone(), limit).wait()
        output.copy_(copy)
    return _Over(output, sent)


@final
class Arrival:
    """Bytes that are on their way from all ranks: runs of them, of each of which every rank has sent one slice.

    ::

        sent by rank 0   [ a0 | b0 ]
        sent by rank 1   [ a1 | b1 ]
        whole            [ a0 | b0 | a1 | b1 ]
        runs             [ a0 | a1 ]  [ b0 | b1 ]     memory of their own each, so that one does not hold the other
    """

    __slots__ = ("_block", "_lengths", "_ranks", "_runs", "_whole", "_work")

    def __init__(self, ranks: Ranks, slices: Sequence[torch.Tensor], block: str) -> None:
        self._ranks = ranks
        self._block = block
        self._lengths = [piece.numel() for piece in slices]
        sent = slices[0] if len(slices) == 1 else torch.cat(list(slices))
        self._whole: torch.Tensor | None = sent.new_empty(sent.numel() * ranks.size)
        self._runs: list[torch.Tensor | None] = []
        try:
            self._work: Any = (_watched if is_watched() else all_gather_bytes)(
                ranks.process_group, self._whole, sent, ranks.limit
            )
        except RuntimeError as error:
            ranks.fail(block, f"{self._whole.numel()} bytes could not be gathered", error)

    def take(self, index: int) -> torch.Tensor:
        """Returns one run, ready for the present stream, and lets it go.

        Raises:
            StoreError: A rank is gone, or has not come in time.
        """
        try:
            self._work.wait()  # on CUDA only the stream waits; it may be another one than the last time
        except RuntimeError as error:
            self._runs = [None] * len(self._lengths)
            self._whole = None
            self._ranks.fail(self._block, f"{sum(self._lengths) * self._ranks.size} bytes were not gathered", error)
        if self._whole is not None:
            rows = self._whole.view(self._ranks.size, -1)
            self._whole = None
            self._runs = [part.reshape(-1) for part in rows.split(self._lengths, dim=1)]
        run, self._runs[index] = self._runs[index], None
        assert run is not None
        return run

    def drop(self, index: int) -> None:
        """Nobody will take this run."""
        if self._runs:
            self._runs[index] = None


@final
class Ranks:
    """The ranks of a process group, at least two.

    Args:
        process_group: The ``ProcessGroup``, of which this rank is a member.
        timeout_seconds: How long to wait for the others.
    """

    __slots__ = ("limit", "members", "process_group", "rank", "size")

    def __init__(self, process_group: Any, timeout_seconds: float) -> None:
        self.process_group = process_group
        self.rank: int = process_group.rank()
        self.size: int = process_group.size()
        self.members: list[int] = dist.get_process_group_ranks(process_group)
        """The ranks as the whole job counts them."""
        self.limit = timedelta(seconds=timeout_seconds)

    def gather(self, slices: Sequence[torch.Tensor], block: str) -> Arrival:
        """Starts one collective that brings all ranks' ``slices`` together; all ranks pass as many bytes of each.

        Raises:
            StoreError: The group has failed before.
        """
        return Arrival(self, slices, block)

    def exchange(self, message: bytes, block: str) -> list[bytes]:
        """Returns the messages of all ranks, in order of rank; see :func:`~graphckpt.stores.partition.rendezvous.meet`.

        Raises:
            StoreError: A rank is gone, or has not come in time.
        """
        try:
            return meet(
                self.process_group, self.members, message, topic="graphckpt", seconds=self.limit.total_seconds()
            )
        except Absent as absent:
            self.fail(block, f"{absent} to this block")
        except RuntimeError as error:
            self.fail(block, "the ranks could not be asked what they keep", error)

    def fail(self, block: str, what: str, cause: Exception | None = None) -> NoReturn:
        """Raises the error of a rank that is gone or late."""
        said = f" ({str(cause).splitlines()[0][:200]})" if cause is not None and str(cause) else ""
        raise StoreError(
            f"{block}: partition: {what} over {self.size} ranks {self.members} within"
            f" {self.limit.total_seconds():g} s{said} · fix: see why a rank is gone, late, or runs other blocks or"
            " policies than this one; for slow ranks use Partition(timeout_seconds=...)"
        ) from cause
