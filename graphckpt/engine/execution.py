"""The executions of a block's forward that are active in a thread: original ones and recomputations.

An execution is a scope for the tensors that autograd saves. A recomputation fills the holders of its call in the order
in which the original forward created them, and ends when the last one that is alive is filled: see Note [How a
recomputation ends].
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias, final

import torch

from graphckpt._compat import (
    NO_MODES,
    ActiveModes,
    WithoutValues,
    active_modes,
    active_saved_tensor_hooks,
    current_backward,
    has_always_called_hooks,
    is_watched,
    num_function_modes,
    parametrizations_are_cached,
    pop_saved_tensor_hooks,
    set_active_modes,
    shape_of,
    storage_of,
)
from graphckpt._compat_compiler import never_compiled
from graphckpt.engine import mismatch
from graphckpt.engine.clones import NOTHING_BORROWED, Borrowed
from graphckpt.engine.values import Comparison, begin_comparison, seen_before
from graphckpt.errors import MutatedError, RecomputeError
from graphckpt.thread_state import num_calls_elsewhere
from graphckpt.undo import Undo

if TYPE_CHECKING:
    from graphckpt.ledger.recorder import Recorder

Frame: TypeAlias = Any
"""The frame of a call: a :class:`graphckpt.engine.frame.Frame`, whose module imports this one."""

# Note [How a recomputation ends]
#
# Once the last holder that is alive is filled, `Recomputation.pack` raises StopRecomputation, through the op that saves
# the tensor and through the code of the block. It is to that code what GeneratorExit is to a generator's: a
# BaseException, for which `finally` and `with` act, and which `except Exception` does not catch.
#
# what is on the way                             what happens
# a forward hook with `always_call=True`         nothing is raised, and forward runs to its end: `nn.Module` calls such
#                                                hooks after an Exception alone, and with an output of None
# an active cache of parametrizations            likewise: hooks before and after a module may switch it on and off
# `except:`, `except BaseException:`,            the exception is caught: nothing is raised again, and forward runs to
# `contextlib.suppress(BaseException)`           its end
# TorchScript, which raises a RuntimeError       the RuntimeError ends the recomputation
# in its place; `raise ... from`                 likewise
#
# So after the stop no Exception counts (`has_stopped`): all that backward needs is there. A ScheduleMismatch, which
# takes the same way before that, is noted where it is made, and raised again if it does not arrive.

OnPack: TypeAlias = Callable[[int], None] | None
"""Called with the position of each tensor that a recomputation saves."""

# A ContextVar: forwards in several threads do not see each other's. The backward of an accelerator runs in threads of
# the autograd engine, in which it is None until a recomputation sets it. So what a recomputation must know is in the
# frame, to which the unpack hook is bound, and never in the thread. See
# https://docs.pytorch.org/docs/stable/generated/torch.autograd.grad_mode.set_multithreading_enabled.html
running: ContextVar[Execution | None] = ContextVar("running", default=None)  # the innermost of this thread

call_numbers = count()
"""Numbers calls of recomputed blocks, to tell which came before a policy was removed."""


@final
class Holder:
    """Placeholder in the autograd graph for a tensor that the recomputation will fill in."""

    # One for every saved tensor, so that `Frame.pack` sets the attributes: a call of `__init__` takes 80 ns.
    __slots__ = ("__weakref__", "dtype", "shape", "value", "version")

    shape: torch.Size
    dtype: torch.dtype
    value: torch.Tensor | None
    version: int
    """Version of ``value`` when the recomputation stored it; unset before."""


def may_be_filled_later(tensor: torch.Tensor) -> bool:
    """Whether the op that saves ``tensor`` may write its values only after that, as ``rrelu`` does with its noise."""
    # `rrelu` allocates its noise by `empty_like`, and `rrelu_with_noise` writes it as a side effect (pytorch#82434).
    # Autograd saves inputs before the kernel runs. So the noise is then a new tensor: no view, no gradient, version 0.
    return (
        not tensor.requires_grad
        and type(tensor) is torch.Tensor
        and tensor.is_floating_point()
        and not tensor._version
        and not tensor._is_view()
    )


class Execution:
    """One execution of a block's forward: the original one, a :class:`Frame`, or a :class:`Recomputation`."""

    __slots__ = ("backward", "is_active", "is_recomputation", "outer")

    outer: Execution | None
    """The one around it in this thread."""
    is_recomputation: bool
    """Whether it is a recomputation, or runs within one."""
    backward: int
    """Id of the backward (autograd graph task) that it is a part of; -1 if none."""
    is_active: bool
    """Whether its forward is running: set before anything else, and reset before anything else."""
    frame: Frame
    """The frame of the call that is executed."""


