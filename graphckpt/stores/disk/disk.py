"""Offloads tensors to a file and reloads them, in a thread that overlaps with computation."""

from __future__ import annotations

import os
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, final

import torch

from graphckpt.errors import ConfigError, StoreError
from graphckpt.stores.base import TensorGroup
from graphckpt.stores.byte_store import ByteHandle, ByteStore, Tier
from graphckpt.stores.disk.extents import in_blocks
from graphckpt.stores.disk.file import UnlinkedFile, failure_message, file_system_in_memory
from graphckpt.stores.disk.handle import DiskHandle
from graphckpt.stores.disk.io_thread import IoThread
from graphckpt.stores.disk.transfer import transfer_for
from graphckpt.stores.offload import Offload
from graphckpt.units import format_bytes, parse_bytes


@final
@dataclass(frozen=True)
class Disk(Offload):
    """Offloads tensors to an unlinked temporary file, which a thread writes and reads.

    Args:
        folder: An existing folder; ``None`` for the system's folder for temporary files. The file is unlinked at open,
            so nothing is left behind, however the program ends. It grows to the bytes of one step.
        in_flight_bytes: Bytes, or a size such as ``"256MiB"``. Tensors that are not written yet hold at most this much;
            then forward waits. The same bound applies to bytes read ahead. A larger tensor is handled alone.

    Raises:
        ConfigError: A setting has the wrong type or value.

    >>> Disk.parse("/scratch")
    Disk(folder='/scratch', in_flight_bytes=268435456)
    """

    name: ClassVar[str] = "disk"
    tier: ClassVar[Literal["host", "disk"]] = "disk"

    folder: str | os.PathLike[str] | None = None
    in_flight_bytes: int | str = 256 * 2**20

    def __post_init__(self) -> None:
        given: Any = self.folder
        if given is not None and (not isinstance(given, (str, os.PathLike)) or not str(given)):
            raise ConfigError(f"Disk.folder: expected a path or None, got {given!r} · fix: use an existing folder")
        try:
            num_bytes = parse_bytes(self.in_flight_bytes)
        except ValueError as error:
            raise ConfigError(f"Disk.in_flight_bytes: {error}") from None
        if num_bytes < 1:
            raise ConfigError(
                f"Disk.in_flight_bytes: expected at least 1 byte, got {num_bytes} · fix: use a size such as '256MiB'"
            )
        object.__setattr__(self, "folder", None if given is None else os.fspath(given))
        object.__setattr__(self, "in_flight_bytes", num_bytes)

    @classmethod
    def parse(cls, argument: str) -> Disk:
        """Parses the folder after ``"disk:"``; ``~`` is the user's home.

        Raises:
            ConfigError: The folder is empty.
        """
        if not argument:
            raise ConfigError(
                "offload: expected a folder after 'disk:', got none · fix: use 'disk:/path/to/folder' or 'disk'"
            )
        return cls(str(Path(argument).expanduser()))

    def check(self) -> str | None:
        """Rejects a folder that does not exist."""
        if self.folder is None or Path(self.folder).is_dir():
            return None
        return f"offload: expected an existing folder, got {str(self.folder)!r} · fix: create it, or use 'disk'"

    def byte_store_for(self, device: torch.device, note: Callable[[str], None]) -> ByteStore | None:
        """Returns a byte store with its own file, which is opened at the first ``put``."""
        if device.type not in ("cpu", "cuda") or not hasattr(os, "preadv"):
            what = f"tensors on {device.type!r} are" if hasattr(os, "preadv") else "this operating system is"
            note(f"offload to 'disk' does nothing: {what} not supported")
            return None
        folder = tempfile.gettempdir() if self.folder is None else os.fspath(self.folder)
        in_memory = file_system_in_memory(folder)
        if in_memory is not None:
            saves = "saves no memory" if device.type == "cpu" else "saves device memory only"
            text = f"offload to 'disk' {saves}: {folder} is on {in_memory}, which is host memory"
            note(text)
            warnings.warn(f'{text} · fix: set offload to "disk:/folder/on/a/disk"', stacklevel=2)
        return DiskStore(device, folder, int(self.in_flight_bytes))


