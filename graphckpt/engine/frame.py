"""One call of a recomputed block: the original forward, what it keeps, and the recomputation.

Autograd passes each tensor that it saves to a hook. In the original forward, the hook returns an empty
:class:`~graphckpt.engine.saved.Holder`; the first holder that backward reads starts the recomputation, which fills all
of them, in the order in which they were made.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from types import GeneratorType
from typing import TYPE_CHECKING, Any, Protocol, final

import torch

from graphckpt._compat import (
    WithoutValues,
    active_saved_tensor_hooks,
    autograd_sequence_number,
    current_backward,
    early_stop_active,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
)
from graphckpt._compat_compiler import never_compiled
from graphckpt.engine.arguments import Arguments, BlockOutput, last_output
from graphckpt.engine.block import BlockContext
from graphckpt.engine.call_state import (
    CallState,
    Reached,
    RNGState,
    enter_ambient,
    get_rng_state,
    is_autocast,
    set_rng_state,
    take_ambient,
)
from graphckpt.engine.mismatch import Fault, differs, modified_in_place, mutates_argument, mutates_module, runs_backward
from graphckpt.engine.objects import Objects, put_back
from graphckpt.engine.saved import (
    Call,
    ExcludedCall,
    UnreadParameter,
    decide,
    has_storage,
    hooks_around,
    may_be_filled_later,
    unread_parameters,
)
from graphckpt.errors import MutatedError, RecomputeError
from graphckpt.stores.base import DeviceStore
from graphckpt.tree import tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

running: ContextVar[Execution | None] = ContextVar("running", default=None)
_NOTHING = nullcontext()


class Contexts(Protocol):
    """Contexts around the original forward and the recomputation of a call, such as those that keep op results."""

    def original_forward(self, frame: Frame) -> AbstractContextManager[Any]:
        """Returns the context for the original forward."""

    def recomputation(self, frame: Frame) -> AbstractContextManager[Any]:
        """Returns the context for a recomputation."""

    def saves(self, tensor: torch.Tensor) -> None:
        """Is called when autograd saves a tensor of the original forward."""

    def drop_mutated_outside(self, tensors: Iterable[torch.Tensor]) -> None:
        """Is called when an excluded child has modified tensors in place, by ops that no context sees."""

    def after_forward(self, frame: Frame, *, has_failed: bool) -> None:
        """Is called after the original forward; ``has_failed`` if it has raised an exception."""

    def run_all(self, frame: Frame) -> bool:
        """Called after a recomputation that raised: the next skips no op. Returns whether ops may have been skipped."""

    def paused(self) -> AbstractContextManager[None]:
        """Returns a context in which the active one does nothing."""


@final
class Holder:
    """Placeholder in the autograd graph for a tensor that the recomputation will fill in."""

    __slots__ = ("__weakref__", "dtype", "shape", "value", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.value: torch.Tensor | None = None
        self.version = 0


@final
class Frame(Call):
    """One call of a recomputed block.

    Args:
        block: The block.
        function: Its forward.
        contexts: Contexts around the original forward and the recomputation.
        early_stop: Whether a recomputation ends once it has filled the last holder that is alive.
        strict: Whether the saved tensors of a recomputation must have the shapes and dtypes of the original ones.
        joins: Whether the block is joined to the one right before it.
    """

    __slots__ = (
        "_ambient",
        "_arguments",
        "_call_state",
        "_early_stop",
        "_failure",
        "_function",
        "_holders",
        "_is_joined",
        "_last_saved",
        "_random",
        "_reached",
        "_state",
        "_strict",
        "contexts",
        "excluded",
        "original",
        "outputs",
    )

    def __init__(
        self,
        block: BlockContext,
        function: Callable[..., Any],
        contexts: Contexts | None = None,
        *,
        early_stop: bool = True,
        strict: bool = True,
        joins: bool = False,
    ) -> None:
        self.block = block
        self.group = None
        self.contexts = contexts
        self._early_stop = early_stop_active(early_stop)
        self._strict = strict
        self._is_joined = joins
        self.outputs: list[torch.Tensor] | None = None
        """What a recomputation for the joined block right behind it has returned."""
        self.excluded: list[ExcludedCall] = []
        self.original: Execution | None = None
        """The original forward while it runs; after that, the execution around it."""
        self._function = function
        self._failure: type[Exception] | None = None  # what the original forward has raised
        self._reached: list[Reached] | None = None  # in a first call: what attributes reach
        self._holders: list[weakref.ref[Holder]] = []
        self._last_saved: tuple[int, Any] = -1, None  # in a first call: sequence number, weak reference to the storage

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs the original forward, which keeps nothing but what the recomputation needs."""
        block = self.block
        state = self._state = block.renew_state() if block.state.is_stale() else block.state
        hooks = active_saved_tensor_hooks()
        self.outer_hooks = None if hooks is None else hooks_around(block, hooks)
        if self.outer_hooks is None and not isinstance(block.store, DeviceStore):
            self.group = block.open_group()
        arguments = self._arguments = Arguments(args, kwargs, self._function)
        self.devices = state.devices(arguments.leaves)
        with modes_paused(running.get()):
            run = running.get()
            modes = state.modes()
            learning = block.learns and not state.has_learnt(modes)
            self._call_state = state.take(modes, learning=learning, is_nested=run is not None and run.is_recomputation)
            self._reached = state.reached() if learning else None
            draws = learning or not block.learns or modes in state.host_rng_modes
            self._random = get_rng_state(self.devices, host=draws)
            self._ambient = take_ambient(self.devices)
            self._early_stop &= not learning  # the first recomputation runs to its end: it must save no more
            returned = last_output.get() if self._is_joined and self.outer_hooks is None else None
            arguments.keep(self, returned, learning=learning)

        try:
            output = self._original_forward(args, kwargs)
        except Exception as error:  # caught by the caller, it may leave history behind: that of an argument it edits
            self._failure = type(error)
            try:
                self._end(returned)
            except Exception as other:
                self._arguments.drop(str(other))
            raise
        if isinstance(output, GeneratorType):
            block.note("its forward is a generator: what it yields is made outside of the block, and all of it is kept")
        if learning:
            block.ends_with_saved = self._ends_with_saved(output)
        self._end(returned)
        last_output.set(BlockOutput(self, output))
        return output

    def _ends_with_saved(self, output: Any) -> bool:
        """Whether autograd has recorded no op after the one that has saved its own result, an output of the block."""
        number, saved = self._last_saved
        if number != autograd_sequence_number():
            return False
        return any(tensor.untyped_storage() is saved() for tensor in tensors_in(output) if has_storage(tensor))

    def _end(self, returned: BlockOutput | None) -> None:
        """Learns from the original forward, and drops what the recomputation does not need."""
        state, reached = self._state, self._reached
        with modes_paused(running.get()):
            scope = self._reached = None
            if reached is not None:
                self._call_state, scope = state.learn(self._call_state, reached)
                self._learn_host_rng()
            self._call_state = state.finish(self._call_state)
            unread = unread_parameters(self.excluded) if self.excluded else ()
            mutated = state.mutates_unknown(self._call_state, unread)
            if mutated is not None:
                message = mutates_module(self.block.title, mutated)
                self._arguments.drop(message)
                raise RecomputeError(message)
            self._finish_forward(returned, learning=scope is not None)
            if scope is not None and self._failure is None:
                state.remember(self._call_state.modes, scope)

    def _learn_host_rng(self) -> None:
        """Keeps the state of Python's and NumPy's generators if the first call has drawn from one."""
        cpu_state, device_states, host = self._random
        if host is not None and host.changes():
            self._state.host_rng_modes.add(self._call_state.modes)
            return
        self._random = cpu_state, device_states, None
        for call in self.excluded:  # the recomputation restores what it sets, which is no longer that of the host
            call.random = (*call.random[:2], None)

    def rng_state(self) -> RNGState:
        return get_rng_state(self.devices, host=self._random[2] is not None)

    def add_excluded(self, block: BlockContext, output: Any, *, is_repeated: bool) -> None:
        """Notes a call of the excluded child ``block``, which the recomputation repeats or takes the output from."""
        self.excluded.append(ExcludedCall(block, output, self, self.rng_state(), is_repeated=is_repeated))

    @never_compiled
    def pack(self, tensor: torch.Tensor) -> object:
        """Hook for a tensor that autograd saves."""
        holder = Holder(tensor)
        self._holders.append(weakref.ref(holder))
        if self._reached is not None and has_storage(tensor):
            self._last_saved = autograd_sequence_number(), weakref.ref(tensor.untyped_storage())
        if self.contexts is not None:
            self.contexts.saves(tensor)
        return holder

    @never_compiled
    def unpack(self, holder: Holder) -> torch.Tensor:
        """Hook for a saved tensor that autograd needs; recomputes the block if necessary."""
        if self.original is not None or running.get() is not None:
            refuse_backward_inside(self)
        if holder.value is None:
            self._recompute()
        value, holder.value = holder.value, None
        assert value is not None
        if value._version != holder.version:
            raise MutatedError(modified_in_place(self.block.title, "a tensor that one of its ops saves"))
        return value

    def _original_forward(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        block = self.block
        recorder = block.recorder
        hooks: tuple[Any, Any] = self.pack, self.unpack
        if recorder is not None:
            hooks = recorder.original_forward_began(block.name, *hooks)
        run = self.original = Execution(self, running.get(), is_recomputation=False)
        try:
            with Guard(run, *hooks), self.contexts.original_forward(self) if self.contexts else _NOTHING:
                return self._function(*args, **kwargs)
        except BaseException as error:
            if not isinstance(error, Exception):
                self._arguments.drop(f"{block.title}: its forward was interrupted, and cannot be recomputed")
            raise
        finally:
            self.original = run.outer
            if recorder is not None:
                recorder.original_forward_ended(block.name)

    def _finish_forward(self, returned: BlockOutput | None, *, learning: bool) -> None:
        """Drops what the recomputation does not need, after the original forward."""
        block = self.block
        self._arguments.after_forward(self, self._state, self._call_state, returned, learning=learning)
        if self._is_joined and self.before is None:
            block.note("joined: no argument is the output of a recomputed block right before it; all are kept")
        if self.excluded:
            decide(self.excluded, self._call_state)
            for call in self.excluded:
                call.after_forward()
        if self.contexts is not None:
            self.contexts.after_forward(self, has_failed=self._failure is not None)
        if self.group is not None:
            block.store.close_group(self.group)

    @property
    def before(self) -> Frame | None:
        """The call of the recomputed block right before, if the two are recomputed as one."""
        call = self._arguments.before
        return call if isinstance(call, Frame) else None

    def recompute_output(self) -> None:
        """Recomputes the block for the joined block right behind it, up to its ``outputs``."""
        self._recompute(returns_output=True)

    def _recompute_before(self) -> None:
        """Recomputes the blocks that this one is joined to, from the first on."""
        frames, frame = [], self.before
        while frame is not None and frame.outputs is None:
            frames.append(frame)
            frame = frame.before
        for frame in reversed(frames):
            frame.recompute_output()

    def _recompute(self, *, returns_output: bool = False) -> None:
        self._recompute_before()
        recorder = self.block.recorder
        if recorder is not None:
            recorder.recomputation_began(self.block.name)
        early_stop = not returns_output and self._early_stop
        try:
            try:
                run = self._recompute_once(early_stop=early_stop, returns_output=returns_output)
            except CallMismatch:
                run = self._recompute_once(early_stop=early_stop, returns_output=returns_output)
            except (Exception, ScheduleMismatch):
                if self.contexts is None or not self.contexts.run_all(self):
                    raise  # a kernel that is not dispatched may have read a skipped result: run all ops
                run = self._recompute_once(early_stop=early_stop, returns_output=returns_output)
            for position, tensor, version in run.versions:
                if tensor._version != version:
                    raise RecomputeError(mutates_argument(self.block.title, self._arguments.name(position)))
            fault = run.fault()
            if fault is not None and (self._strict or isinstance(fault.first, int)):
                self._recompute_before()
                raise RecomputeError(differs(self.block.title, fault.located(self._watch_recomputation)))
        finally:
            if recorder is not None:
                recorder.recomputation_ended(self.block.name)

    def _watch_recomputation(self, on_pack: Callable[[int], None]) -> None:
        """Recomputes the block once more, and calls ``on_pack`` with the number of each saved tensor."""
        with suppress(ScheduleMismatch):  # an op behind the tensor that is looked for
            self._recompute_once(on_pack=on_pack)

    def _recompute_once(
        self,
        *,
        early_stop: bool = False,
        returns_output: bool = False,
        on_pack: Callable[[int], None] | None = None,
    ) -> Recomputation:
        run = Recomputation(self, self._holders, early_stop=early_stop, returns_output=returns_output)
        run.on_pack = on_pack
        with modes_paused(run.outer):
            self._repeat(run)
        return run

    def _repeat(self, run: Recomputation) -> None:
        state, call_state = self._state, self._call_state
        unread = self._modified_and_unread(call_state)
        random_now = self.rng_state()
        ambient_now = take_ambient(self.devices)
        grad_enabled = torch.is_grad_enabled()
        arguments = self._arguments
        before = self.before
        leaves = arguments.take(self, () if before is None else before.outputs or ())
        run.versions = arguments.versions(leaves)
        if before is not None:
            before.outputs = None
        undo: Objects = []
        try:
            with Guard(run, run.pack, run.unpack), ExitStack() as stack:
                state.put_in_place(call_state, undo)
                if unread:
                    state.hide(call_state, unread, self._stand_in, undo)
                args, kwargs = arguments.assemble(leaves, undo)
                set_rng_state(self._random)
                if ambient_now != self._ambient or is_autocast(ambient_now):
                    enter_ambient(stack, self._ambient, ambient_now)
                if self.contexts is not None:
                    stack.enter_context(self.contexts.recomputation(self))
                torch.set_grad_enabled(True)
                self._call(run, args, kwargs)
        except StopRecomputation as stop:
            if stop.run is not run:
                raise
        finally:
            put_back(undo)
            set_rng_state(random_now)
            torch.set_grad_enabled(grad_enabled)

    def _modified_and_unread(self, call_state: CallState) -> frozenset[int]:
        """Returns the ids of parameters that were modified since, but that the recomputation does not read.

        An optimizer that steps in backward has modified those of an excluded child whose backward is over.
        """
        if self._state.mutated(call_state) is None:
            return frozenset()
        unread = unread_parameters(self.excluded)
        changed = self._state.mutated(call_state, unread)
        if changed is not None:
            raise RecomputeError(modified_in_place(self.block.title, changed))
        return unread

    def _stand_in(self, parameter: torch.Tensor) -> UnreadParameter:
        message = modified_in_place(self.block.title, "a parameter of an excluded child, which its parent reads,")
        return UnreadParameter.of(parameter, message)

    def _call(self, run: Recomputation, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        try:
            output = self._function(*args, **kwargs)
        except Exception as error:
            if type(error) is not self._failure:
                raise
            return
        if run.returns_output:
            self.outputs = [tensor.detach() for tensor in tensors_in(output)]


class Execution:
    """One execution of a block's forward that is going on in this thread.

    Args:
        frame: The call.
        outer: The execution around it.
        is_recomputation: Whether it is one, or a part of one.
    """

    __slots__ = ("backward", "frame", "is_active", "is_recomputation", "outer")

    def __init__(self, frame: Frame, outer: Execution | None, *, is_recomputation: bool) -> None:
        self.frame = frame
        self.outer = outer
        self.is_recomputation: bool = is_recomputation or (outer is not None and outer.is_recomputation)
        self.backward = current_backward()
        """Id of the backward (autograd graph task) that it is a part of; -1 if none."""
        self.is_active = False
        """Whether it is going on now."""


def refuse_backward_inside(frame: Frame) -> None:
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
        "on_pack",
        "returns_output",
        "versions",
    )  # fmt: skip

    def __init__(
        self,
        frame: Frame,
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
        self.versions: list[tuple[int, torch.Tensor, int]] = []
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


@final
class Guard:
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
