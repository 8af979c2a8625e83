"""A pass through a block's forward: the first run, or a second one that fills the slots of the first."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol, final

from graphckpt._compat import WithoutValues, autograd_sequence_number, current_backward
from graphckpt._compat_compiler import never_compiled
from graphckpt.rules.kept import may_be_filled_later
from graphckpt.rules.mismatch import Fault

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Iterator

    import torch

    from graphckpt.rules.frame import Frame
    from graphckpt.rules.kept import Slot


class Contexts(Protocol):
    """Contexts around the two runs of a frame, such as those that keep op results."""

    def first_run(self, frame: Frame) -> AbstractContextManager[Any]:
        """Returns the context for the first run."""

    def second_run(self, frame: Frame) -> AbstractContextManager[Any]:
        """Returns the context for a second run."""

    def saves(self, tensor: torch.Tensor) -> None:
        """Autograd saves a tensor of the first run."""

    def settle(self, frame: Frame) -> None:
        """The first run is over."""

    def run_all(self, frame: Frame) -> bool:
        """A second run has failed: has the next one leave nothing out; returns whether that is any different."""

    def paused(self) -> AbstractContextManager[None]:
        """Returns a context in which the one in force does nothing."""


class Run:
    """A pass through a block's forward that is going on in this thread."""

    __slots__ = ("again", "backward", "frame", "is_active", "outer")

    def __init__(self, frame: Frame, outer: Run | None, *, again: bool) -> None:
        self.frame = frame
        self.outer = outer
        self.again: bool = again or (outer is not None and outer.again)
        self.backward = current_backward()
        """The backward that it is a part of, if it is."""
        self.is_active = False
        """Whether it is going on now."""


running: ContextVar[Run | None] = ContextVar("running", default=None)


def innermost(frame: Frame) -> Run | None:
    """Returns the innermost execution that is going on around a backward that wants tensors of ``frame``.

    Where a forward calls backward, autograd may do its work in a thread of its own, whose context variables know
    nothing of the caller. Then it is the innermost of those executions around the frame that have not ended.
    """
    run = running.get() or frame.original
    while run is not None and not run.is_active:
        run = run.outer
    return run


def keep_rest_around(frame: Frame) -> None:
    """A backward wants tensors of ``frame``: the original forwards that it runs inside of keep all from now on."""
    run = innermost(frame)
    if run is not None:
        backward = current_backward()
        while run is not None:
            if run.backward != backward:  # else the engine itself asks, within a recomputation
                run.frame.keep_rest()
            run = run.outer


def unseen(run: Run | None) -> AbstractContextManager[None]:
    """Returns a context that hides ops from the contexts of ``run`` and of the runs around it.

    Those are the engine's own ops, such as copies of arguments, and those of a recomputation that a backward within
    forward has started: they are no ops of the blocks around.
    """
    contexts = []
    while run is not None:
        if run.frame.contexts is not None:
            contexts.append(run.frame.contexts)
        run = run.outer
    return _paused(contexts) if contexts else _NOTHING


@contextmanager
def _paused(contexts: list[Contexts]) -> Iterator[None]:
    with ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each.paused())
        yield


_NOTHING = nullcontext()


class Stop(BaseException):  # not an Exception: a forward that catches those must not catch this
    """Ends a second run once every tensor that backward can still ask for is there."""

    def __init__(self, run: SecondRun) -> None:
        self.run = run


@final
class SecondRun(Run):
    """Fills the slots of a frame while its block runs again."""

    __slots__ = (
        "_early_stop", "_first_fault", "_last", "_slots", "_unfilled", "cursor", "given", "hands_on", "hole_cursor",
        "on_pack",
    )  # fmt: skip

    def __init__(
        self, frame: Frame, slots: list[weakref.ref[Slot]], *, early_stop: bool, hands_on: bool = False
    ) -> None:
        super().__init__(frame, innermost(frame), again=True)
        self.hands_on = hands_on
        self.cursor = 0
        self.hole_cursor = 0
        self.on_pack: Callable[[int], None] | None = None
        self.given: list[tuple[int, torch.Tensor, int]] = []
        """The arguments that forward leaves as they are: positions, tensors, versions."""
        self._slots = slots
        self._early_stop = early_stop
        self._last = len(slots) - 1  # of the slots that are alive
        while self._last >= 0 and slots[self._last]() is None:
            self._last -= 1
        self._first_fault: Fault | None = None
        self._unfilled: tuple[int, torch.Size] | None = None  # an op, and the shape of what it may fill only later

    @never_compiled
    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Puts ``tensor`` into the slot whose turn it is."""
        position = self.cursor
        self.cursor = position + 1
        if self.on_pack is not None:
            self.on_pack(position)
        if type(tensor) is WithoutValues:
            raise RuntimeError(f"{self.frame.site.name}: tensor {position} is saved, and was left out")
        fills = False  # `rrelu` saves its noise, which it fills only then, before its input
        if tensor.requires_grad:
            if self._unfilled is not None:
                fills = self._unfilled == (autograd_sequence_number(), tensor.shape)
            tensor = tensor.detach()
        elif may_be_filled_later(tensor):
            self._unfilled = autograd_sequence_number(), tensor.shape
        if position < len(self._slots):
            slot = self._slots[position]()
            if slot is not None and slot.value is None:
                if slot.shape != tensor.shape or slot.dtype != tensor.dtype:
                    self._first_fault = self._first_fault or Fault(
                        position, (slot.dtype, slot.shape), (tensor.dtype, tensor.shape)
                    )
                slot.value = tensor
                slot.version = tensor._version
        if position >= self._last and self._early_stop and not fills:
            raise Stop(self)
        return tensor

    @never_compiled
    def unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Serves a backward inside of the block's own forward."""
        return tensor

    def fault(self) -> Fault | None:
        """Returns how this run differed from the first one, if it did."""
        if self._first_fault is not None:
            return self._first_fault
        short = self.cursor <= self._last
        long = not self._early_stop and self.cursor > len(self._slots)
        return Fault(self.cursor - 1, len(self._slots), self.cursor) if short or long else None
