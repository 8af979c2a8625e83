"""One execution of a block's forward: the original, or the recomputation that fills its holders."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol, final

from graphckpt._compat import WithoutValues, autograd_sequence_number, current_backward
from graphckpt._compat_compiler import never_compiled
from graphckpt.errors import RecomputeError
from graphckpt.rules.engine.mismatch import Fault, runs_backward
from graphckpt.rules.engine.saved import may_be_filled_later

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Iterable, Iterator

    import torch

    from graphckpt.rules.engine.context import BlockContext
    from graphckpt.rules.engine.saved import Holder
    from graphckpt.state.rng import RNGState
    from graphckpt.state.values import Snapshot
    from graphckpt.stores.base import TensorGroup


class Contexts(Protocol):
    """Contexts around the original forward and the recomputation of a call, such as those that keep op results."""

    def original_forward(self, frame: RecomputableCall) -> AbstractContextManager[Any]:
        """Returns the context for the original forward."""

    def recomputation(self, frame: RecomputableCall) -> AbstractContextManager[Any]:
        """Returns the context for a recomputation."""

    def saves(self, tensor: torch.Tensor) -> None:
        """Is called when autograd saves a tensor of the original forward."""

    def drop_mutated_outside(self, tensors: Iterable[torch.Tensor]) -> None:
        """Is called when an excluded child has modified tensors in place, by ops that no context sees."""

    def after_forward(self, frame: RecomputableCall, *, has_failed: bool) -> None:
        """Is called after the original forward; ``has_failed`` if it has raised an exception."""

    def run_all(self, frame: RecomputableCall) -> bool:
        """Called after a recomputation that raised: the next skips no op. Returns whether ops may have been skipped."""

    def paused(self) -> AbstractContextManager[None]:
        """Returns a context in which the active one does nothing."""


class ChildCall(Protocol):
    """One call of an excluded child, and how the recomputation answers for it."""

    @property
    def name(self) -> str:
        """Path of the child."""

    @property
    def buffer_ids(self) -> set[int]:
        """The ids of the child's buffers."""

    @property
    def parameter_ids(self) -> set[int]:
        """The ids of the child's parameters."""

    is_repeated: bool
    """Whether the recomputation repeats it."""

    random: RNGState
    """The RNG state after it."""

    def decide(self, snapshot: Snapshot) -> None:
        """Decides whether the recomputation can take the outputs from here."""

    def repeat(self) -> None:
        """Drops the outputs: the recomputation repeats the call."""

    def after_forward(self) -> None:
        """Is called after the original forward of the block around the child."""

    def answer(self) -> tuple[bool, Any]:
        """Returns ``(True, output)``, or ``(False, None)`` if the child has to be recomputed after all."""


class RecomputableCall(Protocol):
    """What the parts of the engine need to know of a :class:`~graphckpt.rules.engine.frame.Frame`."""

    block: BlockContext
    contexts: Contexts | None
    group: TensorGroup | None
    outer_hooks: Any
    """The saved-tensor hooks around the call, which receive what it keeps; ``None`` if its store does."""
    devices: tuple[torch.device, ...]
    """Whose RNG state the call may use, beside that of the CPU."""
    excluded: list[ChildCall]
    outputs: list[torch.Tensor] | None
    """What a recomputation for a joined block has returned."""
    original: Execution | None

    @property
    def before(self) -> RecomputableCall | None:
        """The call of the recomputed block right before, if the two are recomputed as one."""

    def recompute_output(self) -> None:
        """Recomputes the block for the joined block right behind it, up to its ``outputs``."""

    def name_of(self, position: int) -> str:
        """Names the argument that leaf ``position`` belongs to."""

    def rng_state(self) -> RNGState:
        """Returns the present state of the generators that the call may draw from."""


class Execution:
    """One execution of a block's forward that is going on in this thread.

    Args:
        frame: The call.
        outer: The execution around it.
        is_recomputation: Whether it is one, or a part of one.
    """

    __slots__ = ("backward", "frame", "is_active", "is_recomputation", "outer")

    def __init__(self, frame: RecomputableCall, outer: Execution | None, *, is_recomputation: bool) -> None:
        self.frame = frame
        self.outer = outer
        self.is_recomputation: bool = is_recomputation or (outer is not None and outer.is_recomputation)
        self.backward = current_backward()
        """Id of the backward (autograd graph task) that it is a part of; -1 if none."""
        self.is_active = False
        """Whether it is going on now."""


running: ContextVar[Execution | None] = ContextVar("running", default=None)


