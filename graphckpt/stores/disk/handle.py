"""Bookkeeping for one byte range of the file. Data only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, final

from graphckpt.stores.byte_store import ByteHandle

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from graphckpt.stores.base import TensorGroup, Traffic


class Owner(Protocol):
    """What the holder of a range needs of the file it belongs to."""

    failure: str | None
    """Why the bytes are lost."""
    pid: int
    """The process that wrote them."""


@final
class DiskHandle(ByteHandle):
    """Stands for one range of a file, and for its bytes while they are in memory."""

    __slots__ = (
        "block", "borrowed", "data", "is_freed", "is_requested", "loaded", "offset", "owner", "ready", "stream",
        "target", "traffic",
    )  # fmt: skip

    def __init__(self, owner: Owner, data: torch.Tensor, group: TensorGroup, offset: int, ready: Any) -> None:
        super().__init__(data.numel())
        self.owner = owner
        self.block = group.block
        self.traffic: Traffic | None = group.traffic
        self.offset = offset
        """First byte of the range in the file."""
        self.data: torch.Tensor | None = data
        """The tensor's own memory, until it is written."""
        self.ready = ready
        """What the next copy must wait for on the device."""
        self.is_requested = False
        """The bytes were requested and not returned yet."""
        self.target: torch.Tensor | None = None
        """Memory to read into, if it had to be allocated in advance."""
        self.stream: Any = None
        """The stream that the target was allocated on."""
        self.loaded: torch.Tensor | None = None
        """The bytes, read and not returned yet."""
        self.borrowed: Callable[[], object] = _none
        """The storage returned last, held weakly."""
        self.is_freed = False

    def drop(self) -> None:
        """Drops all bytes in memory; they will not be read again."""
        self.is_freed, self.is_requested = True, False
        self.data = self.loaded = self.target = self.ready = None


def _none() -> None:
    return None
