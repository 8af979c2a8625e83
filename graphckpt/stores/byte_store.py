"""What a place is: it takes runs of bytes out of the way and brings them back. It knows no tensor's shape, no block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from graphckpt.stores.base import Group


class Ticket:
    """Stands for bytes in a place. Places add what they need to find them again."""

    __slots__ = ("num_bytes",)

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def release_own(self) -> None:
        """Nobody will ask for the bytes again; called anywhere, and before :meth:`Place.free`, which waits its turn.

        Here goes what is the ticket's alone and can go at once.
        """


class Place(ABC):
    """Where bytes live between forward and backward, for the tensors of one device.

    A place may work ahead and behind: ``put`` may return before the bytes are copied, holding ``data`` as long as it
    reads it, and ``begin`` starts to bring bytes back that ``take`` will want. All calls come one at a time.
    ``begin`` and ``announce`` may name bytes that have been sent for already, and ``take`` bytes that have not.

    Raises:
        StoreError: From ``put``, ``begin`` and ``take``, when the place has failed; the message names block, bytes and
            fix. It leaves nothing behind.
    """

    label: str
    """The name of the place in tables."""

    @property
    @abstractmethod
    def where(self) -> str:
        """What holds the bytes: ``"device"``, ``"host"`` or ``"disk"``."""

    @abstractmethod
    def put(self, data: torch.Tensor, group: Group) -> Ticket:
        """Takes the bytes of ``data``, a flat ``uint8`` alias of the tensor's own memory, which is not changed."""

    @abstractmethod
    def take(self, ticket: Ticket, group: Group) -> torch.Tensor:
        """Returns the bytes, flat, as ``uint8``, on the device that they came from, ready for the present stream."""

    @abstractmethod
    def free(self, ticket: Ticket) -> None:
        """Nobody will ask for these bytes again."""

    def announce(self, tickets: Sequence[Ticket], group: Group) -> None:  # noqa: B027  # a place may have nothing to do
        """The group's bytes are wanted two groups from now."""

    def begin(self, tickets: Sequence[Ticket], group: Group) -> None:  # noqa: B027  # a place may have nothing to do
        """Starts to bring the group's bytes back; returns at once."""

    def seal(self, group: Group) -> None:  # noqa: B027  # a place may have nothing to do
        """Nothing more comes into the group."""

    def begin_step(self) -> None:  # noqa: B027  # a place may have nothing to do
        """All that was put has been freed, and a new step begins."""

    def stored_bytes(self, num_bytes: int) -> int:
        """Returns what ``num_bytes`` take in this place, on this rank."""
        return num_bytes

    def close(self) -> None:  # noqa: B027  # a place may have nothing to do
        """Gives back files, threads and pinned memory."""
