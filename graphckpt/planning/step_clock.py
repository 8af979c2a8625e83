"""Divides a step into intervals by the calls of its blocks, and times them.

::

    before | forward of 0 | after it | forward of 1 | after it | backward of 1 | after it | ... | optimizer
           ^ pre-hook     ^ hook of the block                  ^ hook on its   ^ hook on its
             of the block                                        outputs         arguments

:meth:`StepClock.metering` registers these hooks, which are methods of the clock. It takes no dispatch mode, which
slows a step down, and on CUDA reads its events once the step has ended: to wait for the device at each of them would
add the time of a launch, 15 to 25 us. :class:`~graphckpt.planning.level_meter.LevelMeter` also reads levels.
"""

from __future__ import annotations

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
from graphckpt.planning.intervals import Interval, Phase
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


NO_BLOCKS = Blocks([])


class StepClock:
    """The intervals of a step, within :meth:`metering`, and their times. Hooks begin the intervals; see the map above.

    A *first block* has no argument with history, whose hook would end its backward: only the gradients of its
    parameters show how long that takes.
    """

    def __init__(self, device: torch.device) -> None:
        self.order: list[int] = []
        """The block of each call, in the order of forwards."""
        self.is_in_block = False
        self.nested: tuple[int, int] | None = None
        """A block that has called another one, and that other one."""
        self._device = device
        self._is_on = False
        self._spans = [Interval(Phase.BEFORE)]
        self._times: list[TimeMark] = []
        """Where each span begins, and where the last one ends."""
        self._num_updates = 0
        self._backwards: dict[int, set[int]] = {}
        """By call: the ids of the backwards of the step that have computed gradients of its outputs."""
        self._in_backward: set[int] = set()
        self._extensions: set[int] = set()
        """The spans that begin with the gradient of a parameter of a first block."""

    @scope
    def metering(self, undo: Undo, blocks: Blocks) -> Iterator[None]:
        """Marks where the forwards and backwards of the blocks begin and end.

        Hooks of the user run outside of a block, as they do outside of its policy.
        """
        undo.append((setattr, (self, "_is_on", False)))
        for number, module in enumerate(blocks.modules):
            add_pre_hook(undo, module, partial(self.begin_forward, number, undo), with_kwargs=True)
            add_hook(undo, module, self.end_forward, prepend=True, always_call=True)
        add_optimizer_hook(undo, self.begin_optimizer)
        self._is_on = True
        self._read()
        try:
            yield
        finally:
            self._read()
            self._is_on = False

    @property
    def seconds(self) -> dict[Interval, float]:
        """The seconds of each interval, after the step."""
        intervals, seconds = [*self._spans], dict[Interval, float]()
        for number in self._extensions:
            if number + 1 == len(intervals) or intervals[number + 1].phase is Phase.OPTIMIZER:
                # The last gradient was there: clipping or a process that waits for others is not backward.
                intervals[number] = Interval(Phase.AFTER_BACKWARD, intervals[number].call)
        for interval, times in zip(intervals, pairwise(self._times), strict=True):
            seconds[interval] = seconds.get(interval, 0.0) + seconds_between(*times)
        return seconds

    @property
    def total(self) -> float:
        return seconds_between(self._times[0], self._times[-1])

    @property
    def call(self) -> int:
        """The number of the present call of a block, or of the last one."""
        return len(self.order) - 1

    @property
    def interval(self) -> Interval:
        """The present one."""
        return self._spans[-1]

    def begin_forward(
        self, block: int, undo: Undo, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Begins the forward of a block; ``undo`` removes the hooks on its parameters."""
        if not torch.is_grad_enabled():
            return
        if self.is_in_block:
            if block != self.order[-1]:
                self.nested = self.order[-1], block
            return
        self.is_in_block = True
        self.order.append(block)
        leaves, _ = flatten_value((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._log_arguments(module, tensors)
        call = self.call
        self._mark(Phase.FORWARD, call)
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
        if current_backward() < 0 and self.interval.phase is not Phase.OPTIMIZER:
            self._mark(Phase.OPTIMIZER, self._num_updates)
            self._num_updates += 1

    def _begin_backward(self, call: int, _: torch.Tensor) -> None:
        # A block with several outputs has a hook on each: the first one to run begins its backward.
        if call not in self._in_backward:
            self._in_backward.add(call)
            self._mark(Phase.BACKWARD, call)
        self._backwards.setdefault(call, set()).add(current_backward())

    def _end_backward(self, call: int, _: torch.Tensor) -> None:
        # The gradient of a mask or of an encoder's output is complete after all blocks that read it: another interval
        # has begun by then.
        if self.interval == (Phase.BACKWARD, call):
            self._mark(Phase.AFTER_BACKWARD, call)

    def _mark(self, phase: Phase, call: int) -> None:
        if self._is_on:
            self._spans.append(Interval(phase, call))
            self._read()

    def _read(self) -> None:
        """Reads what there is to read where a span begins."""
        self._times.append(time_mark(self._device))

    def _extend_backward(self, call: int, _: torch.Tensor) -> None:
        """Extends the backward of a first block to the gradient of a parameter."""
        if self.interval == (Phase.BACKWARD, call):
            self._extensions.add(len(self._spans))
            self._mark(*self.interval)

    def _log_arguments(self, module: nn.Module, tensors: Sequence[torch.Tensor]) -> None: ...

    def _log_outputs(self, tensors: Sequence[torch.Tensor]) -> None: ...


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