@final
class Recomputation(Execution):
    """Fills the holders of a call while its block is recomputed."""

    __slots__ = (
        "__weakref__",
        "_borrowed",
        "_early_stop",
        "_first_fault",
        "_holders",
        "_last",
        "_num_calls",
        "_stops_from",
        "comparison",
        "cursor",
        "draws_differ",
        "excluded_cursor",
        "frame",
        "has_stopped",
        "mismatch",
        "returns_output",
        "undo",
        "versions",
    )  # fmt: skip

    def __init__(self, frame: Frame, undo: Undo, *, early_stop: bool, returns_output: bool) -> None:
        self.frame = frame
        self.undo = undo
        """What puts back all that it changes."""
        self.outer = running.get()
        self.is_recomputation = True
        self.is_active = False
        self.backward = current_backward()
        self.returns_output = returns_output
        self.has_stopped = False
        """Whether the end was raised as an exception, with all holders filled."""
        self.mismatch: ScheduleMismatch | None = None
        """What should have ended it: a handler of the block's may have caught it, and gone on with other values."""
        self.cursor = 0
        self.excluded_cursor = 0
        self.versions: list[tuple[int | None, torch.Tensor, int]] = []
        """Position of the argument or ``None``, tensor and version, of each tensor that forward must not modify."""
        self._borrowed = NOTHING_BORROWED
        holders = self._holders = frame.holders
        self._early_stop = early_stop
        last = len(holders) - 1
        while last >= 0 and holders[last]() is None:
            last -= 1
        self._last = last  # of the holders that are alive
        self._stops_from = last if early_stop else sys.maxsize  # an int: to compare with one takes half the time
        self.comparison: Comparison | None = None
        self.draws_differ = False
        """Whether other numbers may have been drawn: see Note [Threads that draw from one generator] in
        graphckpt/thread_state.py."""
        # Other threads' calls so far: NaN, which equals nothing, while one is running.
        self._num_calls = 0.0 if frame.random_after is None else num_calls_elsewhere(frame.devices)
        self._first_fault: mismatch.Fault | None = None

    def borrow(self, borrowed: Borrowed) -> None:
        """Notes tensors of modules that are those of the call until this ends, beside those before."""
        if borrowed is not NOTHING_BORROWED:
            self._borrowed = Borrowed(*map(frozenset.union, self._borrowed, borrowed))

    @never_compiled
    def pack(self, tensor: torch.Tensor) -> None:
        position = self.cursor
        self.cursor = position + 1
        if type(tensor) is WithoutValues:  # the stand-in for a skipped op, or for a tensor that was modified since
            if tensor.error_class is MutatedError:
                raise MutatedError(tensor.message)
            raise ScheduleMismatch(f"{self.frame.block.title}: tensor {position} is saved, but its op was skipped")
        if position < len(self._holders):  # a first call's runs to its end, and may save more; see `fault`
            holder = self._holders[position]()
            # A full holder was filled for a backward that has not read it, such as `autograd.grad` of some inputs.
            if holder is not None and holder.value is None:
                try:
                    shape = tensor.shape
                except RuntimeError:  # of a nested tensor; asked for afterwards, as every saved tensor comes by here
                    shape = shape_of(tensor)
                dtype = tensor.dtype
                if holder.shape != shape or holder.dtype is not dtype:
                    kinds = (holder.dtype, holder.shape), (dtype, shape)
                    self._first_fault = self._first_fault or mismatch.Fault(position, *kinds)
                lent, exchanged = self._borrowed
                if lent and (id(tensor) in lent or (tensor._is_view() and id(tensor._base) in lent)):
                    # When this ends, the buffer gets its own memory and version back; this alias keeps what it has.
                    tensor = tensor.data
                elif exchanged and (id(tensor) in exchanged or id(storage_of(tensor)) in exchanged):
                    with engine_ops():
                        tensor = tensor.detach().clone()  # when this ends, the memory gets its own values back
                elif not tensor.is_leaf:
                    # Without its history: the graph of the recomputation is freed when that ends. PyTorch's own
                    # checkpoint leaked by holding it (pytorch#82776).
                    tensor = tensor.detach()
                holder.value = tensor
                holder.version = tensor._version
        # Last: by then this holder is filled, with its version. The op that saves the tensor does not run any more.
        if position >= self._stops_from and not self._has_unwritten_noise(position):
            self._stop()

    def _stop(self) -> None:
        """Ends the recomputation, unless the code of the block could see it: Note [How a recomputation ends]."""
        first = self.frame._run_again.__code__
        may_draw = self.frame.random_after is not None and self._must_run_on()
        if may_draw or parametrizations_are_cached() or has_always_called_hooks(sys._getframe(), first):
            return
        self._stops_from = sys.maxsize  # once: a handler that catches it has the rest run
        self.has_stopped = True
        raise StopRecomputation(self)

    def raise_mismatch(self) -> None:
        """Raises what should have ended the recomputation, if a handler of the block's has caught it."""
        # Not held any more: with its traceback it would hold this recomputation, and nodes of autograd that hold the
        # call, which the garbage collector does not see.
        error, self.mismatch = self.mismatch, None
        assert error is not None
        try:
            raise error
        finally:
            del error

    def _has_unwritten_noise(self, position: int) -> bool:
        """Whether the op that saves this tensor may yet write the values of the one before, as ``rrelu`` does.

        It saves its noise, then its input, and then writes the noise: the recomputation must not stop there. Another op
        may look the same, which then runs to its end.
        """
        if not position:
            return False
        noise, last = self._holders[position - 1](), self._holders[position]()
        if noise is None or noise.value is None or last is None or noise.shape != last.shape:
            return False
        return may_be_filled_later(noise.value)

    def compare_draws(self) -> None:
        """Compares the RNG state with that after the original forward, unless the two differ on purpose."""
        frame = self.frame
        if self.has_stopped or frame.random_after is None or frame.asks_for_recomputation:  # which may draw otherwise
            return
        self.draws_differ = frame.random_after.differs(frame.devices, self._num_calls)

    def _must_run_on(self) -> bool:
        """Whether the recomputation must not stop at the last saved tensor, as it may draw more numbers behind it.

        An RNG state that equals that after the original forward already here means that nothing more is to be drawn.
        Another one can be compared only at the end.
        """
        self.compare_draws()
        return self.draws_differ and (self.frame.contexts is None or not self.frame.contexts.skips_ops())

    def hooks(self, on_pack: OnPack) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
        """Returns what autograd calls for each tensor that it saves, and for each that is asked for.

        ``on_pack`` is called with the position of each tensor. The second hook must not refer to the call: the graph of
        the recomputation holds that hook, and may outlive the call where a hook of the user's collects outputs.
        """
        frame = self.frame
        pack: Callable[[torch.Tensor], Any] = self.pack
        if on_pack is not None:
            pack = seen_before(pack, lambda _: on_pack(self.cursor))
        elif frame.values is not None and not frame.asks_for_recomputation:  # which may differ on purpose
            self.comparison = begin_comparison(frame.values, self._holders)
            if self.comparison is not None:
                pack = seen_before(pack, self.comparison.see)
        return pack, partial(_refuse_backward, frame.block.title)

    def fault(self) -> mismatch.Fault | None:
        if self._first_fault is not None:
            return self._first_fault
        # Too few or too many. One that stops at the last holder does not get far enough to show that it saves too many.
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

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        run = running.get()
        while run is not None and not isinstance(run, Recomputation):  # a call of a block within it
            run = run.outer
        if run is not None:
            run.mismatch = self


