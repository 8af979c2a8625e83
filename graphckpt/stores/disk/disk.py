"""Moves tensors to a file and back, by a thread beside the computation."""

from __future__ import annotations

import os
import tempfile
import warnings
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch

from graphckpt.errors import ConfigError, StoreError
from graphckpt.stores.byte_store import Place, Ticket
from graphckpt.stores.disk.extents import in_blocks
from graphckpt.stores.disk.file import UnlinkedFile, file_system_in_memory, what_failed
from graphckpt.stores.disk.handle import DiskTicket
from graphckpt.stores.disk.io_thread import Spool
from graphckpt.stores.disk.transfer import lane_for
from graphckpt.stores.offload import Offload
from graphckpt.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from graphckpt.stores.base import Group


@final
@dataclass(frozen=True)
class Disk(Offload):
    """A file without a name, in a folder of your choice, written and read by a thread.

    Args:
        folder: An existing folder; ``None`` for the system's own for temporary files. The file has no name, so nothing
            is left there, whatever ends the program. It grows to what one step keeps.
        in_flight_bytes: Bytes, or a size such as ``"256MiB"``. Tensors that are not written yet hold no more than this:
            then forward waits. As much again may be read ahead. A tensor that is bigger goes alone.

    Raises:
        ConfigError: A setting has no meaning.

    >>> Disk.parse("/scratch")
    Disk(folder='/scratch', in_flight_bytes=268435456)
    """

    name: ClassVar[str] = "disk"

    folder: str | os.PathLike[str] | None = None
    in_flight_bytes: int | str = 256 * 2**20

    def __post_init__(self) -> None:
        given: Any = self.folder
        if given is not None and (not isinstance(given, (str, os.PathLike)) or not str(given)):
            raise ConfigError(
                f"Disk.folder: {given!r} names no folder · fix: give a path, or None for the system's own"
            )
        try:
            num_bytes = parse_bytes(self.in_flight_bytes)
        except ValueError as error:
            raise ConfigError(f"Disk.in_flight_bytes: {error}") from None
        if num_bytes < 1:
            raise ConfigError(
                f"Disk.in_flight_bytes: {num_bytes} lets nothing pass · fix: give a size such as '256MiB'"
            )
        object.__setattr__(self, "folder", None if given is None else os.fspath(given))
        object.__setattr__(self, "in_flight_bytes", num_bytes)

    @classmethod
    def parse(cls, argument: str) -> Disk:
        """Reads the folder that follows ``"disk:"``; ``~`` is the user's home.

        Raises:
            ConfigError: Nothing follows.
        """
        if not argument:
            raise ConfigError("'disk:' names no folder · fix: use 'disk:/path/to/folder', or 'disk'")
        return cls(str(Path(argument).expanduser()))

    def place_for(self, device: torch.device, note: Callable[[str], None]) -> Place | None:
        """Returns a place with a file of its own, opened at the first ``put``."""
        if device.type not in ("cpu", "cuda") or not hasattr(os, "preadv"):
            what = f"tensors of {device.type!r}" if hasattr(os, "preadv") else "this system"
            note(f"offload to 'disk' does nothing: it knows no way for {what}")
            return None
        folder = tempfile.gettempdir() if self.folder is None else os.fspath(self.folder)
        in_memory = file_system_in_memory(folder)
        if in_memory is not None:
            saves = "saves nothing" if device.type == "cpu" else "saves memory of the device only"
            text = f"offload to 'disk' {saves}: {folder} is a {in_memory}, which is host memory"
            note(text)
            warnings.warn(f'{text} · fix: set offload to "disk:/folder/on/a/disk"', stacklevel=2)
        return DiskPlace(device, folder, int(self.in_flight_bytes))


