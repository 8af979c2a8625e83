"""One forward of one block that will run again in backward: the first run, what it keeps, and the second run.

Autograd asks for a saved tensor through a hook. The first run answers with an empty :class:`Slot`; the first slot that
backward reads starts the second run, which fills them all, in the order in which they were made.
"""

from __future__ import annotations

import warnings
import weakref
from contextlib import ExitStack
from types import GeneratorType
from typing import TYPE_CHECKING, Any, final

import torch
from torch.autograd.graph import saved_tensors_hooks

from graphckpt._compat import early_stop_in_force
from graphckpt._compat_compiler import never_compiled
from graphckpt.ambient import enter_ambient, take_ambient
from graphckpt.errors import RecomputeError
from graphckpt.objects import rewind_objects, settle_objects, take_objects
from graphckpt.rng import set_random_state, take_random_state
from graphckpt.rules.handed import Handed, Returned, last_returned, tensors_in
from graphckpt.rules.kept import Kept, Same, Slot, twin_of
from graphckpt.rules.mismatch import begins_to_move, differs, edited, edits_argument, iterator_argument
from graphckpt.rules.passes import Contexts, Run, SecondRun, Stop, running, unseen
from graphckpt.stores import DeviceStore
from graphckpt.tree import ATOMS, flatten_call
from graphckpt.undo import put_back

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from graphckpt.rules.hole import HoleCall
    from graphckpt.rules.site import Site
    from graphckpt.stores import Group
    from graphckpt.undo import Undo

    _Given = tuple[int, torch.Tensor, int, torch.Tensor | None]