@final
class DiskStore(ByteStore):
    """A file and an I/O thread, started by the first ``put``.

    After a failure the file and the thread are closed, stored bytes are lost, and the next ``put`` starts anew. The
    same holds in a forked child: it has its own file, and cannot read the bytes of its parent.
    """

    label = "disk"
    tier: ClassVar[Tier] = "disk"

    def __init__(self, device: torch.device, folder: str, in_flight_bytes: int) -> None:
        self._device = device
        self._folder = folder
        self._in_flight_bytes = in_flight_bytes
        self._io: IoThread | None = None
        self._stop: Callable[[], object] = _no_op

    def put(self, data: torch.Tensor, group: TensorGroup) -> ByteHandle:
        """Queues a write; blocks while more than ``in_flight_bytes`` are not written."""
        self._check()
        if data.is_cuda and torch.cuda.is_current_stream_capturing():
            raise StoreError(
                f"{group.block}: offload: {format_bytes(data.numel())} cannot be offloaded to disk in a CUDA graph, as "
                "a replay runs no Python · fix: use offload='cpu', or run without capture"
            )
        with self._reraises("write", data.numel(), group):
            if self._io is None:
                self._io = self._start_io()
                self._stop = weakref.finalize(self, self._io.stop)
                self._io.start()
            return self._io.put(data, group)

    def get(self, handle: ByteHandle, group: TensorGroup) -> torch.Tensor:
        """Returns the bytes; blocks until they are read."""
        self._check()
        assert isinstance(handle, DiskHandle)
        if self._io is None or handle.owner is not self._io:
            raise StoreError(handle.owner.failure or _from_another_process(group, handle, self._folder))
        with self._reraises("read", handle.num_bytes, group):
            flat = self._io.get(handle, group)
        return flat if handle.stream is None else _on_current_stream(flat, handle.stream)

    def prefetch(self, handles: Sequence[ByteHandle], group: TensorGroup) -> None:
        """Queues reads. Bytes lost in an earlier failure are skipped: ``get`` raises for them."""
        self._check()
        mine = [handle for handle in handles if isinstance(handle, DiskHandle) and handle.owner is self._io]
        if mine and self._io is not None:
            with self._reraises("read", sum(handle.num_bytes for handle in mine), group):
                self._io.prefetch(mine)

    def hint(self, handles: Sequence[ByteHandle], group: TensorGroup) -> None:
        """Queues reads too, unless they would take device memory: they run after the others, within the bound."""
        if self._device.type == "cpu":
            self.prefetch(handles, group)

    def close_group(self, group: TensorGroup) -> None:
        """Raises if the thread has failed meanwhile."""
        self._check()

    def free(self, handle: ByteHandle) -> None:
        """Frees the range of the file."""
        assert isinstance(handle, DiskHandle)
        if self._io is not None and handle.owner is self._io and self._io.pid == os.getpid():
            self._io.free(handle)

    def begin_step(self) -> None:
        """Drops the file and the thread if an interrupt ended one of their methods."""
        if self._io is not None and self._io.is_disturbed():
            self.close()

    def stored_bytes(self, num_bytes: int) -> int:
        """Returns whole blocks of the file."""
        return in_blocks(num_bytes)

    def close(self) -> None:
        """Ends the thread, which closes the file."""
        self._stop()
        self._io, self._stop = None, _no_op

    def _start_io(self) -> IoThread:
        file = UnlinkedFile(self._folder)
        try:
            return IoThread(transfer_for(self._device, file), self._in_flight_bytes)
        except BaseException:
            file.close()
            raise

    def _check(self) -> None:
        if self._io is not None and self._io.pid != os.getpid():
            self.close()
        if self._io is not None and self._io.failure is not None:
            text = self._io.failure
            self.close()
            raise StoreError(text)

    @contextmanager
    def _reraises(self, doing: str, num_bytes: int, group: TensorGroup) -> Iterator[None]:
        try:
            yield
        except StoreError:
            self.close()
            raise
        except (OSError, RuntimeError, MemoryError) as error:
            self.close()
            raise StoreError(failure_message(group.block, doing, num_bytes, self._folder, error)) from error


def _from_another_process(group: TensorGroup, handle: DiskHandle, folder: str) -> str:
    return (
        f"{group.block}: offload: {format_bytes(handle.num_bytes)} in {folder} belong to process {handle.owner.pid}, "
        "and this process is a fork of it · fix: run forward and backward in the same process"
    )


def _on_current_stream(flat: torch.Tensor, made_on: torch.cuda.Stream) -> torch.Tensor:
    """Returns ``flat``, or a copy if the current stream is not the one that it was allocated on."""
    stream = torch.cuda.current_stream(flat.device)
    if stream == made_on:
        return flat
    copy = flat.clone()
    stream.synchronize()  # the original is freed to the stream it was allocated on, which does not wait for this one
    return copy


def _no_op() -> None:
    return None
