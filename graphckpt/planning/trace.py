"""Traces and times a step: the intervals into which the calls of blocks divide it, and the storages in each.

::

    before | forward of 0 | after it | forward of 1 | after it | backward of 1 | after it | ... | optimizer
           ^ pre-hook     ^ hook of the block                  ^ hook on its   ^ hook on its
             of the block                                        outputs         arguments

:meth:`Blocks.marked` registers these hooks, which are methods of :class:`StepMarks`. Its subclasses are used in runs of
their own, since a dispatch mode slows a step down:

- :class:`Trace`, a dispatch mode, logs which storages are allocated and freed in each interval. The stores of
  :mod:`graphckpt.planning.traced_stores` tell it when blocks release what they hold.
- :class:`StepClock` times the intervals. On CUDA it reads events once the step has ended: to wait for the device at
  each of them would add the time of a launch, 15 to 25 us.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import pairwise
from time import perf_counter, process_time
from types import SimpleNamespace
from typing import Any, TypeAlias, cast, final
from weakref import ref

import torch
from torch import nn

from graphckpt._compat import current_backward, forget_hook
from graphckpt.blocks.forward import BlockForward
from graphckpt.blocks.hooks import add_hook, add_optimizer_hook, add_pre_hook
from graphckpt.errors import PlanError
from graphckpt.planning.candidates import Option
from graphckpt.planning.program import (
    BlockCall,
    EventKind,
    Interval,
    Phase,
    StorageEvent,
    TraceLog,
    TraceSpan,
)
from graphckpt.simulation.allocations import AllocationTrace
from graphckpt.stores.base import Store
from graphckpt.tree import flatten_value, tensors_in
from graphckpt.undo import Undo, scope


@final
class PathError(PlanError):
    def __init__(self, orders: Sequence[Sequence[int]], nested: tuple[str, str] | None = None) -> None:
        what = "the step calls its blocks in another order each time · fix: plan with one batch, and with a model that "
        what += "takes the same path each time, such as one with `layerdrop=0`"
        if nested is not None:
            # In the recomputation of the outer block alone, the inner one is seen as a call.
            outer, inner = nested
            what = (
                f"{outer}: expected blocks that do not call each other, but it calls {inner} · fix: select one of them"
            )
        super().__init__(what)
        self.orders = orders


@final
class Blocks:
    def __init__(self, named: Sequence[tuple[str, nn.Module]]) -> None:
        self.names = [name for name, _ in named]
        self.modules = [module for _, module in named]

    @scope
    def under(
        self, undo: Undo, options: Sequence[Option], stores: Sequence[Store | None], *, learns: bool = True
    ) -> Iterator[Callable[[], AbstractContextManager[None]]]:
        """Installs options and stores; yields a function that removes them for the time of a ``with`` block.

        With ``learns=False`` the first call does not look for in-place edits.
        """
        wrappers: list[BlockForward] = []

        def uninstall() -> None:
            for wrapper in reversed(wrappers):
                wrapper.uninstall()

        @scope
        def without(undo: Undo) -> Iterator[None]:
            undo += [(wrapper.install, ()) for wrapper in reversed(wrappers)]
            uninstall()
            yield

        undo.append((uninstall, ()))
        for name, module, option, store in zip(self.names, self.modules, options, stores, strict=True):
            stored: Any = SimpleNamespace(store=store)
            compiling = option.fields.get("compile")
            wrapper = BlockForward(module, name, option.rule, stored, compile_options=compiling)
            wrapper.context.learns = learns
            wrapper.is_copied = False  # a teacher that is made in the step does not count
            wrappers.append(wrapper)
            wrapper.install()
        yield without

    @scope
    def marked(self, undo: Undo, marks: StepMarks) -> Iterator[None]:
        """Marks where the forwards and backwards of the blocks begin and end.

        Hooks of the user run outside of a block, as they do outside of its policy.
        """
        for number, module in enumerate(self.modules):
            add_pre_hook(undo, module, partial(marks.begin_forward, number, undo), with_kwargs=True)
            add_hook(undo, module, marks.end_forward, prepend=True, always_call=True)
        add_optimizer_hook(undo, marks.begin_optimizer)
        yield


NO_BLOCKS = Blocks([])


class StepMarks:
    """The intervals of a step so far, and the calls of blocks. Hooks begin the intervals; see the map above.

    A *first block* has no argument with history, whose hook would end its backward: only the gradients of its
    parameters show how long that takes.
    """

    def __init__(self) -> None:
        self.log = TraceLog([TraceSpan(Interval(Phase.BEFORE), [])])
        self.is_in_block = False
        self.nested: tuple[int, int] | None = None
        """A block that has called another one, and that other one."""
        self._num_updates = 0
        self._in_backward: set[int] = set()
        self._extensions: set[int] = set()
        """The spans that begin with the gradient of a parameter of a first block."""

    @property
    def order(self) -> list[int]:
        return [call.block for call in self.log.calls]

    @property
    def intervals(self) -> list[Interval]:
        """The interval of each span."""
        intervals = [span.interval for span in self.log.spans]
        for number in self._extensions:
            if number + 1 == len(intervals) or intervals[number + 1].phase is Phase.OPTIMIZER:
                # The last gradient was there: clipping or a process that waits for others is not backward.
                intervals[number] = Interval(Phase.AFTER_BACKWARD, intervals[number].call)
        return intervals

    @property
    def call(self) -> int:
        """The number of the present call of a block, or of the last one."""
        return len(self.log.calls) - 1

    @property
    def _interval(self) -> Interval:
        return self.log.spans[-1].interval

    def begin_forward(
        self, block: int, undo: Undo, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Begins the forward of a block; ``undo`` removes the hooks on its parameters."""
        if not torch.is_grad_enabled():
            return
        if self.is_in_block:
            if block != self.log.calls[-1].block:
                self.nested = self.log.calls[-1].block, block
            return
        self.is_in_block = True
        self.log.calls.append(BlockCall(block))
        leaves, _ = flatten_value((args, kwargs))
        self._log_arguments(module, leaves)
        call = self.call
        self._mark(Phase.FORWARD, call)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        # Hooks on tensors and not on modules: a full backward hook would wrap the arguments, so that forward gets
        # views. That of an argument runs when its gradient is complete, which is when the block's backward is over,
        # unless others read it.
        with_history = [tensor for tensor in tensors if tensor.requires_grad and not tensor.is_leaf]
        for tensor in with_history:
            tensor.register_hook(partial(self._end_backward, call))
        for parameter in () if with_history else module.parameters():  # of a first block
            if parameter.requires_grad:
                # With `functional_call` it may be the result of an inner step, as in MAML.
                leaf = parameter.is_leaf
                register = parameter.register_post_accumulate_grad_hook if leaf else parameter.register_hook
                hook = partial(self._extend_backward, call)
                undo.append((forget_hook, (ref(parameter), hook)))
                register(hook)

    def end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        del module, args
        if not (torch.is_grad_enabled() and self.is_in_block):
            return
        self.is_in_block = False
        tensors = tensors_in(output)
        self._log_outputs(tensors)
        self._mark(Phase.AFTER_FORWARD, self.call)
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(partial(self._begin_backward, self.call))

    def begin_optimizer(self, *_: Any) -> None:
        # An optimizer that steps in a hook on a parameter belongs to backward.
        if current_backward() < 0 and self._interval.phase is not Phase.OPTIMIZER:
            self._mark(Phase.OPTIMIZER, self._num_updates)
            self._num_updates += 1

    def _begin_backward(self, call: int, _: torch.Tensor) -> None:
        # A block with several outputs has a hook on each: the first one to run begins its backward.
        if call not in self._in_backward:
            self._in_backward.add(call)
            self._mark(Phase.BACKWARD, call)
        self.log.calls[call].backwards.append(current_backward())

    def _end_backward(self, call: int, _: torch.Tensor) -> None:
        # The gradient of a mask or of an encoder's output is complete after all blocks that read it: another interval
        # has begun by then.
        if self._interval == (Phase.BACKWARD, call):
            self._mark(Phase.AFTER_BACKWARD, call)

    def _mark(self, phase: Phase, call: int) -> None:
        self.log.spans.append(TraceSpan(Interval(phase, call), []))

    def _extend_backward(self, call: int, _: torch.Tensor) -> None:
        """Extends the backward of a first block to the gradient of a parameter."""
        if self._interval == (Phase.BACKWARD, call):
            self._extensions.add(len(self.log.spans))
            self._mark(*self._interval)

    def _log_arguments(self, module: nn.Module, leaves: Sequence[Any]) -> None: ...

    def _log_outputs(self, tensors: Sequence[torch.Tensor]) -> None: ...


