"""Traces a step: which storages are allocated and freed in which interval, and which the blocks hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, final
from weakref import ref

import torch

from graphckpt._compat_compiler import never_compiled
from graphckpt.ledger.live_memory import LiveBytes
from graphckpt.planning.model.events import BlockCall, EventKind, Interval, OpSeconds, Phase, StorageEvent, TraceSpan


@final
class Trace(LiveBytes):
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
        self.seconds: dict[Interval, float] = {}
        self._rounded = rounded or int
        self._op_seconds = seconds
        self._extra_bytes = extra_bytes
        self._names: dict[int, int] = {}
        self._sizes: list[int] = []
        self._num_ops = 0
        self._num_updates = 0
        self._returned: list[tuple[ref[torch.Tensor], int]] = []
        self._running: list[int] = []

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

    @property
    def is_in_block(self) -> bool:
        """Whether the forward of a block runs now."""
        return bool(self._running)

    @property
    def sizes(self) -> Sequence[int]:
        """The bytes of each storage by its number, as requested from the allocator."""
        return self._sizes

    def rounded(self, num_bytes: int) -> int:
        """Returns the bytes that the allocator reserves for ``num_bytes``."""
        return self._rounded(num_bytes)

    def mark(self, phase: Phase, call: int = -1) -> None:
        """Begins a new interval."""
        self.stretches.append(TraceSpan(Interval(phase, call)))

    def begin_call(self, block: int, tensors: Sequence[torch.Tensor], *, are_passed_on: bool) -> int:
        """Begins the forward of a block; returns the number of the call."""
        arguments = [self.name_of(tensor) for tensor in tensors]
        same = [any(known() is t and version == t._version for known, version in self._returned) for t in tensors]
        number = len(self.calls)
        self.calls.append(
            BlockCall(block, arguments, returned_before=[*compress(arguments, same)] if are_passed_on else [])
        )
        self._running.append(number)
        self.mark(Phase.FORWARD, number)
        return number

    def end_call(self, tensors: Sequence[torch.Tensor]) -> int:
        """Ends the forward of the last block."""
        number = self._running.pop()
        self.calls[number].outputs.extend(self.name_of(tensor) for tensor in tensors)
        self._returned = [(ref(tensor), tensor._version) for tensor in tensors if not tensor.is_inference()]
        self.mark(Phase.AFTER_FORWARD, number)
        return number

    def gradient_of(self, call: int, output: int, gradient: torch.Tensor) -> None:
        """Begins the backward of a block: the gradient of an output is known."""
        known = self.calls[call].gradients
        if not known:
            self.mark(Phase.BACKWARD, call)
        known.setdefault(output, self.name_of(gradient))

    def backward_ends(self, call: int) -> None:
        """Ends the backward of a block: the gradient of an argument is known."""
        if self.stretches[-1].interval == (Phase.BACKWARD, call):
            self.mark(Phase.AFTER_BACKWARD, call)

    def parameter_done(self, call: int) -> None:
        """Does nothing: what a block holds until the end of the step is its own."""

    def optimizer_begins(self) -> None:
        """Begins an optimizer step, or extends the one before."""
        if self.stretches[-1].interval.phase is not Phase.OPTIMIZER:
            self.mark(Phase.OPTIMIZER, self._num_updates)
            self._num_updates += 1

    def hold(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Records that the current block saves ``tensor``; returns the argument of :meth:`release`."""
        entry = self.name_of(tensor), self._running[-1] if self._running else -1
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
