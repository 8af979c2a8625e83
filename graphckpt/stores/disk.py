"""Moves tensors to a file and back, by a thread beside the computation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from graphckpt.stores.offload import Offload

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from graphckpt.stores.place import Place


@final
@dataclass(frozen=True)
class Disk(Offload):
    """A file."""

    name: ClassVar[str] = "disk"

    def place_for(self, device: torch.device, note: Callable[[str], None]) -> Place | None:
        raise NotImplementedError
