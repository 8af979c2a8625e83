"""What a store is: it takes a tensor, gives a key, and gives the same tensor back for the key."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch


class Store(ABC):
    """A place for the tensors that blocks keep between forward and backward.

    ``get(put(x))`` equals ``x`` in every bit, with its shape, stride, dtype and device. What ``put`` returns is freed
    when its last holder lets it go.
    """

    place: ClassVar[str]
    """The name of the place in tables and config files."""

    @abstractmethod
    def put(self, tensor: torch.Tensor) -> object:
        """Keeps ``tensor`` and returns the key to it. The tensor is not changed."""

    @abstractmethod
    def get(self, key: object) -> torch.Tensor:
        """Returns the kept tensor, without autograd history."""