class _ModesPaused(threading.local):
    """A context in which the dispatch modes of the executions that are active in this thread ignore ops.

    It is for ops that do not belong to those blocks: the engine's own, such as copies of arguments. Modes that are
    entered within it are those of other executions, and active.
    """

    def __init__(self) -> None:
        # A depth rather than a flag: a mode acts at the depth at which it was entered. An excluded child runs at depth
        # 1, where the mode of a `selective` block inside of it acts, and that of the block around it does not.
        self.depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


modes_paused = _ModesPaused()
_NOTHING = nullcontext()


# Note [What an interrupt leaves]
#
# Ctrl-C, or the handler of a timer, raises an exception after any call of a function, and at the start of any: between
# a call that sets something and the `try` behind it, within a `finally`, at the first line of an `__exit__`. No single
# `try` is safe from it. Two are, one within the other, if the outer one does not undo steps but puts back what was
# there as a whole, whatever the inner one has still done:
#
#   frame outside      reads the surroundings, before anything is set; after an exception it puts them back, which costs
#                      nothing where there is none
#   frame inside       sets, runs, and resets in a `finally`, as if there were no interrupts
#
# So everything that the engine sets in a thread has a frame outside that does so: `Frame.run`, `Frame._recompute`, for
# which also the entries of its `Undo` are what was there, and `_run_with_hooks`. Of nested ones, the outermost decides.
#
# A second interrupt may come while that is done. `is_active` is right even then: it is the first that a `finally`
# resets, before any call. What an execution that is not active has left is ignored: see `innermost`, and `OpMode`.


