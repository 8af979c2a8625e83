"""A store that records in a trace how long blocks hold tensors, and that can simulate offloading."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import final

import torch

from graphckpt._compat import unseen_by_modes
from graphckpt.planning.measure.trace import Trace
from graphckpt.stores.base import Store, TensorGroup


@final
class TracedStore(Store):
    """Keeps tensors on the device, or simulates offloading them, and records how long blocks hold them.

    Args:
        trace: the trace to record in; ``None`` records nothing.
        is_far: simulate offloading while a trace records: the bytes of a tensor do not count until it is reloaded. The
            copies here are synchronous, to pageable memory, and must not be timed: plans add the time of copies from
            the rates of the device.
    """

    label = "device"

    def __init__(self, trace: Trace | None = None, *, is_far: bool = False, min_elements: int = 1024) -> None:
        self.trace = trace
        self.is_far = is_far
        self.far_bytes: dict[int, int] = {}
        """The bytes that each call has offloaded, by the number of the call."""
        self._min_elements = min_elements
        self._sent: dict[int, weakref.ref[_Far]] = {}

    def open_group(self, group: TensorGroup) -> TensorGroup:
        """Opens the group of one call."""
        return group

    def put(self, tensor: torch.Tensor, group: TensorGroup | None) -> object:
        """Stores ``tensor`` and returns its key."""
        assert group is not None
        if not self.is_far or self.trace is None or self._stays(tensor, group):
            return _Near(tensor.detach(), self.trace)
        storage = tensor.untyped_storage()
        known = self._sent.get(id(storage))
        far = known() if known is not None else None
        if far is None or far.storage() is not storage:
            far = _Far(tensor)
            self._sent[id(storage)] = weakref.ref(far)
            call = len(self.trace.calls) - 1
            self.far_bytes[call] = self.far_bytes.get(call, 0) + far.num_bytes
        return _View(far, tensor, self.trace)

    def get(self, key: object) -> torch.Tensor | None:
        """Returns the stored tensor."""
        if isinstance(key, _Near):
            return key.tensor
        assert isinstance(key, _View)
        return key.take()

    def close_group(self, group: TensorGroup | None) -> None:
        """Closes the group."""

    def _stays(self, tensor: torch.Tensor, group: TensorGroup) -> bool:
        return (
            tensor.numel() < self._min_elements
            or isinstance(tensor, torch.nn.Parameter)
            or any(tensor.untyped_storage() is own.untyped_storage() for own in group.own())
        )


@final
class _Near:
    """The key of a tensor that stays on the device."""

    __slots__ = ("__weakref__", "_held", "_trace", "tensor")

    def __init__(self, tensor: torch.Tensor, trace: Trace | None) -> None:
        self.tensor = tensor
        self._trace = trace
        self._held = trace.hold(tensor) if trace is not None else None

    def __del__(self) -> None:
        if self._trace is not None and self._held is not None:
            self._trace.release(self._held)


@final
class _Far:
    """An offloaded storage: a copy that no trace counts, until it is reloaded."""

    __slots__ = ("__weakref__", "_back", "_copy", "num_bytes", "storage")

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.storage = weakref.ref(storage)
        self.num_bytes = storage.nbytes()
        with unseen_by_modes():
            self._copy = None if storage.device.type == "meta" else storage.cpu().clone()
        self._back: weakref.ref[torch.Tensor] | None = None

    def back(self, device: torch.device) -> torch.Tensor:
        """Returns the bytes on the device; the same tensor as long as it is in use."""
        flat = self._back() if self._back is not None else None
        if flat is None:
            flat = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
            if self._copy is not None:
                with unseen_by_modes():
                    flat.untyped_storage().copy_(self._copy)
            self._back = weakref.ref(flat)
        return flat


@final
class _View:
    """The key of an offloaded tensor: which part of its storage it is."""

    __slots__ = ("_call", "_device", "_dtype", "_far", "_flat", "_offset", "_stride", "_trace")

    def __init__(self, far: _Far, tensor: torch.Tensor, trace: Trace) -> None:
        self._far = far
        self._trace = trace
        self._call = len(trace.calls) - 1
        self._device, self._dtype = tensor.device, tensor.dtype
        self._offset, self._stride = tensor.storage_offset(), (tensor.shape, tensor.stride())
        self._flat: torch.Tensor | None = None

    def take(self) -> torch.Tensor:
        """Returns the tensor on the device."""
        self._flat = self._far.back(self._device)
        shape, stride = self._stride
        typed = self._flat.view(self._dtype)
        return typed.as_strided(shape, stride, self._offset)

    def __del__(self) -> None:
        self._trace.release((-1, self._call))  # no bytes, but it shows when the graph of the call is dropped


@contextmanager
def traced(stores: Collection[TracedStore], trace: Trace) -> Iterator[None]:
    """Records in ``trace`` what is put into ``stores`` within the ``with`` block."""
    for store in stores:
        store.trace = trace
        store.far_bytes.clear()
    try:
        yield
    finally:
        for store in stores:
            store.trace = None
