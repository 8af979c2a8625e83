"""What the flags `offload`, `partition` and `contiguous` of a block mean together: the store for what it keeps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from graphckpt.errors import ConfigError
from graphckpt.stores.base import Group, Store
from graphckpt.stores.device import DeviceStore
from graphckpt.stores.offload import Offload, parse_offload
from graphckpt.stores.partition.partition import group_for, parse_partition
from graphckpt.stores.partition.sharded import Shard
from graphckpt.stores.slab.slab_store import Arena
from graphckpt.stores.tensor_store import PlacedStore

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from graphckpt.stores.byte_store import Place


@final
@dataclass(frozen=True)
class Placement:
    """Where blocks keep what they keep. Blocks that share one share its store: what two of them keep goes once.

    Args:
        offload: The kind of memory to move to; ``None`` if tensors stay on their device.
        partition: ``True``, a ``ProcessGroup`` or a ``DeviceMesh`` to cut tensors over; ``None`` to keep them whole.
        contiguous: Whether what is on the device lies in one slab.
        min_elements: Smaller tensors stay where they are.
    """

    offload: Offload | None = None
    partition: Any = None
    contiguous: bool = False
    min_elements: int = 1024
    _stores: list[Store] = field(default_factory=list, compare=False, repr=False)

    @property
    def is_plain(self) -> bool:
        """Whether everything stays where it is."""
        return self.offload is None and self.partition is None and not self.contiguous

    @property
    def store(self) -> Store:
        """The one store of all blocks with this placement; made on first use."""
        if not self._stores:
            plain = self.is_plain
            self._stores.append(
                DeviceStore() if plain else PlacedStore(self._label(), self._place_for, min_elements=self.min_elements)
            )
        return self._stores[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> Placement:
        twin: Placement = memo.setdefault(id(self), Placement(*self._settings()))
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        return Placement, self._settings()  # a copy keeps nothing yet

    def _settings(self) -> tuple[Any, ...]:
        return self.offload, self.partition, self.contiguous, self.min_elements

    def _label(self) -> str:
        words = [self.offload.name] if self.offload is not None else []
        words += ["slab"] if self.contiguous else []
        words += ["part"] if self.partition is not None else []
        return " ".join(words)

    def _place_for(self, device: torch.device, is_part: bool, group: Group) -> Place | None:
        place = self.offload.place_for(device, group.note) if self.offload is not None else None
        if place is None and self.contiguous:
            place = Arena(device)
        elif place is not None and self.contiguous:
            group.note("contiguous: what is moved lies in one piece already")
        if self.partition is None:
            return place
        if is_part:
            group.note("partition: sharded tensors are left as they are")
            return place
        ranks = group_for(self.partition, group)
        return place if ranks is None else Shard(ranks, device, place)


def placement_of(fields: Mapping[str, Any]) -> Placement:
    """Returns what the fields ``offload``, ``partition``, ``contiguous`` and ``min_elements`` of a block mean together.

    Raises:
        ConfigError: A value means nothing for its field.
    """
    return Placement(
        offload=parse_offload(fields.get("offload")),
        partition=parse_partition(fields.get("partition")),
        contiguous=parse_contiguous(fields.get("contiguous")),
        min_elements=parse_min_elements(fields.get("min_elements", 1024)),
    )


def parse_contiguous(value: Any) -> bool:
    """Reads a value of ``contiguous``.

    Raises:
        ConfigError: It is neither a bool nor ``None``.
    """
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{value!r} is neither yes nor no · fix: use True, False or None")
    return bool(value)


def parse_min_elements(value: Any) -> int:
    """Reads a value of ``min_elements``.

    Raises:
        ConfigError: It is no number of elements.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{value!r} is no number of elements · fix: use an int from 0 up")
    return value
