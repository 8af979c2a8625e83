"""Installs policies on blocks, and the hooks that divide a step into intervals, for the time of a measurement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from graphckpt._compat import current_backward
from graphckpt.blocks.forward import BlockForward
from graphckpt.planning.candidates import Option
from graphckpt.planning.model.events import Interval, Phase
from graphckpt.stores.base import Store
from graphckpt.tree import flatten_value, tensors_in


class StepListener:
    """Receives what happens while a step passes through the blocks. All methods but ``mark`` do nothing here."""

    def mark(self, interval: Interval) -> None:
        """Called when an interval begins."""
        raise NotImplementedError

    def begin_call(self, block: int, leaves: Sequence[Any], *, are_passed_on: bool) -> None:
        """Called before the forward of a block begins.

        Args:
            block: The number of the block.
            leaves: The tensors and other objects that it is called with.
            are_passed_on: Whether its forward receives these tensors, and not views of them for hooks on backward.
        """

    def end_call(self, tensors: Sequence[torch.Tensor]) -> None:
        """Called with the outputs after the forward of the block."""

    def gradient_of(self, call: int, output: int, gradient: torch.Tensor) -> None:
        """Called when backward has computed the gradient of an output of a call."""

    def parameter_done(self) -> None:
        """Called when the backward of a call whose arguments need no gradient has computed that of a parameter."""


@final
class Blocks:
    """The blocks that are planned.

    Args:
        named: Names and modules, none of them inside of another.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Module]]) -> None:
        self.names = [name for name, _ in named]
        self.modules = [module for _, module in named]

    @contextmanager
    def under(
        self, options: Sequence[Option], store: Callable[[Option], Store | None], *, learns: bool = True
    ) -> Iterator[Callable[[], AbstractContextManager[None]]]:
        """Installs an option on each block; with ``learns=False`` the first call does not look for in-place edits.

        Yields a function that removes the options for the time of a ``with`` block.
        """
        wrappers = []
        try:
            for name, module, option in zip(self.names, self.modules, options, strict=True):
                stored: Any = _FixedPlacement(store(option))
                compiling = option.fields.get("compile")
                wrapper = BlockForward(module, name, option.rule, stored, compile_options=compiling)
                wrapper.context.learns = learns
                wrapper.install()
                wrappers.append(wrapper)
            yield lambda: _without(wrappers)
        finally:
            for wrapper in reversed(wrappers):
                wrapper.uninstall()

    @contextmanager
    def marked(self, listener: StepListener) -> Iterator[None]:
        """Reports to ``listener`` where the forwards and backwards of the blocks begin and end.

        Hooks of the user run outside of a block, as they do outside of its policy.
        """
        intervals = _StepIntervals(listener)
        with ExitStack() as stack:
            for number, module in enumerate(self.modules):
                marks = _BlockHooks(intervals, number, stack)
                stack.callback(module.register_forward_pre_hook(marks.begin, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(marks.end, prepend=True, always_call=True).remove)
            stack.callback(register_optimizer_step_pre_hook(lambda *_: intervals.begin_optimizer()).remove)
            yield


@final
class _StepIntervals:
    """Divides a step into intervals, from what the hooks of the blocks see."""

    def __init__(self, listener: StepListener) -> None:
        self.is_in_block = False
        self._listener = listener
        self._interval = Interval(Phase.BEFORE)
        self._num_calls = self._num_updates = 0
        self._in_backward: set[int] = set()

    def begin_call(self, block: int, leaves: Sequence[Any], *, are_passed_on: bool) -> int:
        self.is_in_block = True
        self._listener.begin_call(block, leaves, are_passed_on=are_passed_on)
        self._mark(Phase.FORWARD, self._num_calls)
        self._num_calls += 1
        return self._num_calls - 1

    def end_call(self, tensors: Sequence[torch.Tensor]) -> int:
        self.is_in_block = False
        self._listener.end_call(tensors)
        self._mark(Phase.AFTER_FORWARD, self._num_calls - 1)
        return self._num_calls - 1

    def gradient_of(self, call: int, output: int, gradient: torch.Tensor) -> None:
        if call not in self._in_backward:
            self._in_backward.add(call)
            self._mark(Phase.BACKWARD, call)
        self._listener.gradient_of(call, output, gradient)

    def end_backward(self, call: int) -> None:
        """The gradient of an argument of the call has been computed."""
        if self._interval == (Phase.BACKWARD, call):
            self._mark(Phase.AFTER_BACKWARD, call)

    def parameter_done(self, call: int) -> None:
        if self._interval == (Phase.BACKWARD, call):
            self._listener.parameter_done()

    def begin_optimizer(self) -> None:
        """Begins the steps of optimizers, unless a hook on a parameter takes them, as a part of backward."""
        if current_backward() < 0 and self._interval.phase is not Phase.OPTIMIZER:
            self._mark(Phase.OPTIMIZER, self._num_updates)
            self._num_updates += 1

    def _mark(self, phase: Phase, call: int) -> None:
        self._interval = Interval(phase, call)
        self._listener.mark(self._interval)


@contextmanager
def _without(wrappers: Sequence[BlockForward]) -> Iterator[None]:
    for wrapper in reversed(wrappers):
        wrapper.uninstall()
    try:
        yield
    finally:
        for wrapper in wrappers:
            wrapper.install()


@final
class _FixedPlacement:
    def __init__(self, store: Store | None) -> None:
        self.store = store


@final
class _BlockHooks:
    def __init__(self, intervals: _StepIntervals, block: int, stack: ExitStack) -> None:
        self._intervals = intervals
        self._block = block
        self._stack = stack

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        intervals = self._intervals  # all that a hook on a tensor keeps alive
        if torch.is_grad_enabled() and not intervals.is_in_block:
            leaves, _ = flatten_value((args, kwargs))
            has_backward_hooks = bool(module._backward_hooks or module._backward_pre_hooks)
            call = intervals.begin_call(self._block, leaves, are_passed_on=not has_backward_hooks)
            tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
            at_end = [tensor for tensor in tensors if tensor.requires_grad and not tensor.is_leaf]
            for tensor in at_end:
                tensor.register_hook(lambda _: intervals.end_backward(call))
            if not at_end:
                self._watch_parameters(module, call)

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        del module, args
        if torch.is_grad_enabled() and self._intervals.is_in_block:
            tensors = tensors_in(output)
            call = self._intervals.end_call(tensors)
            for number, tensor in enumerate(tensors):
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._intervals.gradient_of, call, number))

    def _watch_parameters(self, module: nn.Module, call: int) -> None:
        """Parameter gradients are the only sign that the backward of a first block is over."""
        for parameter in module.parameters():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(lambda _: self._intervals.parameter_done(call))
                self._stack.callback(hook.remove)
