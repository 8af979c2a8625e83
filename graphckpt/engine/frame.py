"""One call of a recomputed block: the original forward, what it keeps, and the recomputation.

Autograd passes each tensor that it saves to a hook. In the original forward, the hook returns an empty :class:`Holder`;
the first holder that backward reads starts the recomputation, which fills all of them, in the order in which they were
made. Children that are excluded from it pass their outputs on: see :func:`run_excluded`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import Context
from functools import partial
from itertools import chain
from types import GeneratorType
from typing import TYPE_CHECKING, Any, final

import torch
from torch.utils.hooks import RemovableHandle

from graphckpt._compat import (
    NO_MODES,
    WithoutValues,
    current_accelerator,
    current_backward,
    early_stop_active,
    foreign_modes,
    gradient_hooks,
    is_watched,
    num_other_threads,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    set_grad_enabled,
    shape_of,
)
from graphckpt._compat_compiler import never_compiled
from graphckpt.engine import mismatch
from graphckpt.engine.block import BlockContext
from graphckpt.engine.call_state import CallState, ModuleState
from graphckpt.engine.execution import (
    Execution,
    Holder,
    OnPack,
    Recomputation,
    ScheduleMismatch,
    StopRecomputation,
    Surroundings,
    call_numbers,
    engine_ops,
    innermost,
    put_surroundings_back,
    running,
    surroundings,
)
from graphckpt.engine.objects import context_of_call
from graphckpt.engine.sampling import forced_check
from graphckpt.engine.saved import (
    Arguments,
    BlockOutput,
    Call,
    has_storage,
    hooks_around,
    joined_blocks,
    last_output,
)
from graphckpt.engine.values import ValueCheck, begin_check, reports, seen_before
from graphckpt.errors import GraphckptError, MutatedError, RecomputeError
from graphckpt.thread_state import (
    Ambient,
    DrawFinder,
    RNGState,
    SharedState,
    enter_ambient,
    enter_call,
    enter_modes,
    get_rng_state,
    is_autocast,
    set_rng_state,
    shared_state,
    take_ambient,
)
from graphckpt.tree import tensors_in
from graphckpt.undo import Undo, put_back

if TYPE_CHECKING:
    from graphckpt.engine.excluded import ExcludedCall

_NOTHING = nullcontext()
_weak = weakref.ref
_OF_CHILD = "a parameter of an excluded child, which its parent reads,"
_NO_MODES: tuple[tuple[Any, ...], tuple[Any, ...]] = ((), ())


# Note [Two executions]
#
# original forward   state.take -> arguments.keep -> forward, for whose saved tensors `pack` returns empty holders
#                    -> state.finish -> arguments.after_forward
# backward           `unpack` of the first holder starts the recomputation
# recomputation      arguments.take -> state.put_in_place -> arguments.assemble -> forward, whose saved tensors fill the
#                    holders in `Recomputation.pack` -> put_back
# backward goes on   `unpack` of each holder returns its tensor, and empties it

# Note [Blocks within blocks]
#
# Within a recomputed block A, a `full` block is simply a part of A. Other rules have frames there too, say B:
#
# forward of A         What B keeps, its arguments and op results, passes to the hooks of A, which return holders of A.
#                      The tensors that the ops of B save have holders of B.
# backward reaches B   B.unpack -> B takes its arguments -> A.unpack -> A is recomputed
# recomputation of A   B runs again, as a new frame, and what that keeps fills the holders of A. They are matched by
#                      their order alone, so that all calls of B must keep the same tensors.
# recomputation of B   runs with the arguments from the holders of A, and fills the holders of B

# Note [Lifetime of a call]
#
#   output.grad_fn -> saved variable -> Holder                    to which the frame refers weakly
#                                    -> Frame.unpack -> Frame -> arguments, call state, context, bound forward -> module
#   module -> its `forward` -> BlockContext -> ModuleState        which refers to the modules weakly
#
# The graph holds the frame, by the hook that it has registered, until the last saved variable of the call is freed. So
# a frame must not refer to what leads back to that graph: outputs of its call, and attributes or objects that may come
# to hold one. Python's garbage collector does not follow the edges within a graph: where backward does not run, such a
# cycle is never freed. pytorch#189025 describes it for pack hooks. The module itself is such an object, as it is under
# PyTorch's checkpoint: a model that is deleted while an attribute of it holds an output is freed by a backward alone.

# Note [Order of a recomputation]
#
#   step of `_recompute_once`                  why it comes there
# 1 read RNG, autocast and grad mode           After step 4 they are those of the call, and backward would go on with
#   of backward                                them: its next dropout would draw other numbers.
# 2 take the arguments                         This may raise, wait for a store, or recompute the block around this one:
#                                              all of them must find the modules as they are.
# 3 put the modules in their state of the      Parameters are hidden after the modules' state is in place, which puts
#   call, hide parameters, assemble the        every parameter into its slot. An object that a module and an argument
#   arguments                                  hold is filled twice: forward sees the stand-ins of the second time.
# 4 set RNG and autocast of the call           From here on the engine itself neither draws nor casts.
# 5 enter modes of the call                    A mode of the user's would take ops of steps 2 and 3 for the block's.
# 6 run forward                                In the context variables of the call.
# 7 undo 5 to 3, the last first                Modes must be left before they see the restorations, and of an object
#                                              that was filled twice the contents before step 3 must win.
# 8 set RNG and grad mode of backward          See 1.


class Contexts:
    """Contexts around the original forward and the recomputation of a call, such as those that keep op results."""

    def original_forward(self, frame: Frame) -> AbstractContextManager[Any]:
        raise NotImplementedError

    def recomputation(self, frame: Frame) -> AbstractContextManager[Any]:
        raise NotImplementedError

    def saves(self, tensor: torch.Tensor) -> None:
        """Called when autograd saves a tensor of the original forward."""

    def drop_mutated(self, tensors: Iterable[torch.Tensor]) -> None:
        """Called when an excluded child has modified tensors in place, by ops that no context sees."""

    def after_forward(self, frame: Frame, *, has_failed: bool) -> None:
        """Called after the original forward; ``has_failed`` if it has raised an exception."""

    def run_all(self, frame: Frame) -> bool:
        """Called after a recomputation that raised: the next skips no op. Returns whether ops may have been skipped."""
        del frame
        return False

    def skips_ops(self) -> bool:
        """Whether recomputations skip ops, among them all behind the last saved tensor."""
        return False


@final
class Frame(Execution, Call):
    """One call of a recomputed block.

    Args:
        block: The block.
        function: Its forward.
        contexts: Contexts around the original forward and the recomputation.
        early_stop: Whether a recomputation ends once it has filled the last holder that is alive.
        determinism_check: What is compared in the recomputation; ``None`` as the block says.
        joins: Whether the block is joined to the one right before it.
    """

    __slots__ = (
        "__weakref__", "_ambient", "_arguments", "_context", "_early_stop", "_failure", "_function", "_is_joined",
        "_learning", "_modes", "_random", "_registers_hooks", "_state", "asks_for_recomputation", "block", "call_state",
        "contexts", "determinism_check", "devices", "excluded", "group", "holders", "number", "outer_hooks", "outputs",
        "own_pack", "random_after", "values",
    )  # fmt: skip

    # What `run` sets, as it was when the call began. All of it lives as long as the graph that holds the call.
    _state: ModuleState
    """The state of the block when the call began. A block gets a new one when a submodule is added or replaced."""
    call_state: CallState
    """What the call found in its modules: see Note [What every call copies] in call_state.py."""
    _arguments: Arguments
    _random: RNGState
    """Of the CPU and of ``devices``; of Python and NumPy too, if first calls have drawn from them (``host``)."""
    _ambient: Ambient
    """Autocast, kernels of attention, the default device and dtype."""
    _modes: tuple[tuple[Any, ...], tuple[Any, ...]]
    """Function and dispatch modes that the caller had entered."""
    _context: Context
    """The context variables of the caller. The recomputation runs in a copy of this context."""
    devices: tuple[torch.device, ...]
    """Devices beside the CPU whose RNG state the call may use."""
    number: int
    """By :data:`call_numbers`; within a recomputation, that of the call which is recomputed."""

    def __init__(
        self,
        block: BlockContext,
        function: Callable[..., Any],
        contexts: Contexts | None = None,
        *,
        early_stop: bool = True,
        determinism_check: str | None = None,
        joins: bool = False,
    ) -> None:
        self.block = block
        self.contexts = contexts
        self.group = None
        self.values: ValueCheck | None = None
        self.outputs: list[torch.Tensor] | None = None
        """Outputs of a recomputation that ran for the joined block right behind this one."""
        self.excluded: list[ExcludedCall] = []
        self.asks_for_recomputation = False
        """Whether forward calls ``is_recomputing()``, to modify something in the original forward alone."""
        self.holders: list[weakref.ref[Holder]] = []
        self.own_pack: Callable[[torch.Tensor], object] | None = None
        """The pack hook of the original forward while it runs: where another one is active, the program's is inside."""
        self.is_active = False
        self.random_after: SharedState | None = None
        """The RNG state after forward, if another thread may draw from the same generators; ``None``: not compared."""
        self._function = function
        self._early_stop = early_stop_active(early_stop and block.early_stop)
        self.determinism_check = determinism_check or block.determinism_check
        self._is_joined = joins
        if joins:
            joined_blocks.may_exist = True
        self._failure: type[Exception] | None = None  # what the original forward has raised
        self._registers_hooks = False  # on tensors, nodes of their graphs, or modules
        self._learning = False  # whether this is a first call, which shows what later ones keep

    @property
    def frame(self) -> Frame:
        return self

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        before = surroundings()
        outer = self.outer = before[0]
        if outer is not None and outer.is_recomputation:
            self.is_recomputation, self.number = True, outer.frame.number
        else:
            self.is_recomputation, self.number = False, next(call_numbers)
        self.is_active = True  # for other threads too, before it reads what they may change
        try:
            return self._run(args, kwargs, before)
        except BaseException:  # what it sets in the thread, it resets itself, unless an interrupt prevents that
            self.is_active, self.own_pack = False, None
            put_surroundings_back(before)
            raise

    def _run(self, args: Sequence[Any], kwargs: dict[str, Any], before: Surroundings) -> Any:
        block = self.block
        if block.state.is_lazy and block.renew_state().is_lazy:  # which the call initializes
            return self._function(*args, **kwargs)
        outer, hooks, modes, _ = before  # the frame's own hooks are pushed later
        is_nested = self.is_recomputation
        self.backward = current_backward()
        self.outer_hooks = None if hooks is None else hooks_around(block, hooks)
        if self.outer_hooks is None and not block.keeps_on_device:
            self.group = block.open_group()
        arguments = self._arguments = Arguments(args, kwargs, self._function)
        with _NOTHING if block.recorder is None and not is_watched() else engine_ops(block.recorder, block.name):
            # Before `running` is this frame: a context with the frame in it would make the frame hold itself.
            self._context, in_context = context_of_call()
            state, call_state = self._state, self.call_state = block.take(in_context)
            self.devices = () if current_accelerator() is None else state.devices(arguments.leaves)
            learning = self._learning = block.learns and call_state.is_first
            # `verify` and measured steps say for all blocks what is compared (`forced_check`). Nearly no call is due,
            # and counts itself here: `begin_check` would cost each a call.
            check, sampler = (forced_check.get() or self).determinism_check, block.sampler
            if check == "default" and sampler.number < sampler.due and not (learning or reports):
                sampler.number += not is_nested
            elif check != "none" or reports:
                self.values = begin_check(block, check, is_learning=learning, is_nested=is_nested)
            # The host's generators are those of Python and NumPy. A first call shows whether a block draws from them.
            host_modes = state.host_rng_modes  # nearly always empty: modes are hashed one by one
            may_draw_on_host = call_state.is_first or (host_modes and call_state.modes in host_modes)
            num_calls = enter_call(self, self.devices, is_outermost=outer is None)
            self._random = get_rng_state(self.devices, host=bool(may_draw_on_host))
            self._ambient = take_ambient(self.devices)
            self._modes = _NO_MODES if modes is NO_MODES else foreign_modes()
            self._early_stop &= not learning  # a first call's runs to its end, to detect extra saved tensors
            # Hooks around keep the arguments: they must receive the same in each call, whatever the block is joined to.
            previous = last_output.get() if self._is_joined and self.outer_hooks is None else None
            arguments.keep(self, previous, learning=learning)

        # Out of `engine_ops`, which is entered anew after forward: the modes of blocks around must see the block's ops.
        try:
            output = self._original_forward(args, kwargs)
            if (self.devices or num_other_threads()) and not (is_nested or call_state.modes in block.drawless_modes):
                self.random_after = shared_state(self.devices, num_calls)
        except Exception as error:  # if it is caught, backward may still come by an argument modified in place
            self._failure = type(error)
            try:
                self._after_forward(previous)
            except Exception as other:  # the program gets its own error; a recomputation raises this one
                arguments.drop(str(other))
            raise
        except BaseException:  # the end of a recomputation of a block around it, or an interrupt
            arguments.drop(f"{block.title}: its forward was interrupted, and cannot be recomputed")
            raise
        if isinstance(output, GeneratorType):
            block.note("its forward is a generator, which runs outside of the block, so everything is kept")
        self._after_forward(previous)
        if joined_blocks.may_exist:
            last_output.set(BlockOutput(self, output))
        return output

    def _original_forward(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        recorder, outer = self.block.recorder, self.outer
        pack: Callable[[torch.Tensor], object] = self.pack
        if self.values is not None:
            pack = seen_before(pack, self.values.see)
        hooks: tuple[Any, Any] = pack, self.unpack
        if recorder is not None:
            hooks = recorder.original_forward_began(self.block.name, *hooks)
        self.own_pack = hooks[0]
        running.set(self)
        push_saved_tensor_hooks(*hooks)
        first_hook = RemovableHandle.next_id  # hooks on tensors, nodes and modules are numbered together
        try:
            if self.contexts is None:
                return self._function(*args, **kwargs)
            with self.contexts.original_forward(self):
                return self._function(*args, **kwargs)
        finally:
            self.is_active = False
            self.own_pack = None  # a bound method, which holds the frame
            pop_saved_tensor_hooks()
            running.set(outer)
            num_hooks = RemovableHandle.next_id - first_hook
            self._registers_hooks = bool(num_hooks) and num_hooks > sum(call.num_hooks for call in self.excluded)
            # After an error too: a program that catches it may run backward through the child alone.
            for call in self.excluded:
                call.remove_hooks()
            if self.values is not None:
                self.values.end_forward()
            if recorder is not None:
                recorder.original_forward_ended(self.block.name, tensors_in((args, kwargs)))

    @never_compiled
    def pack(self, tensor: torch.Tensor) -> Holder:
        holder = Holder()
        try:
            holder.shape = tensor.shape
        except RuntimeError:  # of a nested tensor; asked for afterwards, as every saved tensor comes by here
            holder.shape = shape_of(tensor)
        holder.dtype = tensor.dtype
        holder.value = None
        # Autograd frees a holder with its saved variable, and a recomputation stops at the last one that is alive.
        self.holders.append(_weak(holder))
        if self.contexts is not None:
            self.contexts.saves(tensor)
        return holder

    def _after_forward(self, previous: BlockOutput | None) -> None:
        block, state, learning = self.block, self._state, self._learning
        with _NOTHING if block.recorder is None and not is_watched() else engine_ops(block.recorder, block.name):
            call_state = self.call_state
            # First: all below reads what it finds out, namely which copies are left, and what the call has changed.
            state.finish(call_state, learning=learning)
            if block.recorder is not None:
                block.recorder.state_kept(block.name, state.replaced_tensors(call_state), self)
            if learning:
                self._learn_host_rng()
            mutated = state.mutated(call_state, self._unread_parameters() if self.excluded else ())
            if mutated is not None:
                state.forget(call_state)  # the next call copies it, if it is a buffer
                message = mismatch.modified_by_forward(block.title, mutated, is_first=learning)
                self._arguments.drop(message)
                raise RecomputeError(message)
            self._arguments.after_forward(
                self, state, call_state, previous, learning=learning, is_guarded=self.asks_for_recomputation
            )
            if self._is_joined and self.before is None:
                block.note("joined: no argument is the output of a recomputed block right before it; all are kept")
            for call in self.excluded:
                call.after_forward()
            if self.contexts is not None:
                self.contexts.after_forward(self, has_failed=self._failure is not None)
            if self.group is not None:
                block.store.close_group(self.group)
            # Last: after an error above, or in forward, the next call is a first one again.
            if learning and self._failure is None:
                state.remember(call_state)

    def _learn_host_rng(self) -> None:
        """Keeps the state of Python's and NumPy's generators if the first call has drawn from one."""
        cpu_state, device_states, host = self._random
        if host is not None and host.changes():
            self._state.host_rng_modes.add(self.call_state.modes)
            return
        self._random = cpu_state, device_states, None
        for call in self.excluded:  # the recomputation restores what it sets, which is no longer that of the host
            call.random = (*call.random[:2], None)

    def rng_state(self) -> RNGState:
        return get_rng_state(self.devices, host=self._random[2] is not None)

    def _unread_parameters(self) -> frozenset[int]:
        """Returns the ids of parameters that the recomputation does not read: those of calls that are not repeated."""
        tensors = (tensor for call in self.excluded if not call.why_repeated for tensor in call.block.state.tensors())
        return frozenset(id(tensor) for tensor in tensors if isinstance(tensor, torch.nn.Parameter))

    @property
    def before(self) -> Frame | None:
        call = self._arguments.before
        return call if isinstance(call, Frame) else None

    @never_compiled
    def unpack(self, holder: Holder) -> torch.Tensor:
        # Only then may this backward run inside of a forward. Mostly it does not, and no call is made.
        if self.is_active or self.outer is not None or running.get() is not None:
            self._check_backward_inside()
        value = holder.value
        if value is None:
            self._recompute()
            value = holder.value
            assert value is not None
        # Not held until the graph is freed: each tensor goes with the op that has read it, as in a plain step. A second
        # backward (`retain_graph`) recomputes the block.
        holder.value = None
        # Autograd leaves this check to hooks: "If user provides hooks, we can't track versions through the hooks"
        # (torch/csrc/autograd/saved_variable.cpp).
        if value._version != holder.version:
            raise MutatedError(mismatch.modified_in_place(self.block.title, "a tensor that one of its ops saves"))
        return value

    def _check_backward_inside(self) -> None:
        """Raises an error if the backward that asks for a tensor was started inside of a forward of a block.

        A recomputation would repeat it. Autograd may do its work in a thread of its own, where ``running`` says nothing
        of the caller: there it is noticed only if the tensor belongs to the block itself.
        """
        # allowed   backward 7 -> recomputation of A (7) -> asks for a result that A has passed to the block around (7)
        # refused   backward 7 -> recomputation of A (7) -> its forward calls backward 8, which asks for a tensor of B
        # Check both: inside of an excluded child, `running` is None.
        for first in (innermost(), self):
            run: Execution | None = first
            while run is not None:
                if run.is_active and run.backward != current_backward():  # else the engine asks, within a recomputation
                    raise RecomputeError(mismatch.runs_backward(run.frame.block.title))
                run = run.outer

    def _recompute_before(self) -> None:
        """Recomputes the blocks that this one is joined to, from the first on, each up to its outputs."""
        # In a loop: a run of a thousand blocks would exceed Python's recursion limit.
        frames, frame = [], self.before
        while frame is not None and frame.outputs is None:
            frames.append(frame)
            frame = frame.before
        for frame in reversed(frames):
            frame._recompute(returns_output=True)

    def _take_outputs_before(self) -> Sequence[torch.Tensor]:
        before = self.before
        if before is None:
            return ()
        # Handed over: this recomputation is their only reader.
        outputs, before.outputs = before.outputs, None
        return outputs or ()

    def _recompute(self, *, returns_output: bool = False) -> None:
        before = surroundings()
        undo: Undo = []
        try:
            self._recompute_and_check(undo, returns_output=returns_output)
        except BaseException:
            put_back(undo)  # see Note [What an interrupt leaves] in graphckpt/engine/execution.py
            put_surroundings_back(before)
            # A program may catch it and repeat a backward that retains its graph, which must not read these tensors.
            for ref in self.holders:
                holder = ref()
                if holder is not None:
                    holder.value = None
            raise

    def _recompute_and_check(self, undo: Undo, *, returns_output: bool) -> None:
        if self._is_joined:
            self._recompute_before()
        recorder = self.block.recorder
        if recorder is not None:
            recorder.recomputation_began(self.block.name)
        # The outputs of a joined block come after its last saved tensor.
        early_stop = not returns_output and self._early_stop
        try:
            try:
                try:
                    run = self._recompute_once(undo, early_stop=early_stop, returns_output=returns_output)
                except (Exception, ScheduleMismatch):
                    # The first of two tries may skip ops. Any error may come from that: a kernel that is not dispatched
                    # may have read a skipped result. What was skipped wrongly runs in the second try.
                    if self.contexts is None or not self.contexts.run_all(self):
                        raise
                    run = self._recompute_once(undo, early_stop=early_stop, returns_output=returns_output)
                if run.draws_differ and self.contexts is not None and self.contexts.run_all(self):
                    # Perhaps only as it has ended before the last numbers were drawn: a run of all ops shows that.
                    run = self._recompute_once(undo, early_stop=early_stop, returns_output=returns_output)
            except ScheduleMismatch as error:  # which no handler of the user's would catch
                raise RecomputeError(mismatch.ops_differ(self.block.title, str(error))) from None
            except Exception as error:
                # To an error of the user's own code: that backward was recomputing a block, and what may be the cause.
                if not isinstance(error, (GraphckptError, torch.OutOfMemoryError)):
                    error.add_note(mismatch.raised_in_recomputation(self.block.title))
                raise
            self._check(run)
        finally:
            if recorder is not None:
                recorder.recomputation_ended(self.block.name)
            if self.block.on_recomputed is not None:
                self.block.on_recomputed()

    def _check(self, run: Recomputation) -> None:
        """Refuses a recomputation that did otherwise than the original forward."""
        # In an order from cause to effect, so that the error names the cause: other random numbers change values, a
        # modified argument changes shapes and values behind it, another shape changes values.
        if run.draws_differ and (draw := self._find_draw()):
            raise RecomputeError(mismatch.draws_differ(self.block.title, draw))
        for position, tensor, version in run.versions:
            if tensor._version != version:
                title = self.block.title
                raise RecomputeError(
                    mismatch.modifies_held_tensor(title)
                    if position is None
                    else mismatch.mutates_argument(title, self._arguments.name(position))
                )
        # Other numbers of tensors are an error even with "none": a holder that was not filled has nothing to return.
        fault, message = run.fault(), mismatch.differs
        if fault is None or (self.determinism_check == "none" and not isinstance(fault.first, int)):
            fault = run.comparison.end() if run.comparison is not None else None
            message = mismatch.values_differ
        if fault is not None:
            text = message(self.block.title, fault.located(self._watch_recomputation))
            suspects = mismatch.suspects(self.outer_hooks, self.block.modules(), is_first=self._learning)
            raise RecomputeError(text + suspects)

    def _find_draw(self) -> str:
        """Names an op of the block that draws from a generator of the process; "" if none does."""
        finder = DrawFinder()
        with suppress(Exception, ScheduleMismatch), finder:
            self._recompute_once([], lambda _: None, early_stop=self._early_stop)
            if not finder.op:  # noted, as otherwise each recomputation beside another thread would be made twice
                self.block.drawless_modes.add(self.call_state.modes)
        return finder.op

    def _watch_recomputation(self, on_pack: Callable[[int], None]) -> None:
        # Full holders stay as they are, until `_recompute` empties all of a call that is refused.
        with suppress(ScheduleMismatch):  # an op behind the tensor that is looked for
            self._recompute_once([], on_pack)

    def _recompute_once(
        self, undo: Undo, on_pack: OnPack = None, *, early_stop: bool = False, returns_output: bool = False
    ) -> Recomputation:
        """Runs forward in the state in which it was called, and puts back what is there now, by the empty ``undo``.

        The order of its steps matters: the numbers are those of Note [Order of a recomputation].
        """
        if self._is_joined:
            self._recompute_before()  # in a second try again, as the first has used up their outputs
        run = Recomputation(self, undo, early_stop=early_stop, returns_output=returns_output)
        state, call_state, arguments = self._state, self.call_state, self._arguments
        with engine_ops() if is_watched() else _NOTHING:
            # Nothing is changed yet: what raises here, or recomputes another block, leaves nothing to undo.
            unread = () if state.mutated(call_state) is None else self._modified_and_unread()
            random_now, ambient_now = self.rng_state(), take_ambient(self.devices)  # 1
            undo += [(set_grad_enabled, (torch.is_grad_enabled(),)), (set_rng_state, (random_now,))]
            leaves, run.versions = arguments.take(self, self._take_outputs_before() if self._is_joined else ())  # 2
            # What it registers again, on the same tensors, would act on a gradient beside that of the original forward.
            undo += gradient_hooks(self._inputs(leaves)) if self._registers_hooks else ()
            try:
                # 3
                run.borrow(state.put_in_place(call_state, self.stand_in, undo))
                if unread:
                    state.hide(call_state, unread, partial(self.stand_in, what=_OF_CHILD), undo)
                args, kwargs = arguments.assemble(leaves, self.stand_in, undo)
                # 4
                set_rng_state(self._random)
                # Also where it is the same one: the cache of casts belongs to the region in which backward was called.
                if ambient_now != self._ambient or is_autocast(ambient_now):
                    enter_ambient(undo, self._ambient, ambient_now)
                if self._modes != _NO_MODES:
                    enter_modes(undo, self._modes)  # 5
                # A copy, as `run` changes the variables, and another recomputation needs the same.
                output = self._context.copy().run(self._run_again, run, on_pack, args, kwargs)  # 6
                run.compare_draws()
                if returns_output:
                    self.outputs = [tensor.detach() for tensor in tensors_in(output)]
            except StopRecomputation as stop:
                if stop.run is not run:  # that of a recomputation around this one
                    raise
            except ScheduleMismatch:
                run.mismatch = None  # see `raise_mismatch`
                raise
            except Exception as error:
                # After the stop, it is what the code of the block has made of `StopRecomputation`. Before it, the type
                # that the original forward has raised is expected: backward runs, so a caller has caught that error.
                if not run.has_stopped and run.mismatch is None and type(error) is not self._failure:
                    raise
            finally:
                put_back(undo)  # 7 and, with the first two entries, 8
        if run.mismatch is not None:
            run.raise_mismatch()
        return run

    def _run_again(self, run: Recomputation, on_pack: OnPack, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        # Not from `running`, which in this context has the value of the time of the call.
        outer = run.outer
        run.is_active = True
        if outer is None:
            enter_call(run, self.devices)
        running.set(run)
        push_saved_tensor_hooks(*run.hooks(on_pack))
        try:
            # Backward has turned gradients off, unless it was called with `create_graph`.
            if self.contexts is None:
                set_grad_enabled(True)
                return self._function(*args, **kwargs)
            with self.contexts.recomputation(self):
                set_grad_enabled(True)
                return self._function(*args, **kwargs)
        finally:
            run.is_active = False
            pop_saved_tensor_hooks()
            running.set(outer)

    def _inputs(self, leaves: Iterable[Any]) -> Iterator[torch.Tensor]:
        """Yields the tensors from outside of the block that the recomputation may come by."""
        inputs = chain(leaves, self._arguments.held_tensors(), self._state.held_tensors(self.call_state))
        return (each for each in inputs if isinstance(each, torch.Tensor))

    def _modified_and_unread(self) -> frozenset[int]:
        """Returns the ids of parameters that were modified since, but that the recomputation does not read.

        An optimizer that steps in backward has modified those of an excluded child whose backward is over.
        """
        unread = self._unread_parameters()
        changed = self._state.mutated(self.call_state, unread)
        if changed is not None:
            raise RecomputeError(mismatch.modified_in_place(self.block.title, changed))
        return unread

    def stand_in(
        self, tensor: torch.Tensor, what: str = "a tensor that a container or an object holds"
    ) -> WithoutValues:
        """Returns what stands for a tensor that was modified since: to read it is an error."""
        message = mismatch.modified_in_place(self.block.title, what)
        if not has_storage(tensor):  # a stand-in has strides, which sparse and nested tensors have not
            raise MutatedError(message)
        return WithoutValues.like(tensor, MutatedError, message)
