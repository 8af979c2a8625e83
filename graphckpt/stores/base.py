"""What a store is: it takes a tensor, gives a key, and gives the same tensor back for the key."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch


@final
class Traffic:
    """What one block has put into a store during a step that is watched. Bytes are those of this rank."""

    __slots__ = ("bytes_at", "copy_seconds", "wait_seconds")

    def __init__(self) -> None:
        self.bytes_at: dict[str, int] = {"device": 0, "host": 0, "disk": 0}
        self.copy_seconds = 0.0
        """Time that copies took, out and back, whether or not something else ran meanwhile."""
        self.wait_seconds = 0.0
        """Time that the step waited for them."""


@final
class Group:
    """The tensors that one call of a block keeps: they go out together, and come back together.

    Args:
        block: Path of the block, for messages.
        own: Returns the block's parameters and buffers, which are never moved.
        note: Says something about the block in ``explain()``.
        traffic: Where to count, while the step is watched.
    """

    __slots__ = ("__weakref__", "block", "note", "number", "own", "state", "traffic")

    def __init__(
        self,
        block: str,
        own: Callable[[], Sequence[torch.Tensor]],
        note: Callable[[str], None],
        traffic: Traffic | None = None,
    ) -> None:
        self.block = block
        self.own = own
        self.note = note
        self.traffic = traffic
        self.number = 0
        """Position among the groups of the step."""
        self.state: Any = None
        """Bookkeeping of the store that opened the group. An attribute, as a look-up per tensor costs more."""


class Store(ABC):
    """A place for the tensors that blocks keep between forward and backward.

    ``get(put(x))`` equals ``x`` in every bit, with its shape, stride, dtype and device. What ``put`` returns is freed
    when its last holder lets it go.
    """

    @property
    @abstractmethod
    def place(self) -> str:
        """The name of the place in tables."""

    @abstractmethod
    def open(self, group: Group) -> Group | None:
        """Begins what one call of a block keeps; ``None`` if this store knows no groups."""

    @abstractmethod
    def put(self, tensor: torch.Tensor, group: Group | None) -> object:
        """Keeps ``tensor`` and returns the key to it, or an alias of it if it stays where it is."""

    @abstractmethod
    def get(self, key: object) -> torch.Tensor | None:
        """Returns the kept tensor, without autograd history; ``None`` if it was edited in place since."""

    @abstractmethod
    def seal(self, group: Group | None) -> None:
        """The first run of the block is over: nothing more comes into the group."""

    def close(self) -> None:  # noqa: B027  # there may be nothing to give back
        """Gives back files, threads and pinned memory, unless something is kept still. A later ``put`` begins anew."""
