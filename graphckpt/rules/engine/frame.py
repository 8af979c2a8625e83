"""One call of a recomputed block: the original forward, what it keeps, and the recomputation.

Autograd passes each tensor that it saves to a hook. In the original forward, the hook returns an empty
:class:`~graphckpt.rules.engine.saved.Holder`; the first holder that backward reads starts the recomputation, which
fills all of them, in the order in which they were made.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from types import GeneratorType
from typing import Any, final

import torch

from graphckpt._compat import autograd_sequence_number, early_stop_active
from graphckpt._compat_compiler import never_compiled
from graphckpt.errors import MutatedError, RecomputeError
from graphckpt.rules.engine.aliases import has_storage
from graphckpt.rules.engine.arguments import Arguments
from graphckpt.rules.engine.context import BlockContext
from graphckpt.rules.engine.excluded import UnreadParameter, decide, unread_parameters
from graphckpt.rules.engine.execution import (
    CallMismatch,
    ChildCall,
    Contexts,
    Execution,
    RecomputableCall,
    Recomputation,
    ScheduleMismatch,
    StopRecomputation,
    keep_rest_around,
    modes_paused,
    running,
)
from graphckpt.rules.engine.guard import Guard
from graphckpt.rules.engine.joined_input import BlockOutput, last_output
from graphckpt.rules.engine.mismatch import differs, modified_in_place, mutates_argument, mutates_module
from graphckpt.rules.engine.saved import Holder
from graphckpt.rules.engine.saved_hooks import StoredCall, hooks_around
from graphckpt.state.autocast import autocast_depth, enter_ambient, is_autocast, take_ambient
from graphckpt.state.modules import Watch
from graphckpt.state.rng import RNGState, get_rng_state, set_rng_state
from graphckpt.state.values import Snapshot
from graphckpt.stores.base import TensorGroup
from graphckpt.stores.device import DeviceStore
from graphckpt.tree import tensors_in


@final
class Frame:
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
        "__weakref__", "_ambient", "_arguments", "_early_stop", "_failure", "_function", "_holders", "_is_complete",
        "_is_joined", "_last_saved", "_random", "_rest", "_snapshot", "_state", "_strict", "_watch", "block",
        "contexts", "devices", "excluded", "group", "original", "outer_hooks", "outputs",
    )  # fmt: skip

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
        self.contexts = contexts
        self._early_stop = early_stop_active(early_stop)
        self._strict = strict
        self._is_joined = joins
        self.outputs: list[torch.Tensor] | None = None
        self.excluded: list[ChildCall] = []
        self.outer_hooks: Any = None
        self.original: Execution | None = None
        """The original forward while it runs; after that, the execution around it."""
        self._function = function
        self._is_complete = False
        self._failure: type[Exception] | None = None  # what the original forward has raised
        self._rest: StoredCall | None = None
        self._watch: Watch | None = None
        self._holders: list[weakref.ref[Holder]] = []
        self._last_saved: tuple[int, Any] = -1, None  # in a first call: sequence number, weak reference to the storage
        self.group: TensorGroup | None = None

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs the original forward, which keeps nothing but what the recomputation needs."""
        block = self.block
        state = self._state = block.present_state()
        self.outer_hooks = hooks_around(block)
        if self.outer_hooks is None and not isinstance(block.store, DeviceStore):
            self.group = block.open_group()
        arguments = self._arguments = Arguments(args, kwargs)
        self.devices = block.rng_devices(arguments.leaves)
        with modes_paused(running.get()):
            run = running.get()
            self._snapshot = state.take(is_again=run is not None and run.is_recomputation)
            learning = block.learns and not state.has_learnt(self._snapshot)
            draws = learning or not block.learns or self._snapshot.modes in state.host_rng_modes
            self._random = get_rng_state(self.devices, host=draws)
            self._ambient = take_ambient(self.devices)
            self._early_stop &= not learning  # the first recomputation runs to its end: it must save no more
            watch = self._watch = state.watch() if learning else None
            function = self._function if watch is None else watch.around(self._function)
            returned = last_output.get() if self._is_joined and self.outer_hooks is None else None
            arguments.keep(self, self._snapshot, returned, learning=learning)

        try:
            output = self._original_forward(function, args, kwargs)
        except Exception as error:  # caught by the caller, it may leave history behind: that of an argument it edits
            self._failure = type(error)
            try:
                self._end(returned)
            except Exception as other:
                self._arguments.drop(str(other))
            raise
        if isinstance(output, GeneratorType):
            block.note("its forward is a generator: what it yields is made outside of the block, and all of it is kept")
        if watch is not None:
            block.ends_with_saved = self._ends_with_saved(output)
        self._end(returned)
        last_output.set(BlockOutput(self, output) if self._rest is None else None)
        return output

    def _ends_with_saved(self, output: Any) -> bool:
        """Whether autograd has recorded no op after the one that has saved its own result, an output of the block."""
        number, saved = self._last_saved
        if number != autograd_sequence_number():
            return False
        return any(tensor.untyped_storage() is saved() for tensor in tensors_in(output) if has_storage(tensor))

    def _end(self, returned: BlockOutput | None) -> None:
        """Learns from the original forward, and drops what the recomputation does not need."""
        state, watch = self._state, self._watch
        with modes_paused(running.get()):
            places = self._watch = None
            if watch is not None:
                self._snapshot, places = state.learn(watch, self._snapshot)
                self._learn_host_rng()
            else:
                self._snapshot = state.with_late_changes(self._snapshot)
            mutated = state.mutates_unknown(self._snapshot)
            if mutated is not None:
                message = mutates_module(self.block.title, mutated)
                self._arguments.drop(message)
                raise RecomputeError(message)
            self._finish_forward(returned, learning=watch is not None)
            if places is not None and self._failure is None:
                state.remember(self._snapshot, places)

    def _learn_host_rng(self) -> None:
        """Keeps the state of Python's and NumPy's generators if the first call has drawn from one."""
        cpu_state, device_states, host = self._random
        if host is not None and host.changes():
            self._state.host_rng_modes.add(self._snapshot.modes)
            return
        self._random = cpu_state, device_states, None
        for call in self.excluded:  # the recomputation restores what it sets, which is no longer that of the host
            call.random = (*call.random[:2], None)

    def rng_state(self) -> RNGState:
        """Returns the present state of the generators that the call may draw from."""
        return get_rng_state(self.devices, host=self._random[2] is not None)

    @property
    def keeps_rest(self) -> bool:
        """Whether what the block saves is kept by now; see :meth:`keep_rest`."""
        return self._rest is not None

    def keep_rest(self) -> None:
        """Keeps what the block saves from now on, as a backward is running inside of its original forward.

        The recomputation stops before that backward and does not repeat it: autograd orders nodes by their sequence
        numbers, so a repeated backward might visit them in another order.
        """
        if self._rest is None and not self._is_complete:
            self._rest = StoredCall(self.block, self.group, self.outer_hooks)
            self.block.note(
                "its forward runs a backward: what the block saves from there on is kept, and only what it saves "
                "before is recomputed"
            )

    @never_compiled
    def pack(self, tensor: torch.Tensor) -> object:
        """Hook for a tensor that autograd saves."""
        if self._rest is not None:
            return self._rest.pack(tensor)
        holder = Holder(tensor)
        self._holders.append(weakref.ref(holder))
        if self._watch is not None and has_storage(tensor):
            self._last_saved = autograd_sequence_number(), weakref.ref(tensor.untyped_storage())
        if self.contexts is not None:
            self.contexts.saves(tensor)
        return holder

    @never_compiled
    def unpack(self, holder: Any) -> torch.Tensor:
        """Hook for a saved tensor that autograd needs; recomputes the block if necessary."""
        if self.original is not None or running.get() is not None:
            keep_rest_around(self)
        if not isinstance(holder, Holder):
            assert self._rest is not None
            return self._rest.unpack(holder)
        if holder.value is None:
            self._recompute()
        value, holder.value = holder.value, None
        assert value is not None
        if value._version != holder.version:
            raise MutatedError(modified_in_place(self.block.title, "a tensor that one of its ops saves"))
        return value

    def _original_forward(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        block = self.block
        recorder = block.recorder
        pack: Any = self.pack if recorder is None else recorder.original_forward_began(block.name, self.pack)
        run = self.original = Execution(self, running.get(), is_recomputation=False)
        depth = autocast_depth()
        guard = Guard()
        try:
            guard.enter(run, pack, self.unpack)
            if self.contexts is None:
                return function(*args, **kwargs)
            with self.contexts.original_forward(self):
                return function(*args, **kwargs)
        except BaseException as error:
            guard.restore_ambient(self._ambient, depth)
            if not isinstance(error, Exception):
                self._arguments.drop(f"{block.title}: its forward was interrupted, and cannot be recomputed")
            raise
        finally:
            try:
                guard.leave()
            finally:
                guard.leave()  # see Note [An interrupt at any moment]
                self.original = run.outer
                if recorder is not None:
                    recorder.original_forward_ended(block.name)

    def name_of(self, position: int) -> str:
        """Names the argument that leaf ``position`` belongs to."""
        return self._arguments.name(position, self._function)

    def _finish_forward(self, returned: BlockOutput | None, *, learning: bool) -> None:
        """Drops what the recomputation does not need, after the original forward."""
        block = self.block
        self._arguments.after_forward(self, self._snapshot, returned, learning=learning)
        if self._is_joined and self.before is None:
            block.note("joined: no argument is the output of a recomputed block right before it; all are kept")
        decide(self.excluded, self._snapshot)
        for call in self.excluded:
            call.after_forward()
        self._is_complete = True
        if self._rest is not None:
            self._rest.keep_pending()
        if self.contexts is not None:
            self.contexts.after_forward(self, has_failed=self._failure is not None)
        if self.group is not None:
            block.store.close_group(self.group)

    @property
    def before(self) -> RecomputableCall | None:
        """The call of the recomputed block right before, if the two are recomputed as one."""
        return self._arguments.before

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
        early_stop = not returns_output and (self._early_stop or self._rest is not None)
        try:
            try:
                run = self._recompute_once(early_stop=early_stop, returns_output=returns_output)
            except CallMismatch:
                run = self._recompute_once(early_stop=early_stop, returns_output=returns_output)
            except (Exception, ScheduleMismatch):
                if self.contexts is None or not self.contexts.run_all(self):
                    raise  # a kernel that is not dispatched may have read a skipped result: run all ops
                run = self._recompute_once(early_stop=early_stop, returns_output=returns_output)
            for position, tensor, version in run.given:
                if tensor._version != version:
                    raise RecomputeError(mutates_argument(self.block.title, self.name_of(position)))
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
        state, snapshot = self._state, self._snapshot
        if not self._is_complete:  # a backward within the original forward
            late = state.with_late_changes(snapshot)
            snapshot = late if self._watch is None else state.learn(self._watch, snapshot)[0]
            decide(self.excluded, snapshot)
        unread = self._modified_and_unread(snapshot)
        random_now = self.rng_state()
        ambient_now = take_ambient(self.devices)
        depth = autocast_depth()
        guard = Guard()
        try:
            args, kwargs = self._enter_again(run, guard, snapshot, random_now)
            if unread:
                state.hide(snapshot, unread, self._stand_in, guard.undo)
            if self.contexts is None and ambient_now == self._ambient and not is_autocast(ambient_now):
                self._call(run, args, kwargs)
            else:
                with ExitStack() as stack:
                    enter_ambient(stack, self._ambient, ambient_now)
                    if self.contexts is not None:
                        stack.enter_context(self.contexts.recomputation(self))
                    self._call(run, args, kwargs)
        except StopRecomputation as stop:
            if stop.run is not run:
                raise
        except BaseException:
            guard.restore_ambient(ambient_now, depth)
            raise
        finally:
            try:
                guard.leave()
            finally:
                guard.leave()  # see Note [An interrupt at any moment]

    def _enter_again(
        self, run: Recomputation, guard: Guard, snapshot: Snapshot, random_now: RNGState
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """Puts everything back to what it was before the original forward, and returns the arguments."""
        arguments = self._arguments
        leaves = arguments.take(self, guard.undo)
        run.given = arguments.versions(leaves)
        if self.before is not None:
            self.before.outputs = None
        guard.enter(run, run.pack, run.unpack)
        guard.restore_rng_state(random_now)
        self._state.rewind(snapshot, guard.undo)
        if not self._is_complete:
            self._state.protect(guard.undo)
        args, kwargs = arguments.assemble(leaves, guard.undo)
        set_rng_state(self._random)
        return args, kwargs

    def _modified_and_unread(self, snapshot: Snapshot) -> frozenset[int]:
        """Returns the ids of parameters that were modified since, but that the recomputation does not read.

        An optimizer that steps in backward has modified those of an excluded child whose backward is over.
        """
        if self._state.mutated(snapshot) is None:
            return frozenset()
        unread = unread_parameters(self.excluded)
        changed = self._state.mutated(snapshot, unread)
        if changed is not None:
            raise RecomputeError(modified_in_place(self.block.title, changed))
        return unread

    def _stand_in(self, parameter: torch.Tensor) -> UnreadParameter:
        message = modified_in_place(self.block.title, "a parameter of an excluded child, which its parent reads,")
        return UnreadParameter.of(parameter, message)

    def _call(self, run: Recomputation, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        torch.set_grad_enabled(True)  # until the guard leaves
        try:
            output = self._function(*args, **kwargs)
        except Exception as error:
            if type(error) is not self._failure:
                raise
            return
        if run.returns_output:
            self.outputs = [tensor.detach() for tensor in tensors_in(output)]