@final
class DiskPlace(Place):
    """A file and a thread, from the first ``put`` on.

    After a failure, the file and the thread are gone, what was kept is lost, and the next ``put`` begins anew. A forked
    child does the same: it has its own file, and what its parent kept is the parent's alone.
    """

    label = "disk"
    where: ClassVar[str] = "disk"

    def __init__(self, device: torch.device, folder: str, in_flight_bytes: int) -> None:
        self._device = device
        self._folder = folder
        self._in_flight_bytes = in_flight_bytes
        self._spool: Spool | None = None
        self._stop: Callable[[], object] = _nothing

    def put(self, data: torch.Tensor, group: Group) -> Ticket:
        """Queues a write; waits while more than ``in_flight_bytes`` are not written."""
        self._check()
        if data.is_cuda and torch.cuda.is_current_stream_capturing():
            raise StoreError(
                f"{group.block}: offload: {format_bytes(data.numel())} cannot go to disk in a CUDA graph, whose replay "
                "runs no Python · fix: set offload to 'cpu', or run without capture"
            )
        with self._failing("write", data.numel(), group):
            if self._spool is None:
                self._spool = self._new_spool()
                self._stop = weakref.finalize(self, self._spool.stop)
                self._spool.start()
            return self._spool.put(data, group)

    def take(self, ticket: Ticket, group: Group) -> torch.Tensor:
        """Returns the bytes; waits for them if they have not been read ahead."""
        self._check()
        assert isinstance(ticket, DiskTicket)
        if self._spool is None or ticket.owner is not self._spool:
            raise StoreError(ticket.owner.failure or _of_another_process(group, ticket, self._folder))
        with self._failing("read", ticket.num_bytes, group):
            flat = self._spool.take(ticket, group)
        return flat if ticket.stream is None else _on_current_stream(flat, ticket.stream)

    def begin(self, tickets: Sequence[Ticket], group: Group) -> None:
        """Queues reads. What was lost in an earlier failure is passed over: ``take`` tells of it."""
        self._check()
        mine = [ticket for ticket in tickets if isinstance(ticket, DiskTicket) and ticket.owner is self._spool]
        if mine and self._spool is not None:
            with self._failing("read", sum(ticket.num_bytes for ticket in mine), group):
                self._spool.begin(mine)

    def announce(self, tickets: Sequence[Ticket], group: Group) -> None:
        """Queues reads too, where that takes no memory of the device: they wait behind others, within the bound."""
        if self._device.type == "cpu":
            self.begin(tickets, group)

    def seal(self, group: Group) -> None:
        """Reports a failure, if there was one meanwhile."""
        self._check()

    def free(self, ticket: Ticket) -> None:
        """Gives the range of the file back."""
        assert isinstance(ticket, DiskTicket)
        if self._spool is not None and ticket.owner is self._spool and self._spool.pid == os.getpid():
            self._spool.free(ticket)

    def begin_step(self) -> None:
        """Drops the file and the thread where an interrupt has ended a method of theirs."""
        if self._spool is not None and self._spool.is_disturbed():
            self.close()

    def stored_bytes(self, num_bytes: int) -> int:
        """Returns whole blocks of the file."""
        return in_blocks(num_bytes)

    def close(self) -> None:
        """Ends the thread, which closes the file."""
        self._stop()
        self._spool, self._stop = None, _nothing

    def _new_spool(self) -> Spool:
        file = UnlinkedFile(self._folder)
        try:
            return Spool(lane_for(self._device, file), self._in_flight_bytes)
        except BaseException:
            file.close()
            raise

    def _check(self) -> None:
        if self._spool is not None and self._spool.pid != os.getpid():
            self.close()
        if self._spool is not None and self._spool.failure is not None:
            text = self._spool.failure
            self.close()
            raise StoreError(text)

    @contextmanager
    def _failing(self, doing: str, num_bytes: int, group: Group) -> Iterator[None]:
        try:
            yield
        except StoreError:
            self.close()
            raise
        except (OSError, RuntimeError, MemoryError) as error:
            self.close()
            raise StoreError(what_failed(group.block, doing, num_bytes, self._folder, error)) from error


def _of_another_process(group: Group, ticket: DiskTicket, folder: str) -> str:
    return (
        f"{group.block}: offload: {format_bytes(ticket.num_bytes)} in {folder} were put by process {ticket.owner.pid}, "
        "of which this one is a fork · fix: run forward and backward in one process"
    )


def _on_current_stream(flat: torch.Tensor, made_on: torch.cuda.Stream) -> torch.Tensor:
    """Returns ``flat``, or, if this thread computes on another stream than the one that asked for it, a copy."""
    stream = torch.cuda.current_stream(flat.device)
    if stream == made_on:
        return flat
    copy = flat.clone()
    stream.synchronize()  # the original goes back to the stream that it was made on, which knows nothing of this one
    return copy


def _nothing() -> None:
    return None