@final
class StepClock(StepMarks):
    """Times the intervals of a step, from now on; ``seconds`` and ``total`` are there after :meth:`stop`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.seconds: dict[Interval, float] = defaultdict(float)
        self.total = 0.0
        self._device = device
        self._times = [time_mark(device)]
        """Where each span begins."""

    def stop(self) -> None:
        self._times.append(time_mark(self._device))
        for interval, times in zip(self.intervals, pairwise(self._times), strict=True):
            self.seconds[interval] += seconds_between(*times)
        self.total = seconds_between(self._times[0], self._times[-1])

    def _mark(self, phase: Phase, call: int) -> None:
        super()._mark(phase, call)
        self._times.append(time_mark(self._device))


@final
class Trace(StepMarks, AllocationTrace):
    """The storages of a step, interval by interval and op by op; see its bases for the arguments.

    ``seconds`` are those of the ops of each interval.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        StepMarks.__init__(self)
        AllocationTrace.__init__(self, *arguments, **options)
        self.seconds: dict[Interval, float] = defaultdict(float)
        self._returned: list[tuple[ref[torch.Tensor], int]] = []
        """The tensors that the last call has returned, with their versions."""

    def release(self, call: int) -> None:
        """Logs that a call of a block has released something that a store held."""
        self._log(EventKind.RELEASED, call=call)

    def storage_number(self, tensor: torch.Tensor) -> int:
        """Tracks a tensor; returns the number of its storage, -1 if it cannot be tracked."""
        self.track([tensor])
        try:
            return self._numbers.get(id(tensor.untyped_storage()), -1)
        except NotImplementedError:
            return -1

    def _log_arguments(self, module: nn.Module, leaves: Sequence[Any]) -> None:
        call = self.log.calls[-1]
        are_passed_on = not (module._backward_hooks or module._backward_pre_hooks)  # they wrap: forward gets views
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                call.arguments.append(self.storage_number(leaf))
                # Joined blocks free their argument, so it has to be the very tensor of the block before, unmodified.
                if are_passed_on and any(t() is leaf and version == leaf._version for t, version in self._returned):
                    call.returned_before.append(call.arguments[-1])

    def _log_outputs(self, tensors: Sequence[torch.Tensor]) -> None:
        self.log.calls[-1].outputs.extend(map(self.storage_number, tensors))
        self._returned = [(ref(tensor), tensor._version) for tensor in tensors if not tensor.is_inference()]

    def _add_seconds(self, seconds: float) -> None:
        self.seconds[self._interval] += seconds

    def _begin(self, number: int) -> None:
        self._log(EventKind.BORN, number)

    def _end(self, number: int) -> None:
        self._log(EventKind.GONE, number)

    def _log(self, kind: EventKind, storage: int = -1, call: int = -1) -> None:
        num_bytes = self._rounded(self._sizes[storage]) if storage >= 0 else 0
        self.log.spans[-1].entries.append(StorageEvent(kind, storage, num_bytes, self._num_ops, call))


TimeMark: TypeAlias = "float | torch.cuda.Event"
"""A moment of a step: seconds, or an event on CUDA's current stream."""


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
    if isinstance(begin, float) or isinstance(end, float):
        return cast("float", end) - cast("float", begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
