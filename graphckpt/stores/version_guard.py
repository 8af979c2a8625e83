"""Detects in-place modifications of a tensor without holding its memory."""

from __future__ import annotations

from typing import final

import torch

from graphckpt._compat import share_version_counter, version_sharing_detach
from graphckpt.stores.empty import empty


@final
class VersionGuard:
    """Watches the version counter of a tensor, which all its views and aliases share.

    >>> x = torch.zeros(4)
    >>> guard = VersionGuard(x)
    >>> guard.is_mutated()
    False
    >>> _ = x[:2].add_(1)
    >>> guard.is_mutated()
    True
    """

    __slots__ = ("_counter", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._counter: torch.Tensor | None = None
        self._version = 0
        if not tensor.is_inference():  # those cannot be modified in place
            self._counter = version_sharing_detach(tensor)
            self._counter.data = empty(tensor.dtype, tensor.device)  # releases the memory
            self._version = self._counter._version

    def is_mutated(self) -> bool:
        """Whether the tensor was modified in place since."""
        return self._counter is not None and self._counter._version != self._version

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether modifications through ``tensor`` are detected here too."""
        if self._counter is None or tensor.is_inference():
            return self._counter is None and tensor.is_inference()
        return share_version_counter(self._counter, tensor)