Surroundings: TypeAlias = "tuple[Execution | None, tuple[Any, Any] | None, ActiveModes, int]"
"""The innermost execution of a thread and its innermost saved-tensor hooks, its modes, and the depth at which they are
paused: what is active when the engine is called, beside the settings that a recomputation changes."""


def surroundings() -> Surroundings:
    modes = active_modes() if is_watched() or num_function_modes() else NO_MODES
    run = innermost() if running.get() is not None else None  # mostly none: a call less in every forward
    return run, active_saved_tensor_hooks(), modes, modes_paused.depth


def put_surroundings_back(before: Surroundings) -> None:
    """Makes active in this thread what was active then, and nothing else; called twice, it does no more."""
    run, hooks_before, modes, modes_paused.depth = before
    running.set(run)
    while (hooks := active_saved_tensor_hooks()) is not None and not _are_same(hooks, hooks_before):
        pop_saved_tensor_hooks()
    set_active_modes(modes)


def _are_same(hooks: tuple[Any, Any], others: tuple[Any, Any] | None) -> bool:
    return others is not None and hooks[0] is others[0] and hooks[1] is others[1]


def innermost() -> Execution | None:
    """Returns the innermost execution of this thread, and forgets those that an interrupt has left behind."""
    run = running.get()
    if run is not None and not run.is_active:
        while run is not None and not run.is_active:
            run = run.outer
        running.set(run)
    return run


def engine_ops(recorder: Recorder | None = None, block: str = "") -> AbstractContextManager[Any]:
    """Returns a context for ops of the engine's own; with a ``recorder``, they count as copies for ``block``."""
    if recorder is not None:
        return _RecordedOps(recorder, block)
    return modes_paused if is_watched() else _NOTHING  # without a mode there is none to pause


@final
class _RecordedOps:  # no generator: it would end the pause once more when it is freed, long after an interrupt
    def __init__(self, recorder: Recorder, block: str) -> None:
        self._recorder, self._block = recorder, block

    def __enter__(self) -> None:
        modes_paused.depth += 1
        self._recorder.copies_for(self._block)

    def __exit__(self, *_: object) -> None:
        self._recorder.copies_for(None)
        modes_paused.depth -= 1
