"""Keeps tensors where they are. Costs no copy and no byte beside the tensor itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast, final

from graphckpt.stores.base import Group, Store

if TYPE_CHECKING:
    import torch


@final
class DeviceStore(Store):
    """The default: a kept tensor stays on the device that it was made on."""

    place = "device"

    def open(self, group: Group) -> None:
        """There is nothing to hold together."""

    def put(self, tensor: torch.Tensor, group: Group | None) -> torch.Tensor:
        """Returns an alias without history: the tensor's own graph must not be held by what it feeds."""
        return tensor.detach()

    def get(self, key: object) -> torch.Tensor:
        """Returns the alias."""
        return cast("torch.Tensor", key)

    def seal(self, group: Group | None) -> None:
        """There is nothing to send off."""
