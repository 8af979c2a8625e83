"""Keeps tensors where they are. Costs no copy and no byte besides the tensor itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast, final

from graphckpt.stores.base import Store, TensorGroup

if TYPE_CHECKING:
    import torch


@final
class DeviceStore(Store):
    """The default: a saved tensor stays on its device."""

    label = "device"

    def open_group(self, group: TensorGroup) -> None:
        """Does nothing."""

    def put(self, tensor: torch.Tensor, group: TensorGroup | None) -> torch.Tensor:
        """Returns an alias without history: the tensor's own graph must not be held by what it feeds."""
        return tensor.detach()

    def get(self, key: object) -> torch.Tensor:
        """Returns the alias."""
        return cast("torch.Tensor", key)

    def close_group(self, group: TensorGroup | None) -> None:
        """Does nothing."""
