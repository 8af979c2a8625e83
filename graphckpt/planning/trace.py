"""Traces and times a step: the intervals into which the calls of blocks divide it, and the storages in each.

On CUDA times are those of events, which are read once the step has ended: to wait for the device at each of them would
add the time of a launch, 15 to 25 us, to every interval and every op.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import compress, pairwise
from time import perf_counter, process_time
from types import SimpleNamespace
from typing import Any, ClassVar, TypeAlias, cast, final
from weakref import ref

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim.optimizer import register_optimizer_step_pre_hook

from graphckpt._compat import call_with_autocast, current_backward, unseen_by_modes
from graphckpt._compat_compiler import DispatchMode, never_compiled
from graphckpt.blocks.forward import BlockForward
from graphckpt.engine.block import BlockContext
from graphckpt.engine.objects import copy_objects
from graphckpt.engine.saved import KEEP_ON_DEVICE
from graphckpt.errors import PlanError
from graphckpt.ledger.live_memory import LiveBytes, storages_of
from graphckpt.planning.candidates import OpTimes, Option
from graphckpt.planning.program import (
    ArgumentObject,
    BlockCall,
    EventKind,
    Interval,
    OpSeconds,
    Phase,
    StorageEvent,
    TraceLog,
    TraceSpan,
)
from graphckpt.rules.base import Rule
from graphckpt.rules.ops import is_counted
from graphckpt.stores.base import Store, TensorGroup
from graphckpt.tree import ATOMS, flatten_value, tensors_in

TimeMark: TypeAlias = "float | torch.cuda.Event"
"""A moment of a step: seconds, or an event on CUDA's current stream."""


@final
class PathError(PlanError):
    def __init__(self, orders: Sequence[Sequence[int]]) -> None:
        super().__init__(
            "the step calls its blocks in another order each time · fix: plan with one batch, and with a model that "
            "takes the same path each time, such as one with `layerdrop=0`"
        )
        self.orders = orders


