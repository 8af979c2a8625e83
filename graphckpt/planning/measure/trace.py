"""Traces a step: which storages are allocated and freed in which interval, and which the blocks hold."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import compress
from typing import Any, final
from weakref import ref

import torch

from graphckpt._compat import current_backward, unseen_by_modes
from graphckpt._compat_compiler import never_compiled
from graphckpt.engine.objects import copy_objects
from graphckpt.ledger.live_memory import LiveBytes, storages_of
from graphckpt.planning.measure.instrument import StepListener
from graphckpt.planning.model.events import (
    ArgumentObject,
    BlockCall,
    EventKind,
    Interval,
    OpSeconds,
    Phase,
    StorageEvent,
    TraceSpan,
)
from graphckpt.stores.base import Store, TensorGroup
from graphckpt.tree import ATOMS


@final
class Trace(LiveBytes, StepListener):
    """Counts live bytes op by op, as :class:`~graphckpt.ledger.live_memory.LiveBytes` does, and records each change.

    Args:
        device: count only this kind of device; ``None`` counts all.
        is_fake: the step runs on fake tensors.
        rounded: returns the bytes that the allocator of the device reserves for a size.
        seconds: returns the seconds of an op on the device; ``None`` records no times.
        extra_bytes: returns the temporary bytes of an op on the device, beside its results.
    """

    def __init__(
        self,
        device: str | None = None,
        *,
        is_fake: bool = False,
        rounded: Callable[[int], int] | None = None,
        seconds: OpSeconds | None = None,
        extra_bytes: Callable[[Any, tuple[Any, ...]], int] | None = None,
    ) -> None:
        super().__init__(device, record_timeline=False, counts_fake=is_fake)
        self.stretches: list[TraceSpan] = [TraceSpan(Interval(Phase.BEFORE))]
        self.calls: list[BlockCall] = []
        self.objects: list[ArgumentObject] = []
        self.seconds: dict[Interval, float] = {}
        self._rounded = rounded or int
        self._op_seconds = seconds
        self._extra_bytes = extra_bytes
        self._names: dict[int, int] = {}
        self._sizes: list[int] = []
        self._num_ops = 0
        self._returned: list[tuple[ref[torch.Tensor], int]] = []
        self._call = -1  # whose forward runs now
        self._alive_objects: dict[int, tuple[ref[Any], ArgumentObject]] = {}

    @never_compiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Runs one op, and adds its time and temporary bytes on the device."""
        self._num_ops += 1
        if getattr(func, "namespace", "") == "prim":  # asks for a device: of the calls of a fake step, two out of three
            return func(*args, **(kwargs or {}))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self._op_seconds is not None and result is not NotImplemented:
            interval = self.stretches[-1].interval
            took = self._op_seconds(func, args, kwargs or {}, result)
            self.seconds[interval] = self.seconds.get(interval, 0.0) + took
        if self._extra_bytes is not None and (num_bytes := self._extra_bytes(func, args)):
            self._pass_through(num_bytes)
        return result

    def mark(self, interval: Interval) -> None:
        self.stretches.append(TraceSpan(interval))

    def begin_call(self, block: int, leaves: Sequence[Any], *, are_passed_on: bool) -> None:
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        arguments = [self.name_of(tensor) for tensor in tensors]
        same = [any(former() is t and version == t._version for former, version in self._returned) for t in tensors]
        self._call = len(self.calls)
        self.calls.append(
            BlockCall(block, arguments, returned_before=[*compress(arguments, same)] if are_passed_on else [])
        )
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor) and type(leaf) not in ATOMS and hasattr(leaf, "__weakref__"):
                self._add_object(leaf)

    def _add_object(self, value: Any) -> None:
        entry = self._alive_objects.get(id(value))
        if entry is None:
            number = len(self._sizes)
            self._sizes.append(0)
            self._log(EventKind.BORN, number)
            reference = ref(value, partial(self._object_freed, id(value), number))
            entry = self._alive_objects[id(value)] = reference, ArgumentObject(number)
            self.objects.append(entry[1])
        entry[1].calls.append(self._call)

    def _object_freed(self, key: int, storage: int, _: object) -> None:
        del self._alive_objects[key]
        self._log(EventKind.GONE, storage)

    def _reached_by(self, value: Any) -> Iterator[int]:
        for _, contents in copy_objects([value]):
            if isinstance(contents, torch.Tensor):  # the state of a generator
                continue
            for item in contents.values() if isinstance(contents, dict) else contents:
                for storage in storages_of(item) if isinstance(item, torch.Tensor) else ():
                    if id(storage) in self._names:
                        yield self._names[id(storage)]

    def end_call(self, tensors: Sequence[torch.Tensor]) -> None:
        for value, entry in list(self._alive_objects.values()):
            if entry.calls[-1] == self._call:
                entry.reached.update(dict.fromkeys(self._reached_by(value())))
        self._call = -1
        self.calls[-1].outputs.extend(self.name_of(tensor) for tensor in tensors)
        self._returned = [(ref(tensor), tensor._version) for tensor in tensors if not tensor.is_inference()]

    def gradient_of(self, call: int, output: int, gradient: torch.Tensor) -> None:
        """Names the gradient of an output."""
        self.calls[call].backwards.add(current_backward())
        self.calls[call].gradients.setdefault(output, self.name_of(gradient))

    def hold(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Records that the current block saves ``tensor``; returns the argument of :meth:`release`."""
        entry = self.name_of(tensor), self._call
        self._log(EventKind.HELD, *entry)
        return entry

    def release(self, entry: tuple[int, int]) -> None:
        """Records that a block releases a saved tensor."""
        self._log(EventKind.RELEASED, *entry)

    def name_of(self, tensor: torch.Tensor) -> int:
        """Returns the number of the tensor's storage, which is tracked from now on; -1 if it cannot be tracked."""
        self.track([tensor])
        try:
            return self._names.get(id(tensor.untyped_storage()), -1)
        except NotImplementedError:
            return -1

    def _change(self, num_bytes: int, key: int) -> None:
        name = self._names.get(key)
        if name is not None and num_bytes > 0:  # resized: the old bytes are freed
            self._end(name, key)
            num_bytes += self._sizes[name]
            name = None
        if name is None:
            name = self._names[key] = len(self._sizes)
            self._sizes.append(num_bytes)
            super()._change(self._rounded(num_bytes), key)
            self._log(EventKind.BORN, name)
        else:
            self._end(name, key)

    def _pass_through(self, num_bytes: int) -> None:
        """Counts memory that an op allocates and frees."""
        name = len(self._sizes)
        self._sizes.append(num_bytes)
        super()._change(self._rounded(num_bytes), name)
        self._log(EventKind.BORN, name)
        super()._change(-self._rounded(num_bytes), name)
        self._log(EventKind.GONE, name)

    def _end(self, name: int, key: int) -> None:
        del self._names[key]
        super()._change(-self._rounded(self._sizes[name]), key)
        self._log(EventKind.GONE, name)

    def _log(self, kind: EventKind, storage: int, call: int = -1) -> None:
        num_bytes = self._rounded(self._sizes[storage]) if storage >= 0 else 0
        self.stretches[-1].entries.append(StorageEvent(kind, storage, num_bytes, self._num_ops, call))


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
        return group

    def put(self, tensor: torch.Tensor, group: TensorGroup | None) -> object:
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
