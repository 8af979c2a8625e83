"""Executions of a block's forward that are going on in a thread: the original one, or a recomputation.

An execution is a scope for what autograd saves. A recomputation fills the holders of its call, in the order in which
they were made, and ends when the last one that is alive is filled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, TypeAlias, final

import torch

from graphckpt._compat import (
    WithoutValues,
    autograd_sequence_number,
    current_backward,
    is_watched,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    shape_of,
)
from graphckpt._compat_compiler import never_compiled
from graphckpt.engine import mismatch
from graphckpt.engine.values import begin_comparison
from graphckpt.errors import MutatedError, RecomputeError

if TYPE_CHECKING:
    from graphckpt.ledger.recorder import Recorder

Frame: TypeAlias = Any
"""The frame of a call: a :class:`graphckpt.engine.frame.Frame`, whose module imports this one."""

_NEAR = 4  # tensors before the last: an op saves no more than these

running: ContextVar[Execution | None] = ContextVar("running", default=None)  # the innermost of this thread


@final
class Holder:
    """Placeholder in the autograd graph for a tensor that the recomputation will fill in."""

    # Every saved tensor comes by here, so the attributes are set where it is made: an `__init__` takes 80 ns.
    __slots__ = ("__weakref__", "dtype", "shape", "value", "version")

    shape: torch.Size
    dtype: torch.dtype
    value: torch.Tensor | None
    version: int
    """Of ``value``, once that is there."""


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
        self.is_recomputation = is_recomputation
        """Whether it is one, or is a part of one."""
        self.backward = current_backward()
        """Id of the backward (autograd graph task) that it is a part of; -1 if none."""
        self.is_active = False


def run_in(
    run: Execution | None,
    hooks: tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]],
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Calls a function with ``run`` as the present execution of this thread; autograd saves through two hooks."""
    outer = running.get()
    running.set(run)
    if run is not None:
        run.is_active = True
    push_saved_tensor_hooks(*hooks)
    try:
        return function(*args, **kwargs)
    finally:
        pop_saved_tensor_hooks()
        if run is not None:
            run.is_active = False
        running.set(outer)


@final
class Recomputation(Execution):
    """Fills the holders of a call while its block is recomputed."""

    __slots__ = (
        "_early_stop", "_first_fault", "_holders", "_last", "_on_pack", "_stops_from", "_unfilled", "borrowed",
        "comparison", "cursor", "excluded_cursor", "returns_output", "versions",
    )  # fmt: skip

    def __init__(
        self, frame: Frame, on_pack: Callable[[int], None] | None, *, early_stop: bool, returns_output: bool
    ) -> None:
        Execution.__init__(self, frame, running.get(), is_recomputation=True)
        self.returns_output = returns_output
        self.cursor = 0
        self.excluded_cursor = 0
        self.versions: list[tuple[int | None, torch.Tensor, int]] = []
        """Position of the argument or ``None``, tensor and version, of each tensor that forward must not modify."""
        self.borrowed: frozenset[int] = frozenset()
        """Ids of the buffers that have the memory of a copy until the recomputation ends."""
        self._on_pack = on_pack
        holders = self._holders = frame.holders
        self._early_stop = early_stop
        last = len(holders) - 1
        while last >= 0 and holders[last]() is None:
            last -= 1
        self._last = last  # of the holders that are alive
        # Where nothing is left to skip, an exception, which takes 25 us on its way through PyTorch, is not worth it.
        stops = early_stop and not (frame.block.ends_with_saved and last == len(holders) - 1)
        self._stops_from: float = last if stops else inf
        # A forward that asks whether it is recomputed may differ on purpose.
        check = None if on_pack is not None or frame.asks_for_recomputation else frame.values
        self.comparison = begin_comparison(check, holders)
        self._first_fault: mismatch.Fault | None = None
        self._unfilled: tuple[int, torch.Size] | None = None  # sequence number and shape of what is not written

    @never_compiled
    def pack(self, tensor: torch.Tensor) -> None:
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
        fills = position >= self._stops_from - _NEAR and self._is_filled(tensor, shape)
        if tensor.requires_grad:
            tensor = tensor.detach()
        if id(tensor) in self.borrowed:
            tensor = tensor.data  # stays with the copy
        if position < len(self._holders):
            holder = self._holders[position]()
            if holder is not None and holder.value is None:
                dtype = tensor.dtype
                if holder.shape != shape or holder.dtype is not dtype:
                    kinds = (holder.dtype, holder.shape), (dtype, shape)
                    self._first_fault = self._first_fault or mismatch.Fault(position, *kinds)
                holder.value = tensor
                holder.version = tensor._version
        if position >= self._stops_from and not fills:
            raise StopRecomputation(self)

    def _is_filled(self, tensor: torch.Tensor, shape: torch.Size) -> bool:
        """Whether the op writes the tensor that it has saved before this one only after that.

        ``rrelu`` saves its noise before writing it, then its input: the recomputation may stop only after that.
        """
        if tensor.requires_grad:
            return self._unfilled is not None and self._unfilled == (autograd_sequence_number(), shape)
        if may_be_filled_later(tensor):
            self._unfilled = autograd_sequence_number(), shape
        return False

    def hooks(self) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
        """Returns what autograd calls for each tensor that it saves, and for each that is asked for.

        The second one does not hold the call: the graph of a recomputation holds it, and may outlive the call where a
        hook of the user's collects outputs.
        """
        pack: Callable[[torch.Tensor], Any] = self.pack
        if self.comparison is not None:
            pack = self.comparison.hook(pack)
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
_NOTHING = nullcontext()


def engine_ops(recorder: Recorder | None = None, block: str = "") -> AbstractContextManager[Any]:
    """Returns a context for ops of the engine's own; with a ``recorder``, they count as copies for ``block``."""
    if recorder is not None:
        return _paused_and_recorded(recorder, block)
    return modes_paused if is_watched() else _NOTHING  # without a mode there is none to pause


@contextmanager
def _paused_and_recorded(recorder: Recorder, block: str) -> Iterator[None]:
    with modes_paused, recorder.copying(block):
        yield
