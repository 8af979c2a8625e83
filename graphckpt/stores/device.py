"""Keeps tensors where they are. Costs no copy and no byte beside the tensor itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast, final

from graphckpt.stores.base import Store

if TYPE_CHECKING:
    import torch


@final
class DeviceStore(Store):
    """The default: a kept tensor stays on the device that it was made on."""

    place: ClassVar[str] = "device"

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns an alias without history: the tensor's own graph must not be held by what it feeds."""
        return tensor.detach()

    def get(self, key: object) -> torch.Tensor:
        """Returns the alias."""
        return cast("torch.Tensor", key)
