"""What is known of one run of bytes in a file. It does nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, final

from graphckpt.stores.byte_store import Ticket

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from graphckpt.stores.base import Group, Traffic


class Owner(Protocol):
    """The file that a range belongs to, as far as who holds a range needs to know."""

    failure: str | None
    """Why the bytes are gone."""
    pid: int
    """The process that wrote them."""


@final
class DiskTicket(Ticket):
    """Stands for one range of a file, and for its bytes while they are in memory."""

    __slots__ = (
        "block", "data", "is_freed", "is_wanted", "landed", "lent", "offset", "owner", "ready", "stream", "target",
        "traffic",
    )  # fmt: skip

    def __init__(self, owner: Owner, data: torch.Tensor, group: Group, offset: int, ready: Any) -> None:
        super().__init__(data.numel())
        self.owner = owner
        self.block = group.block
        self.traffic: Traffic | None = group.traffic
        self.offset = offset
        """Where the range begins in the file."""
        self.data: torch.Tensor | None = data
        """The tensor's own memory, until it is written."""
        self.ready = ready
        """What the next copy must wait for, on the device."""
        self.is_wanted = False
        """Somebody has asked for the bytes and has not taken them."""
        self.target: torch.Tensor | None = None
        """Where to read into, if that had to be made beforehand."""
        self.stream: Any = None
        """The stream that the target was made on."""
        self.landed: torch.Tensor | None = None
        """The bytes, in memory and not taken."""
        self.lent: Callable[[], object] = _nothing
        """The storage that was given out last, held weakly."""
        self.is_freed = False

    def let_go(self) -> None:
        """Nobody will ask for the bytes again."""
        self.is_freed, self.is_wanted = True, False
        self.data = self.landed = self.target = self.ready = None


def _nothing() -> None:
    return None
