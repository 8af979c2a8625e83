"""One forward of one block that will run again in backward: the first run, what it keeps, and the second run.

Autograd asks for a saved tensor through a hook. The first run answers with an empty :class:`Slot`; the first slot that
backward reads starts the second run, which fills them all, in the order in which they were made.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from types import GeneratorType
from typing import TYPE_CHECKING, Any, final

import torch

from graphckpt._compat import early_stop_in_force
from graphckpt._compat_compiler import never_compiled
from graphckpt.ambient import autocast_depth, enter_ambient, take_ambient
from graphckpt.errors import EditedError, RecomputeError
from graphckpt.rng import set_random_state, take_random_state
from graphckpt.rules.argument import Argument
from graphckpt.rules.arguments import Arguments
from graphckpt.rules.guard import Guard
from graphckpt.rules.handed import Handed, Returned, last_returned, tensors_in
from graphckpt.rules.kept import Slot
from graphckpt.rules.mismatch import differs, edited, edits_argument, edits_module
from graphckpt.rules.passes import Contexts, Run, SecondRun, Stop, keep_rest_around, running, unseen
from graphckpt.rules.stored import StoredCall
from graphckpt.stores import DeviceStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from graphckpt.moving import Snapshot
    from graphckpt.rng import RandomState
    from graphckpt.rules.hole import HoleCall, RepeatedCall
    from graphckpt.rules.site import Site
    from graphckpt.state import Watch
    from graphckpt.stores import Group


@final
class Frame:
    """What one call of a block keeps, and how to run it again."""

    __slots__ = (
        "__weakref__", "_ambient", "_arguments", "_early_stop", "_function", "_is_complete", "_joins", "_random",
        "_rest", "_slots", "_snapshot", "_state", "_strict", "_watch", "before", "contexts", "devices", "group",
        "handed", "holes", "original", "outer", "site",
    )  # fmt: skip

    def __init__(
        self,
        site: Site,
        function: Callable[..., Any],
        contexts: Contexts | None = None,
        *,
        early_stop: bool = True,
        strict: bool = True,
        joins: bool = False,
    ) -> None:
        self.site = site
        self.contexts = contexts
        self._early_stop = early_stop_in_force(early_stop)
        self._strict = strict
        self._joins = joins
        self.before: Frame | None = None
        """The call of the recomputed block right before, if the two are recomputed as one."""
        self.handed: list[torch.Tensor] | None = None
        self.holes: list[HoleCall | RepeatedCall] = []
        self.outer: Any = None
        self.original: Run | None = None
        """The original forward while it runs; after that, the one around it."""
        self._function = function
        self._is_complete = False
        self._rest: StoredCall | None = None
        self._watch: Watch | None = None
        self._slots: list[weakref.ref[Slot]] = []
        self.group: Group | None = None

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs the block for the first time, with nothing saved but what the second run needs."""
        site = self.site
        state = self._state = site.present_state()
        self.outer = site.hooks_around()
        if self.outer is None and not isinstance(site.store, DeviceStore):
            self.group = site.open_group()
        arguments = self._arguments = Arguments(args, kwargs)
        self.devices = site.random_devices(arguments.leaves)
        with unseen(running.get()):
            self._random = take_random_state(self.devices)
            self._ambient = take_ambient(self.devices)
            run = running.get()
            self._snapshot = state.take(is_again=run is not None and run.again)
            learning = site.learns and not state.has_learnt(self._snapshot)
            self._early_stop &= not learning  # the first call's second run goes on to its end, and must save no more
            watch = self._watch = state.watch() if learning else None
            function = self._function if watch is None else watch.around(self._function)
            returned = last_returned.get() if self._joins and self.outer is None else None
            arguments.keep(self, self._snapshot, returned, learning=learning)

        output = self._first_run(function, args, kwargs)
        if isinstance(output, GeneratorType):
            site.note("its forward is a generator: what it yields is made outside of the block, and all of it is kept")
        with unseen(running.get()):
            moving = self._watch = None
            if watch is not None:
                self._snapshot, moving = state.learn(watch, self._snapshot)
            edits = state.edits_unknown(self._snapshot)
            if edits is not None:
                self._arguments.drop()
                raise RecomputeError(edits_module(site.name, edits))
            self._settle(returned, learning=learning)
            if moving is not None:
                state.remember(self._snapshot, moving)
        last_returned.set(Returned(self, output) if self._rest is None else None)
        return output

    @property
    def keeps_rest(self) -> bool:
        """Whether what the block saves is kept by now; see :meth:`keep_rest`."""
        return self._rest is not None

    def keep_rest(self) -> None:
        """Keeps what the block saves from now on, as a backward is running inside of its original forward.

        A recomputation ends before that backward: one that repeated it could meet the nodes of the graph in another
        order, as autograd runs them by when they were made.
        """
        if self._rest is None and not self._is_complete:
            self._rest = StoredCall(self.site, self.group, self.outer)
            self.site.note(
                "its forward runs a backward: what the block saves from there on is kept, and only what it saves "
                "before is recomputed"
            )

    @never_compiled
    def pack(self, tensor: torch.Tensor) -> object:
        """Answers autograd, which wants ``tensor`` saved."""
        if self._rest is not None:
            return self._rest.pack(tensor)
        slot = Slot(tensor)
        self._slots.append(weakref.ref(slot))
        if self.contexts is not None:
            self.contexts.saves(tensor)
        return slot

    @never_compiled
    def unpack(self, slot: Any) -> torch.Tensor:
        """Gives autograd the tensor back, running the block again if need be."""
        keep_rest_around(self)
        if not isinstance(slot, Slot):
            assert self._rest is not None
            return self._rest.unpack(slot)
        if slot.value is None:
            self._run_again()
        value, slot.value = slot.value, None
        assert value is not None
        if value._version != slot.version:
            raise EditedError(edited(self.site.name, "a tensor that one of its ops saves"))
        return value

    def _first_run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        site = self.site
        recorder = site.recorder
        pack: Any = self.pack if recorder is None else recorder.first_run(site.name, self.pack)
        run = self.original = Run(self, running.get(), again=False)
        depth = autocast_depth()
        guard = Guard()
        try:
            guard.enter(run, pack, self.unpack)
            if self.contexts is None:
                return function(*args, **kwargs)
            with self.contexts.first_run(self):
                return function(*args, **kwargs)
        except BaseException:
            guard.restore_ambient(self._ambient, depth)
            self._arguments.drop()
            raise
        finally:
            try:
                guard.leave()
            finally:
                guard.leave()  # see Note [An interrupt at any moment]
                self.original = run.outer
                if recorder is not None:
                    recorder.first_run_ended(site.name)

    def name_of(self, position: int) -> str:
        """Names the argument that leaf ``position`` belongs to."""
        return self._arguments.name(position, self._function)

    def keep_argument(
        self, tensor: torch.Tensor, copied: torch.Tensor | None, returned: Returned | None
    ) -> Argument | Handed:
        """Keeps a tensor argument, or notes that the block right before returns it."""
        number = None if returned is None or copied is not None else returned.number_of(tensor)
        if returned is None or number is None:
            return Argument(tensor, self, copied)
        self.before = returned.frame()
        return Handed(number, tensor)

    def _settle(self, returned: Returned | None, *, learning: bool) -> None:
        """After the first run: lets go of what the second run does not need."""
        site = self.site
        self._arguments.settle(self, self._snapshot, returned, learning=learning)
        if self._joins and self.before is None:
            site.note("joined: no argument is what a recomputed block right before it has returned; all are kept")
        for hole in self.holes:
            hole.settle(self._snapshot)
        self._is_complete = True
        if self._rest is not None:
            self._rest.keep_filled()
        if self.contexts is not None:
            self.contexts.settle(self)
        if self.group is not None:
            site.store.close_group(self.group)

    def _run_blocks_before(self) -> None:
        """Has the blocks run again, from the first on, that this one is joined to."""
        frames, frame = [], self.before
        while frame is not None and frame.handed is None:
            frames.append(frame)
            frame = frame.before
        for frame in reversed(frames):
            frame._run_again(hands_on=True)

    def _run_again(self, *, hands_on: bool = False) -> None:
        self._run_blocks_before()
        recorder = self.site.recorder
        if recorder is not None:
            recorder.second_run(self.site.name)
        try:
            early_stop = not hands_on and (self._early_stop or self._rest is not None)
            run = SecondRun(self, self._slots, early_stop=early_stop, hands_on=hands_on)
            try:
                self._second_run(run)
            except Exception:
                if self.contexts is None or not self.contexts.run_all(self):
                    raise  # else code that is no op, such as a kernel, may have asked for what was left out
                run = SecondRun(self, self._slots, early_stop=early_stop, hands_on=hands_on)
                self._second_run(run)
            for position, tensor, version in run.given:
                if tensor._version != version:
                    raise RecomputeError(edits_argument(self.site.name, self.name_of(position)))
            fault = run.fault()
            if fault is not None and (self._strict or isinstance(fault.first, int)):
                probe = SecondRun(self, self._slots, early_stop=False)
                self._run_blocks_before()
                fault = fault.located(probe, lambda: self._second_run(probe))
                raise RecomputeError(differs(self.site.name, fault))
        finally:
            if recorder is not None:
                recorder.second_run_ended(self.site.name)

    def _second_run(self, run: SecondRun) -> None:
        with unseen(run.outer):
            self._repeat(run)

    def _repeat(self, run: SecondRun) -> None:
        state, snapshot = self._state, self._snapshot
        if self._watch is not None:  # a backward within the original forward of a first call
            snapshot, _ = state.learn(self._watch, snapshot)
        changed = state.edited(snapshot)
        if changed is not None:
            raise RecomputeError(edited(self.site.name, changed))
        random_now = take_random_state(self.devices)
        ambient_now = take_ambient(self.devices)
        depth = autocast_depth()
        guard = Guard()
        try:
            args, kwargs = self._enter_again(run, guard, snapshot, random_now)
            if self.contexts is None and ambient_now == self._ambient:
                self._call(run, args, kwargs)
            else:
                with ExitStack() as stack:
                    if ambient_now != self._ambient:
                        enter_ambient(stack, self._ambient, ambient_now)
                    if self.contexts is not None:
                        stack.enter_context(self.contexts.second_run(self))
                    self._call(run, args, kwargs)
        except Stop as stop:
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
        self, run: SecondRun, guard: Guard, snapshot: Snapshot, random_now: RandomState
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """Puts everything back to what it was before the original forward, and returns the arguments."""
        arguments = self._arguments
        leaves = arguments.take(self, guard.undo)
        run.given = arguments.versions(leaves)
        if self.before is not None:
            self.before.handed = None
        guard.enter(run, run.pack, run.unpack)
        guard.restore_random_state(random_now)
        self._state.rewind(snapshot, guard.undo)
        if not self._is_complete:
            self._state.protect(guard.undo)
        args, kwargs = arguments.assemble(leaves, guard.undo)
        set_random_state(self._random)
        return args, kwargs

    def _call(self, run: SecondRun, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        torch.set_grad_enabled(True)  # until the guard leaves
        output = self._function(*args, **kwargs)
        if run.hands_on:
            self.handed = [tensor.detach() for tensor in tensors_in(output)]
