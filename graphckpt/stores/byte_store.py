"""The contract of a byte store: it offloads byte ranges and reloads them. It knows no tensor's shape and no block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from graphckpt.stores.base import TensorGroup

Tier: TypeAlias = Literal["device", "host", "disk"]
"""The kind of memory that holds bytes."""


class ByteHandle:
    """Stands for bytes in a byte store. Subclasses add what is needed to find them."""

    __slots__ = ("num_bytes",)

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def release(self) -> None:
        """Drops what belongs to this handle alone and can go at once. The bytes will not be read again.

        Called in any thread, before :meth:`ByteStore.free`, which runs with the next call of the store.
        """


class ByteStore(ABC):
    """Holds bytes between forward and backward, for the tensors of one device.

    Copies may be asynchronous: ``put`` may return before the bytes are copied, and then holds ``data`` until they are;
    ``prefetch`` starts to reload bytes that ``get`` will return. Calls are serialized. ``prefetch`` and ``hint`` may
    name bytes that were prefetched already, and ``get`` bytes that were not.

    Raises:
        StoreError: From ``put``, ``prefetch`` and ``get``, when the store has failed; the message names block, bytes
            and fix. Nothing is left behind.
    """

    label: str
    """The name of the store in tables."""

    @property
    @abstractmethod
    def tier(self) -> Tier:
        """The kind of memory that holds the bytes."""

    @abstractmethod
    def put(self, data: torch.Tensor, group: TensorGroup) -> ByteHandle:
        """Stores the bytes of ``data``, a flat ``uint8`` alias of the tensor's own memory, which is not changed."""

    @abstractmethod
    def get(self, handle: ByteHandle, group: TensorGroup) -> torch.Tensor:
        """Returns the bytes, flat, as ``uint8``, on their original device, ready for the current stream."""

    @abstractmethod
    def free(self, handle: ByteHandle) -> None:
        """Releases the bytes, which will not be read again."""

    def hint(self, handles: Sequence[ByteHandle], group: TensorGroup) -> None:  # noqa: B027  # optional
        """Announces that the group's bytes are needed two groups from now."""

    def prefetch(self, handles: Sequence[ByteHandle], group: TensorGroup) -> None:  # noqa: B027  # optional
        """Starts to reload the group's bytes; returns at once."""

    def close_group(self, group: TensorGroup) -> None:  # noqa: B027  # optional
        """No more bytes join the group."""

    def begin_step(self) -> None:  # noqa: B027  # optional
        """Begins a new step. All bytes have been freed."""

    def stored_bytes(self, num_bytes: int) -> int:
        """Returns the size that ``num_bytes`` take in this store, on this rank."""
        return num_bytes

    def close(self) -> None:  # noqa: B027  # optional
        """Releases files, threads and pinned memory."""