def refuse_backward_inside(frame: RecomputableCall) -> None:
    """Raises an error if a backward that needs tensors of ``frame`` is running inside of a forward of a block.

    A recomputation would repeat it. Autograd may do its work in a thread of its own, whose context variables know
    nothing of the caller: then it shows if the tensors are those of the block itself.
    """
    # both: in an excluded child, the former knows nothing of the block around the child
    for innermost in (running.get(), frame.original):
        run = innermost
        while run is not None:
            if run.is_active and run.backward != current_backward():  # else the engine asks, within a recomputation
                raise RecomputeError(runs_backward(run.frame.block.title))
            run = run.outer


def modes_paused(run: Execution | None) -> AbstractContextManager[None]:
    """Returns a context in which the dispatch modes of ``run`` and of the executions around it ignore ops.

    It is for ops that do not belong to those blocks: the engine's own, such as copies of arguments.
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


class StopRecomputation(BaseException):  # not an Exception: a forward that catches those must not catch this
    """Ends a recomputation once every tensor that backward can still ask for is there."""

    def __init__(self, run: Recomputation) -> None:
        self.run = run


class ScheduleMismatch(BaseException):  # likewise
    """Ends a recomputation in which a skipped op turns out to be needed: none is skipped in the next one."""


class CallMismatch(ScheduleMismatch):
    """Ends a recomputation in which a call of an excluded child should have been repeated: the next one does so."""


@final
class Recomputation(Execution):
    """Fills the holders of a call while its block is recomputed."""

    __slots__ = (
        "_early_stop",
        "_first_fault",
        "_holders",
        "_last",
        "_stops",
        "_unfilled",
        "cursor",
        "excluded_cursor",
        "given",
        "on_pack",
        "returns_output",
    )  # fmt: skip

    def __init__(
        self,
        frame: RecomputableCall,
        holders: list[weakref.ref[Holder]],
        *,
        early_stop: bool,
        returns_output: bool = False,
    ) -> None:
        super().__init__(frame, running.get(), is_recomputation=True)
        self.returns_output = returns_output
        self.cursor = 0
        self.excluded_cursor = 0
        self.on_pack: Callable[[int], None] | None = None
        self.given: list[tuple[int, torch.Tensor, int]] = []
        """The arguments that forward leaves as they are: positions, tensors, versions."""
        self._holders = holders
        self._early_stop = early_stop
        self._last = len(holders) - 1  # of the holders that are alive
        while self._last >= 0 and holders[self._last]() is None:
            self._last -= 1
        # Where nothing is left to skip, an exception, which takes 25 us on its way through PyTorch, is not worth it.
        self._stops = early_stop and not (frame.block.ends_with_saved and self._last == len(holders) - 1)
        self._first_fault: Fault | None = None
        self._unfilled: tuple[int, torch.Size] | None = None  # sequence number and shape of what is not written

    @never_compiled
    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Puts ``tensor`` into the next holder."""
        position = self.cursor
        self.cursor = position + 1
        if self.on_pack is not None:
            self.on_pack(position)
        if type(tensor) is WithoutValues:
            raise ScheduleMismatch(f"{self.frame.block.title}: tensor {position} is saved, but its op was skipped")
        fills = False  # `rrelu` saves its noise before writing it, then its input: stop only after that
        if tensor.requires_grad:
            if self._unfilled is not None:
                fills = self._unfilled == (autograd_sequence_number(), tensor.shape)
            tensor = tensor.detach()
        elif may_be_filled_later(tensor):
            self._unfilled = autograd_sequence_number(), tensor.shape
        if position < len(self._holders):
            holder = self._holders[position]()
            if holder is not None and holder.value is None:
                if holder.shape != tensor.shape or holder.dtype != tensor.dtype:
                    self._first_fault = self._first_fault or Fault(
                        position, (holder.dtype, holder.shape), (tensor.dtype, tensor.shape)
                    )
                holder.value = tensor
                holder.version = tensor._version
        if position >= self._last and self._stops and not fills:
            raise StopRecomputation(self)
        return tensor

    @never_compiled
    def unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Is called by a backward inside of the block's own forward, which the original forward did not run."""
        raise RecomputeError(runs_backward(self.frame.block.title))

    def fault(self) -> Fault | None:
        """Returns how this recomputation differed from the original forward, if it did."""
        if self._first_fault is not None:
            return self._first_fault
        short = self.cursor <= self._last
        long = not self._early_stop and self.cursor > len(self._holders)
        return Fault(self.cursor - 1, len(self._holders), self.cursor) if short or long else None