@final
class Blocks:
    def __init__(self, named: Sequence[tuple[str, nn.Module]]) -> None:
        self.names = [name for name, _ in named]
        self.modules = [module for _, module in named]

    @contextmanager
    def under(
        self, options: Sequence[Option], stores: Sequence[Store | None], *, learns: bool = True
    ) -> Iterator[Callable[[], AbstractContextManager[None]]]:
        """Installs an option on each block, with its store.

        With ``learns=False`` the first call does not look for in-place edits.
        Yields a function that removes the options for the time of a ``with`` block.
        """
        wrappers: list[BlockForward] = []

        @contextmanager
        def without() -> Iterator[None]:
            for wrapper in reversed(wrappers):
                wrapper.uninstall()
            try:
                yield
            finally:
                for wrapper in wrappers:
                    wrapper.install()

        try:
            for name, module, option, store in zip(self.names, self.modules, options, stores, strict=True):
                stored: Any = SimpleNamespace(store=store)
                compiling = option.fields.get("compile")
                wrapper = BlockForward(module, name, option.rule, stored, compile_options=compiling)
                wrapper.context.learns = learns
                wrapper.install()
                wrappers.append(wrapper)
            yield without
        finally:
            for wrapper in reversed(wrappers):
                wrapper.uninstall()

    @contextmanager
    def traced(self, trace: Trace, stores: Iterable[Store | None]) -> Iterator[None]:
        recording = [store for store in stores if isinstance(store, RecordingStore)]
        for store in recording:
            store.trace = trace
        try:
            with self.marked(trace), trace:
                yield
        finally:
            for store in recording:
                store.trace = None

    @contextmanager
    def marked(self, trace: Trace) -> Iterator[None]:
        """Marks in ``trace`` where the forwards and backwards of the blocks begin and end.

        Hooks of the user run outside of a block, as they do outside of its policy.
        """
        with ExitStack() as stack:
            for number, module in enumerate(self.modules):
                begin, end = partial(_begin, trace, number, stack), partial(_end, trace)
                stack.callback(module.register_forward_pre_hook(begin, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(end, prepend=True, always_call=True).remove)
            stack.callback(register_optimizer_step_pre_hook(lambda *_: trace.begin_optimizer()).remove)
            yield


def _begin(
    trace: Trace, block: int, stack: ExitStack, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    if not torch.is_grad_enabled() or trace.is_in_block:
        return
    leaves, _ = flatten_value((args, kwargs))
    has_backward_hooks = bool(module._backward_hooks or module._backward_pre_hooks)  # which get views
    call = trace.begin_call(block, leaves, are_passed_on=not has_backward_hooks)
    tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    at_end = [tensor for tensor in tensors if tensor.requires_grad and not tensor.is_leaf]
    for tensor in at_end:
        tensor.register_hook(lambda _: trace.end_backward(call))
    if at_end:
        return
    for parameter in module.parameters():  # their gradients are the only sign that this backward is over
        if parameter.requires_grad:
            hook = parameter.register_post_accumulate_grad_hook(lambda _: trace.parameter_done(call))
            stack.callback(hook.remove)


def _end(trace: Trace, module: nn.Module, args: Any, output: Any) -> None:
    del module, args
    if torch.is_grad_enabled() and trace.is_in_block:
        tensors = tensors_in(output)
        call = trace.end_call(tensors)
        for number, tensor in enumerate(tensors):
            if tensor.requires_grad:
                tensor.register_hook(partial(trace.gradient_of, call, number))


@final
class Trace(LiveBytes):
    """The intervals and calls of a step, with the storages in each, op by op, or with times by a clock.

    As a mode it counts live bytes as :class:`~graphckpt.ledger.live_memory.LiveBytes` does, and records each change.

    Args:
        device: count only this kind of device; ``None`` counts all.
        clock: time the intervals on this device instead, without the mode; ``seconds`` are there after :meth:`stop`.
        is_fake: the step runs on fake tensors.
        rounded: returns the bytes that the allocator of the device reserves for a size.
        seconds: returns the seconds of an op on the device; ``None`` records no times.
        extra_bytes: returns the temporary bytes of an op on the device, beside its results.
    """

    def __init__(
        self,
        device: str | None = None,
        *,
        clock: torch.device | None = None,
        is_fake: bool = False,
        rounded: Callable[[int], int] | None = None,
        seconds: OpSeconds | None = None,
        extra_bytes: Callable[[Any, tuple[Any, ...]], int] | None = None,
    ) -> None:
        super().__init__(device, record_timeline=False, counts_fake=is_fake)
        self.log = TraceLog([TraceSpan(Interval(Phase.BEFORE))])
        self.seconds: dict[Interval, float] = {}
        self.total = 0.0
        self.is_in_block = False
        self._clock = clock
        self._times = [] if clock is None else [time_mark(clock)]
        """Where each stretch begins."""
        self._has_parameters = False
        """Whether the backward of a first block has computed the gradient of a parameter."""
        self._interval = self.log.stretches[0].interval
        self._num_updates = 0
        self._in_backward: set[int] = set()
        self._rounded = rounded or int
        self._op_seconds = seconds
        self._extra_bytes = extra_bytes
        self._names: dict[int, int] = {}
        self._sizes: list[int] = []
        self._num_ops = 0
        self._returned: list[tuple[ref[torch.Tensor], int]] = []
        self._alive_objects: dict[int, tuple[ref[Any], ArgumentObject]] = {}

    @property
    def order(self) -> list[int]:
        return [call.block for call in self.log.calls]

    @property
    def call(self) -> int:
        """The number of the present call of a block, or of the last one."""
        return len(self.log.calls) - 1

    @never_compiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        self._num_ops += 1
        if getattr(func, "namespace", "") == "prim":  # asks for a device: of the calls of a fake step, two out of three
            return func(*args, **(kwargs or {}))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self._op_seconds is not None and result is not NotImplemented:
            interval = self.log.stretches[-1].interval
            took = self._op_seconds(func, args, kwargs or {}, result)
            self.seconds[interval] = self.seconds.get(interval, 0.0) + took
        if self._extra_bytes is not None and (num_bytes := self._extra_bytes(func, args)):
            self._pass_through(num_bytes)
        return result

    def begin_call(self, block: int, leaves: Sequence[Any], *, are_passed_on: bool) -> int:
        """Begins the forward of a block; returns the number of the call.

        Args:
            block: The number of the block.
            leaves: The tensors and other objects that it is called with.
            are_passed_on: Whether its forward receives these tensors, and not views of them for hooks on backward.
        """
        self.is_in_block = True
        call = BlockCall(block)
        self.log.calls.append(call)
        if self._clock is None:
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            call.arguments.extend(map(self.name_of, tensors))
            same = [any(former() is t and version == t._version for former, version in self._returned) for t in tensors]
            call.returned_before.extend(compress(call.arguments, same) if are_passed_on else ())
            for leaf in leaves:
                if not isinstance(leaf, torch.Tensor) and type(leaf) not in ATOMS and hasattr(leaf, "__weakref__"):
                    self._add_object(leaf)
        self._mark(Phase.FORWARD, self.call)
        return self.call

    def end_call(self, tensors: Sequence[torch.Tensor]) -> int:
        self.is_in_block = False
        call = self.call
        if self._clock is None:
            for value, entry in list(self._alive_objects.values()):
                if entry.calls[-1] == call:
                    entry.reached.update(dict.fromkeys(self._reached_by(value())))
            self.log.calls[-1].outputs.extend(map(self.name_of, tensors))
            self._returned = [(ref(tensor), tensor._version) for tensor in tensors if not tensor.is_inference()]
        self._mark(Phase.AFTER_FORWARD, call)
        return call

    def gradient_of(self, call: int, output: int, gradient: torch.Tensor) -> None:
        """Begins the backward of a call, or continues it: backward has computed the gradient of an output."""
        if call not in self._in_backward:
            self._in_backward.add(call)
            self._mark(Phase.BACKWARD, call)
        if self._clock is None:
            self.log.calls[call].backwards.add(current_backward())
            self.log.calls[call].gradients.setdefault(output, self.name_of(gradient))

    def end_backward(self, call: int) -> None:
        """Ends the backward of a call: the gradient of one of its arguments has been computed."""
        if self._interval == (Phase.BACKWARD, call):
            self._mark(Phase.AFTER_BACKWARD, call)

    def parameter_done(self, call: int) -> None:
        """Extends the backward of a first block until its last parameter gradient."""
        if self._clock is not None and self._interval == (Phase.BACKWARD, call):
            self._mark(*self._interval)
            self._has_parameters = True

    def begin_optimizer(self) -> None:
        """Begins the steps of optimizers, unless a hook on a parameter takes them, as a part of backward."""
        if current_backward() < 0 and self._interval.phase is not Phase.OPTIMIZER:
            self._leave_backward()
            self._mark(Phase.OPTIMIZER, self._num_updates)
            self._num_updates += 1

    def stop(self) -> None:
        assert self._clock is not None
        self._leave_backward()
        self._times.append(time_mark(self._clock))
        for span, (begin, end) in zip(self.log.stretches, pairwise(self._times), strict=True):
            self.seconds[span.interval] = self.seconds.get(span.interval, 0.0) + seconds_between(begin, end)
        self.total = seconds_between(self._times[0], self._times[-1])

    def _mark(self, phase: Phase, call: int) -> None:
        self._interval = Interval(phase, call)
        self.log.stretches.append(TraceSpan(self._interval))
        if self._clock is not None:
            self._has_parameters = False
            self._times.append(time_mark(self._clock))

    def _leave_backward(self) -> None:
        """Excludes what follows the last gradient of a first block, such as waiting for other processes."""
        if self._has_parameters and self._interval.phase is Phase.BACKWARD:
            self.log.stretches[-1] = TraceSpan(Interval(Phase.AFTER_BACKWARD, self._interval.call))

    def hold(self, tensor: torch.Tensor) -> tuple[int, int]:
        entry = self.name_of(tensor), self.call if self.is_in_block else -1
        self._log(EventKind.HELD, *entry)
        return entry

    def release(self, entry: tuple[int, int]) -> None:
        self._log(EventKind.RELEASED, *entry)

    def name_of(self, tensor: torch.Tensor) -> int:
        """Returns the number of the tensor's storage, which is tracked from now on; -1 if it cannot be tracked."""
        self.track([tensor])
        try:
            return self._names.get(id(tensor.untyped_storage()), -1)
        except NotImplementedError:
            return -1

    def _add_object(self, value: Any) -> None:
        entry = self._alive_objects.get(id(value))
        if entry is None:
            number = len(self._sizes)
            self._sizes.append(0)
            self._log(EventKind.BORN, number)
            reference = ref(value, partial(self._object_freed, id(value), number))
            entry = self._alive_objects[id(value)] = reference, ArgumentObject(number)
            self.log.objects.append(entry[1])
        entry[1].calls.append(self.call)

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

    def _change(self, num_bytes: int, key: int) -> None:
        name = self._names.get(key)
        if name is not None and num_bytes > 0:  # resized: the old bytes are freed
            self._end(name, key)
            num_bytes += self._sizes[name]
            name = None
        if name is not None:
            self._end(name, key)
            return
        name = self._names[key] = len(self._sizes)
        self._sizes.append(num_bytes)
        super()._change(self._rounded(num_bytes), key)
        self._log(EventKind.BORN, name)

    def _pass_through(self, num_bytes: int) -> None:
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
        self.log.stretches[-1].entries.append(StorageEvent(kind, storage, num_bytes, self._num_ops, call))


def now(device: torch.device) -> float:
    """Waits for the device, and returns a time in seconds, of which only differences are meaningful.

    With one thread on the CPU, it is the CPU time of the process, which others affect least.
    """
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    elif torch.get_num_threads() == 1:
        return process_time()
    return perf_counter()


def time_mark(device: torch.device) -> TimeMark:
    if device.type != "cuda":
        return now(device)
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(begin: TimeMark, end: TimeMark) -> float:
    """Returns the seconds from one mark to the next; waits until the device has passed them."""
    if isinstance(begin, float):
        assert isinstance(end, float)
        return end - begin
    assert not isinstance(end, float)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


class RecordingStore(Store):
    """Records in a trace, if there is one, how long blocks hold what they put into the store."""

    trace: Trace | None = None


@final
class TracedStore(RecordingStore):
    """Keeps tensors on the device, or simulates offloading them, and records how long blocks hold them.

    Args:
        far_blocks: simulate offloading of these blocks while a trace records: the bytes of a tensor do not count until
            it is reloaded. The copies here are synchronous, to pageable memory, and must not be timed: plans add the
            time of copies from the rates of the device.
        min_elements: smaller tensors are not offloaded.
    """

    label = "device"

    def __init__(self, far_blocks: Collection[str] = (), min_elements: int = 1024) -> None:
        self._far_blocks = frozenset(far_blocks)
        self._min_elements = min_elements
        self._offloaded: dict[int, weakref.ref[_OffloadedStorage]] = {}

    def open_group(self, group: TensorGroup) -> TensorGroup:
        return group

    def put(self, tensor: torch.Tensor, group: TensorGroup | None) -> object:
        assert group is not None
        trace = self.trace
        if trace is None or group.block not in self._far_blocks or self._stays(tensor, group):
            return HeldKey(tensor.detach(), [tensor], trace)
        storage = tensor.untyped_storage()
        reference = self._offloaded.get(id(storage))
        copy = reference() if reference is not None else None
        if copy is None or copy.storage() is not storage:
            copy = _OffloadedStorage(tensor)
            self._offloaded[id(storage)] = weakref.ref(copy)
            trace.log.far_bytes[trace.call] += copy.num_bytes
        return _View(copy, tensor, trace)

    def get(self, key: object) -> torch.Tensor | None:
        if isinstance(key, _View):
            return key.take()
        assert isinstance(key, HeldKey)
        return cast("torch.Tensor", key.value)

    def close_group(self, group: TensorGroup | None) -> None:
        """Does nothing: blocks hold the tensors."""

    def _stays(self, tensor: torch.Tensor, group: TensorGroup) -> bool:
        return (
            tensor.numel() < self._min_elements
            or isinstance(tensor, torch.nn.Parameter)
            or any(tensor.untyped_storage() is own.untyped_storage() for own in group.own())
        )


@final
class HeldKey:
    """The key of saved tensors on the device. A trace records how long it lives."""

    __slots__ = ("__weakref__", "_entries", "_trace", "value")

    def __init__(self, value: Any, tensors: Iterable[torch.Tensor], trace: Trace | None) -> None:
        self.value = value
        self._trace = trace
        self._entries = [] if trace is None else [trace.hold(tensor) for tensor in tensors]

    def __del__(self) -> None:
        for entry in self._entries:
            assert self._trace is not None
            self._trace.release(entry)


@final
class _OffloadedStorage:
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

    __slots__ = ("_call", "_device", "_dtype", "_flat", "_offset", "_storage", "_stride", "_trace")

    def __init__(self, storage: _OffloadedStorage, tensor: torch.Tensor, trace: Trace) -> None:
        self._storage = storage
        self._trace = trace
        self._call = trace.call
        self._device, self._dtype = tensor.device, tensor.dtype
        self._offset, self._stride = tensor.storage_offset(), (tensor.shape, tensor.stride())
        self._flat: torch.Tensor | None = None

    def take(self) -> torch.Tensor:
        self._flat = self._storage.back(self._device)
        shape, stride = self._stride
        typed = self._flat.view(self._dtype)
        return typed.as_strided(shape, stride, self._offset)

    def __del__(self) -> None:
        self._trace.release((-1, self._call))  # no bytes, but it shows when the graph of the call is dropped


@final
@dataclass(frozen=True, eq=False)
class _OpObserver(Rule, is_registered=False):
    name: ClassVar[str] = "observe"
    calls: list[OpTimes]
    marks: list[tuple[OpTimes, int, TimeMark, TimeMark]]
    device: torch.device
    op_seconds: OpSeconds | None = None

    def run(self, context: BlockContext, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        del context
        ops = OpTimes()
        self.calls.append(ops)

        @never_compiled
        def pack(tensor: Any) -> Any:
            ops.log.saves(tensor)
            return KEEP_ON_DEVICE[0](tensor)

        with saved_tensors_hooks(pack, KEEP_ON_DEVICE[1]), _OpTimer(ops, self):
            output = function(*args, **kwargs)
        ops.log.close()
        return output


@final
class _OpTimer(DispatchMode):
    def __init__(self, ops: OpTimes, observer: _OpObserver) -> None:
        super().__init__()
        self._ops = ops
        self._observer = observer
        self._calls: dict[Any, int] = defaultdict(int)

    @never_compiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, observer, ops = kwargs or {}, self._observer, self._ops
        begin = None if observer.op_seconds is not None else time_mark(observer.device)
        output = call_with_autocast(func, args, kwargs)
        end = None if begin is None else time_mark(observer.device)
        if not is_counted(func, args, kwargs):
            return output
        if begin is not None and end is not None:
            observer.marks.append((ops, len(ops.seconds), begin, end))
        ops.seconds.append(0.0 if observer.op_seconds is None else observer.op_seconds(func, args, kwargs, output))
        ops.log.add(func, self._calls[func], args, kwargs, output)
        self._calls[func] += 1
        return output


def record_ops(
    blocks: Blocks, run: Callable[[], object], device: torch.device, op_seconds: OpSeconds | None = None
) -> list[list[OpTimes]]:
    ops_of_blocks: list[list[OpTimes]] = [[] for _ in blocks.names]
    marks: list[tuple[OpTimes, int, TimeMark, TimeMark]] = []
    observers = [_OpObserver(ops, marks, device, op_seconds) for ops in ops_of_blocks]
    with blocks.under([Option("observe", {}, each) for each in observers], [None] * len(observers)):
        run()
    for ops, number, begin, end in marks:
        ops.seconds[number] = seconds_between(begin, end)
    return ops_of_blocks
