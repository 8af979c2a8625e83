"""Executions of a block's forward that are going on in a thread: the original one, or a recomputation.

An execution is a scope for what autograd saves. A recomputation fills the holders of its call, in the order in which
they were made, and ends when the last one that is alive is filled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeAlias, final

import torch

from graphckpt._compat import (
    WithoutValues,
    autograd_sequence_number,
    current_backward,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    shape_of,
)
from graphckpt._compat_compiler import never_compiled
from graphckpt.engine import mismatch
from graphckpt.engine.values import begin_comparison
from graphckpt.errors import MutatedError, RecomputeError

Frame: TypeAlias = Any
"""The frame of a call: a :class:`graphckpt.engine.frame.Frame`, whose module imports this one."""

running: ContextVar[Execution | None] = ContextVar("running", default=None)  # the innermost of this thread


@final
class Holder:
    """Placeholder in the autograd graph for a tensor that the recomputation will fill in."""

    __slots__ = ("__weakref__", "dtype", "shape", "value", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        try:
            self.shape = tensor.shape
        except RuntimeError:  # of a nested tensor; asked for afterwards, as every saved tensor comes by here
            self.shape = shape_of(tensor)
        self.dtype = tensor.dtype
        self.value: torch.Tensor | None = None
        self.version = 0


def may_be_filled_later(tensor: torch.Tensor) -> bool:
    """Whether the op that saves ``tensor`` may write its values only after that, as ``rrelu`` does with its noise."""
    return (
        not tensor.requires_grad
        and type(tensor) is torch.Tensor
        and tensor.is_floating_point()
        and not tensor._version
        and not tensor._is_view()
    )


class Execution:
    """One execution of a block's forward that is going on in this thread, and the one around it."""

    __slots__ = ("backward", "frame", "is_active", "is_recomputation", "outer")

    def __init__(self, frame: Frame, outer: Execution | None, *, is_recomputation: bool) -> None:
        self.frame = frame
        self.outer = outer
        self.is_recomputation: bool = is_recomputation or (outer is not None and outer.is_recomputation)
        self.backward = current_backward()
        """Id of the backward (autograd graph task) that it is a part of; -1 if none."""
        self.is_active = False


