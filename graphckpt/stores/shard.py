"""Cuts tensors that are equal on all ranks of a group into one slice for each rank, and gathers them for backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, final

from graphckpt.stores.place import Place, Ticket

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from graphckpt.stores.base import Group


def group_for(partition: Any, group: Group) -> Any:
    """Returns the process group that ``partition`` means; ``None``, with a note, if there is nothing to cut over."""
    group.note("partition: not built yet")


@final
class Shard(Place):
    """Keeps one slice for each rank."""

    where: ClassVar[str] = "device"

    def __init__(self, process_group: Any, device: torch.device, inner: Place | None) -> None:
        self.label = "part"

    def put(self, data: torch.Tensor, group: Group) -> Ticket:
        raise NotImplementedError

    def take(self, ticket: Ticket, group: Group) -> torch.Tensor:
        raise NotImplementedError

    def free(self, ticket: Ticket) -> None:
        raise NotImplementedError

    def begin(self, tickets: Sequence[Ticket], group: Group) -> None:
        raise NotImplementedError
