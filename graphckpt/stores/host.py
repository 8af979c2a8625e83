"""Moves tensors to pinned host memory and back, beside the computation."""

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
class Host(Offload):
    """Host memory."""

    name: ClassVar[str] = "cpu"

    def place_for(self, device: torch.device, note: Callable[[str], None]) -> Place | None:
        if device.type == "cpu":
            note("offload to 'cpu' does nothing: its tensors live in host memory already")
        return None