@final
class Frame:
    """What one call of a block keeps, and how to run it again."""

    __slots__ = (
        "__weakref__", "_ambient", "_before", "_early_stop", "_function", "_is_complete", "_joins", "_leaves",
        "_objects", "_random", "_shape", "_slots", "_snapshot", "_state", "_strict", "contexts", "devices", "edited",
        "group", "handed", "holes", "outer", "site",
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
        self._before: Frame | None = None
        self.handed: list[torch.Tensor] | None = None
        self.holes: list[HoleCall] = []
        self.outer: Any = None
        self.edited: frozenset[int] = frozenset()
        self._function = function
        self._is_complete = False
        self._slots: list[weakref.ref[Slot]] = []
        self._objects: Any = ()
        self.group: Group | None = None

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs the block for the first time, with nothing saved but what the second run needs."""
        site = self.site
        state = self._state = site.present_state()
        recorder = site.recorder
        self.outer = site.hooks_around()
        if self.outer is None and not isinstance(site.store, DeviceStore):
            self.group = site.open_group()
        leaves, self._shape = flatten_call(args, kwargs)
        self.devices = site.random_devices(leaves)
        with unseen(running.get()):
            self._random = take_random_state(self.devices)
            self._ambient = take_ambient(self.devices)
            self._snapshot = state.take()
            learning = site.learns and not state.has_learnt(self._snapshot)
            self._early_stop &= not learning  # the first call's second run goes on to its end, and must save no more
            watch = state.watch() if learning else None
            function = self._function if watch is None else watch.around(self._function)
            returned = last_returned.get() if self._joins and self.outer is None else None
            tensors = self._keep(leaves, returned, learning=learning)

        token = running.set(Run(self, running.get(), again=False))
        pack: Any = self.pack if recorder is None else recorder.first_run(site.name, self.pack)
        try:
            with saved_tensors_hooks(pack, self.unpack):
                if self.contexts is None:
                    output = function(*args, **kwargs)
                else:
                    with self.contexts.first_run(self):
                        output = function(*args, **kwargs)
        finally:
            running.reset(token)
            if recorder is not None:
                recorder.first_run_ended(site.name)

        if isinstance(output, GeneratorType):
            site.note("its forward is a generator: what it yields is made outside of the block, and all of it is kept")
        with unseen(running.get()):
            if watch is not None:
                self._snapshot = state.learn(watch, self._snapshot)
            elif self._snapshot.versions:
                self._see_buffers_begin_to_move()
            self._settle(tensors, returned, learning=learning)
        last_returned.set(Returned(self, output))
        return output

    @never_compiled
    def pack(self, tensor: torch.Tensor) -> Slot:
        """Answers autograd, which wants ``tensor`` saved."""
        slot = Slot(tensor)
        self._slots.append(weakref.ref(slot))
        if self.contexts is not None:
            self.contexts.saves(tensor)
        return slot

    @never_compiled
    def unpack(self, slot: Slot) -> torch.Tensor:
        """Gives autograd the tensor back, running the block again if need be."""
        if slot.value is None:
            self._run_again()
        value, slot.value = slot.value, None
        assert value is not None
        if value._version != slot.version:
            raise RecomputeError(edited(self.site.name, "a tensor that one of its ops saves"))
        return value

    def name_of(self, position: int) -> str:
        """Names the argument that leaf ``position`` belongs to."""
        return self._shape.name(position, self._function)

    def _keep(self, leaves: list[Any], returned: Returned | None, *, learning: bool) -> list[_Given]:
        self.edited = self.site.edited
        tensors = []
        first_of: dict[int, int] = {}
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                first = first_of.setdefault(id(leaf), position)
                if first != position:  # `attention(x, x, x)` takes another path than three equal tensors
                    leaves[position] = Same(first)
                    continue
                # An argument that forward edits in place is kept as a copy. Which ones these are shows on the first
                # call, for which every argument is copied, one block's at a time.
                twin = twin_of(leaf) if learning or position in self.edited else None
                version = 0 if leaf.is_inference() else leaf._version
                tensors.append((position, leaf, version, twin))
                deferred = learning and self.outer is None
                leaves[position] = leaf if deferred else self._kept(leaf, twin, returned)
            elif type(leaf) not in ATOMS:
                if hasattr(leaf, "__next__"):
                    raise RecomputeError(iterator_argument(self.site.name, self.name_of(position)))
                self._objects = self._objects or take_objects(leaves)
        self._leaves = leaves
        return tensors

    def _kept(self, leaf: torch.Tensor, twin: torch.Tensor | None, returned: Returned | None) -> Kept | Handed:
        number = None if returned is None or twin is not None else returned.number_of(leaf)
        if returned is None or number is None:
            return Kept(leaf if twin is None else twin, self, self.outer)
        self._before = returned.frame()
        return Handed(number, leaf)

    def _see_buffers_begin_to_move(self) -> None:
        name, self._snapshot = self._state.began_to_move(self._snapshot)
        if name is not None:
            warnings.warn(begins_to_move(self.site.name, name), stacklevel=4)

    def _settle(self, tensors: list[_Given], returned: Returned | None, *, learning: bool) -> None:
        """After the first run: sees which arguments it edited, and lets go of what the second run does not need."""
        moved = frozenset(p for p, leaf, version, _ in tensors if not leaf.is_inference() and leaf._version != version)
        site = self.site
        if learning:
            site.edited = self.edited = moved | site.edited
            if self.outer is None:
                for position, leaf, _, twin in tensors:
                    self._leaves[position] = self._kept(leaf, twin if position in self.edited else None, returned)
        elif not moved <= self.edited:
            raise RecomputeError(edits_argument(site.name, self.name_of(min(moved - self.edited))))
        if self._joins and self._before is None:
            site.note("joined: no argument is what a recomputed block right before it has returned; all are kept")
        if self._objects:
            self._objects = settle_objects(self._objects)
        for hole in self.holes:
            hole.settle()
        self._is_complete = True
        if self.contexts is not None:
            self.contexts.settle(self)
        if self.group is not None:
            site.store.seal(self.group)

    def _take_all(self) -> list[Any]:
        taken: list[Any] = []
        for position, leaf in enumerate(self._leaves):
            taken.append(taken[leaf.position] if isinstance(leaf, Same) else self._take(position, leaf))
        if self._before is not None:
            self._before.handed = None
        return taken

    def _take(self, position: int, leaf: Any) -> Any:
        if isinstance(leaf, Handed):
            return leaf.of(self._before)  # type: ignore[arg-type]
        if not isinstance(leaf, Kept):
            if isinstance(leaf, torch.Tensor):  # backward within the first run of a first call
                return leaf.detach().requires_grad_(leaf.requires_grad)
            return leaf
        tensor = leaf.take()
        if tensor is None:
            raise RecomputeError(edited(self.site.name, f"its argument `{self.name_of(position)}`"))
        # clone() makes a tensor with history, which forward may edit in place; a leaf it may not
        return tensor.clone() if position in self.edited else tensor

    def _run_blocks_before(self) -> None:
        """Has the blocks run again, from the first on, that this one is joined to."""
        frames, frame = [], self._before
        while frame is not None and frame.handed is None:
            frames.append(frame)
            frame = frame._before
        for frame in reversed(frames):
            frame._run_again(hands_on=True)

    def _run_again(self, *, hands_on: bool = False) -> None:
        self._run_blocks_before()
        recorder = self.site.recorder
        if recorder is not None:
            recorder.second_run(self.site.name)
        try:
            # A backward within forward comes before the first run has made all of its slots.
            early_stop = not hands_on and (self._early_stop or not self._is_complete)
            run = SecondRun(self, self._slots, early_stop=early_stop, hands_on=hands_on)
            try:
                self._second_run(run)
            except Exception:
                if self.contexts is None or not self.contexts.run_all(self):
                    raise  # else code that is no op, such as a kernel, may have asked for what was left out
                run = SecondRun(self, self._slots, early_stop=early_stop, hands_on=hands_on)
                self._second_run(run)
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
        state = self._state
        changed = state.edited(self._snapshot)
        if changed is not None:
            raise RecomputeError(edited(self.site.name, changed))
        with torch.set_grad_enabled(bool(self.edited)):  # for the history of a copy; else there is none to have
            args, kwargs = self._shape.assemble(self._take_all())
        random_now = take_random_state(self.devices)
        undo: Undo = []
        token = running.set(run)
        try:
            state.rewind(self._snapshot, undo)
            if self._objects:
                rewind_objects(self._objects, undo)
            set_random_state(self._random)
            ambient_now = take_ambient(self.devices)
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
        finally:
            running.reset(token)
            put_back(undo)
            set_random_state(random_now)

    def _call(self, run: SecondRun, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        with torch.enable_grad(), saved_tensors_hooks(run.pack, run.unpack):
            output = self._function(*args, **kwargs)
        if run.hands_on:
            self.handed = [tensor.detach() for tensor in tensors_in(output)]