@final
class Recomputation(Execution):
    """Fills the holders of a call while its block is recomputed."""

    __slots__ = (
        "_early_stop", "_first_fault", "_holders", "_last", "_on_pack", "_stops", "_unfilled", "borrowed", "comparison",
        "cursor", "excluded_cursor", "returns_output", "versions",
    )  # fmt: skip

    def __init__(
        self, frame: Frame, on_pack: Callable[[int], None] | None, *, early_stop: bool, returns_output: bool
    ) -> None:
        super().__init__(frame, running.get(), is_recomputation=True)
        self.returns_output = returns_output
        self.cursor = 0
        self.excluded_cursor = 0
        self.versions: list[tuple[int | None, torch.Tensor, int]] = []
        """What forward leaves as it is: positions of arguments, tensors, versions."""
        self.borrowed: frozenset[int] = frozenset()
        """Ids of the buffers that have the memory of a copy until the recomputation ends."""
        self._on_pack = on_pack
        holders = self._holders = frame.holders
        self._early_stop = early_stop
        self._last = len(holders) - 1  # of the holders that are alive
        while self._last >= 0 and holders[self._last]() is None:
            self._last -= 1
        # Where nothing is left to skip, an exception, which takes 25 us on its way through PyTorch, is not worth it.
        self._stops = early_stop and not (frame.block.ends_with_saved and self._last == len(holders) - 1)
        # A forward that asks whether it is recomputed may differ on purpose.
        check = None if on_pack is not None or frame.asks_for_recomputation else frame.values
        self.comparison = begin_comparison(check, holders)
        self._first_fault: mismatch.Fault | None = None
        self._unfilled: tuple[int, torch.Size] | None = None  # sequence number and shape of what is not written

    @never_compiled
    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        position = self.cursor
        self.cursor = position + 1
        if self._on_pack is not None:
            self._on_pack(position)
        if type(tensor) is WithoutValues:
            if tensor.error_class is MutatedError:
                raise MutatedError(tensor.message)
            raise ScheduleMismatch(f"{self.frame.block.title}: tensor {position} is saved, but its op was skipped")
        try:
            shape = tensor.shape
        except RuntimeError:  # of a nested tensor; asked for afterwards, as every saved tensor comes by here
            shape = shape_of(tensor)
        fills = False  # `rrelu` saves its noise before writing it, then its input: stop only after that
        if tensor.requires_grad:
            if self._unfilled is not None:
                fills = self._unfilled == (autograd_sequence_number(), shape)
            tensor = tensor.detach()
        elif may_be_filled_later(tensor):
            self._unfilled = autograd_sequence_number(), shape
        if id(tensor) in self.borrowed:
            tensor = tensor.data  # stays with the copy
        if position < len(self._holders):
            holder = self._holders[position]()
            if holder is not None and holder.value is None:
                if holder.shape != shape or holder.dtype != tensor.dtype:
                    kinds = (holder.dtype, holder.shape), (tensor.dtype, shape)
                    self._first_fault = self._first_fault or mismatch.Fault(position, *kinds)
                holder.value = tensor
                holder.version = tensor._version
        if position >= self._last and self._stops and not fills:
            raise StopRecomputation(self)
        return tensor

    def hooks(self) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
        """Returns what autograd calls for each tensor that it saves, and for each that is asked for.

        The second one does not hold the call: the graph of a recomputation holds it, and may outlive the call where a
        hook of the user's collects outputs.
        """
        pack = self.pack if self.comparison is None else self.comparison.hook(self.pack)
        return pack, partial(_refuse_backward, self.frame.block.title)

    def fault(self) -> mismatch.Fault | None:
        if self._first_fault is not None:
            return self._first_fault
        short = self.cursor <= self._last
        long = not self._early_stop and self.cursor > len(self._holders)
        return mismatch.Fault(self.cursor - 1, len(self._holders), self.cursor) if short or long else None


@never_compiled
def _refuse_backward(block: str, tensor: torch.Tensor) -> torch.Tensor:
    """Called by a backward inside of the block's own forward, which the original forward did not run."""
    raise RecomputeError(mismatch.runs_backward(block))


class StopRecomputation(BaseException):  # not an Exception: a forward that catches those must not catch this
    """Ends a recomputation once every tensor that backward can still ask for is there."""

    def __init__(self, run: Recomputation) -> None:
        self.run = run


class ScheduleMismatch(BaseException):  # likewise
    """Ends a recomputation in which a skipped op turns out to be needed: none is skipped in the next one."""


class CallMismatch(ScheduleMismatch):
    """Ends a recomputation in which a call of an excluded child should have been repeated: the next one does so."""


@final
class ExecutionScope:
    """Makes ``run`` the present execution of this thread, and passes what autograd saves through two hooks."""

    __slots__ = ("_hooks", "_outer", "_run")

    def __init__(
        self, run: Execution | None, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
    ) -> None:
        self._run = run
        self._hooks = pack, unpack

    def __enter__(self) -> None:
        self._outer = running.get()
        running.set(self._run)
        if self._run is not None:
            self._run.is_active = True
        push_saved_tensor_hooks(*self._hooks)

    def __exit__(self, *_: object) -> None:
        pop_saved_tensor_hooks()
        if self._run is not None:
            self._run.is_active = False
        running.set(self._outer)


class _ModesPaused(threading.local):
    """A context in which the dispatch modes of the executions that are going on in this thread ignore ops.

    It is for ops that do not belong to those blocks: the engine's own, such as copies of arguments. Modes that are
    entered within it are those of other executions, and active.
    """

    def __init__(self) -> None:
        self.depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


modes_paused = _ModesPaused()
