"""A child that is kept inside of a block that runs again: its outputs are handed back, it does not run twice."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from graphckpt.objects import take_objects
from graphckpt.rng import set_random_state, take_random_state
from graphckpt.rules.argument import Traits, own_attributes
from graphckpt.rules.frame import Frame
from graphckpt.rules.guard import Guard
from graphckpt.rules.kept import Kept
from graphckpt.rules.mismatch import holes_differ
from graphckpt.rules.passes import Run, SecondRun, running, unseen
from graphckpt.rules.stored import IN_PLACE, StoredCall
from graphckpt.stores import DeviceStore
from graphckpt.tree import build_value, flatten_call, flatten_value
from graphckpt.undo import differs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from graphckpt.moving import Snapshot
    from graphckpt.rng import RandomState
    from graphckpt.rules.site import Site


@final
class HoleCall:
    """One call of a kept child in a first run, and how to answer for it in the second."""

    __slots__ = ("_handles", "_leaves", "_random", "_site", "_spec", "_versions")

    def __init__(self, site: Site, output: Any, frame: Frame, random: RandomState) -> None:
        self._site = site
        self._random = random
        leaves, self._spec = flatten_value(output)
        self._handles = [_watch_node(leaf, frame) for leaf in leaves if _has_history(leaf)]
        self._versions = [
            (leaf.detach(), leaf._version)
            for leaf in leaves
            if isinstance(leaf, torch.Tensor) and not leaf.is_inference()
        ]
        self._leaves: list[Any] | None = [
            _Output(leaf, frame) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
        ]
        if any(_is_special(leaf) for leaf in leaves):
            self._leaves = None

    @property
    def name(self) -> str:
        """Path of the child."""
        return self._site.name

    def settle(self, snapshot: Snapshot) -> None:
        """Decides after the original forward whether the recomputation can be handed the outputs.

        It cannot where the parent has edited one in place, and where the child sets attributes of its modules, which
        the parent may read.
        """
        attributes = {id(place.owner) for place, _ in snapshot.moving if not place.in_place}
        if self._has_changed() or (attributes and not attributes.isdisjoint(self._site.state.attribute_ids())):
            self._leaves = None
        self._versions = []
        while self._handles:
            self._handles.pop().remove()

    def _has_changed(self) -> bool:
        return any(tensor._version != version for tensor, version in self._versions)

    def answer(self) -> tuple[bool, Any]:
        """Returns ``(True, output)``, or ``(False, None)`` if the child has to run again after all."""
        if self._leaves is None or self._has_changed():
            return False, None
        leaves = []
        for leaf in self._leaves:
            tensor = leaf.take() if isinstance(leaf, _Output) else leaf
            if tensor is None and isinstance(leaf, _Output):
                return False, None
            leaves.append(tensor)
        set_random_state(self._random)
        return True, build_value(self._spec, leaves)


@final
class _Output:
    """A tensor that a kept child has returned."""

    __slots__ = ("_kept", "_traits")

    def __init__(self, tensor: torch.Tensor, frame: Frame) -> None:
        self._kept = Kept(tensor, frame, frame.outer)
        self._traits = Traits(tensor)

    def take(self) -> torch.Tensor | None:
        """Returns the tensor, with a history if it had one; ``None`` if it was edited in place since."""
        tensor = self._kept.take()
        return None if tensor is None else self._traits.give_to(tensor.detach())


@final
class RepeatedCall:
    """One call of a kept child that has to run in the recomputation too: it raised, or has edited its arguments."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def settle(self, snapshot: Snapshot) -> None:
        """There is nothing to decide."""

    def answer(self) -> tuple[bool, Any]:
        """The child has to run."""
        return False, None


@final
class _Inputs:
    """The arguments of a kept child, to see whether its forward edits them."""

    __slots__ = ("_objects", "_versions")

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        leaves, _ = flatten_call(args, kwargs)
        self._versions = [
            (leaf, leaf._version) for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_inference()
        ]
        self._objects = take_objects([*args, *kwargs.values(), *leaves])

    def are_edited(self) -> bool:
        return any(tensor._version != version for tensor, version in self._versions) or any(
            differs(owner, then) for owner, then in self._objects
        )


def _is_special(leaf: Any) -> bool:
    """Whether a tensor is more than its values: what is handed back is not the same object."""
    return isinstance(leaf, torch.Tensor) and (isinstance(leaf, nn.Parameter) or bool(own_attributes(leaf)))


def _has_history(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None


def _watch_node(tensor: torch.Tensor, frame: Frame) -> Any:
    """Tells ``frame`` when a backward inside of its forward gets to what has made ``tensor``."""
    found = weakref.ref(frame)

    def note(_: Any) -> None:
        frame = found()
        if frame is not None:
            frame.keep_rest()

    return tensor.grad_fn.register_prehook(note)  # type: ignore[union-attr]


def run_hole(site: Site, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs a kept child; outside of a block that runs again this is a plain call.

    Blocks may nest: the child is a hole in every block around it, up to one whose second run this is.
    """
    around = _runs_around(running.get())
    if not around:
        return _run_alone(site, function, args, kwargs)
    outermost = around[-1]
    first_runs = around[:-1] if isinstance(outermost, SecondRun) else around
    inputs = stored = None
    with unseen(around[0]):  # copies of a store, or of hooks, are no ops of the block
        answered, output = _ask(outermost, site) if isinstance(outermost, SecondRun) else (False, None)
    if not answered:
        stored = None if isinstance(outermost, SecondRun) or outermost.frame.outer is not None else _stored(site)
        keep = None if isinstance(outermost, SecondRun) else outermost.frame.outer
        hooks = (stored.pack, stored.unpack) if stored is not None else keep or IN_PLACE
        inputs = _Inputs(args, kwargs) if first_runs else None
        try:
            output = _run_kept(around, hooks, site, function, args, kwargs, is_stored=stored is not None)
        except Exception:
            for run in first_runs:
                run.frame.holes.append(RepeatedCall(site.name))
            raise
    with unseen(around[0]):
        if stored is not None:
            stored.seal()
        is_repeated = inputs is not None and inputs.are_edited()
        for frame in (run.frame for run in first_runs if not run.frame.keeps_rest):
            call = RepeatedCall(site.name) if is_repeated else None
            frame.holes.append(call or HoleCall(site, output, frame, take_random_state(frame.devices)))
    return output


def _run_alone(site: Site, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs a block with no recompute around it: what it saves goes to its store."""
    if not site.is_placed and site.recorder is None:
        return function(*args, **kwargs)
    hooks_around = site.hooks_around()
    if hooks_around is not None:
        if site.is_placed:
            site.note("hooks of the caller are in force around it: what it saves goes to them, not to its store")
        return function(*args, **kwargs)
    stored = _stored(site)
    hooks = IN_PLACE if stored is None else (stored.pack, stored.unpack)
    output = _run_kept([], hooks, site, function, args, kwargs, is_stored=stored is not None)
    if stored is not None:
        stored.seal()
    return output


def _stored(site: Site) -> StoredCall | None:
    return None if isinstance(site.store, DeviceStore) else StoredCall(site, site.open_group())


def _runs_around(run: Run | None) -> list[Run]:
    around = []
    while run is not None:
        around.append(run)
        if isinstance(run, SecondRun):
            break
        run = run.outer
    return around


def _ask(run: SecondRun, site: Site) -> tuple[bool, Any]:
    frame = run.frame
    position = run.hole_cursor
    run.hole_cursor += 1
    call = frame.holes[position] if position < len(frame.holes) else None
    if call is None or call.name != site.name:
        raise holes_differ(frame.site.name, call.name if call else None, site.name)
    answered, output = call.answer()
    if not answered:
        site.note("it is recomputed: it edits its arguments or sets attributes, or its parent edits its output")
    return answered, output


def _run_kept(
    around: list[Run],
    keep: tuple[Any, Any],
    site: Site,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    is_stored: bool = False,
) -> Any:
    recorder = site.recorder
    pack = keep[0] if recorder is None else recorder.kept_run(site.name, keep[0], is_stored=is_stored)
    guard = Guard()
    try:
        # what runs in here belongs to what is around the outermost block
        guard.enter(around[-1].outer if around else running.get(), pack, keep[1])
        with unseen(around[0] if around else None):
            return function(*args, **kwargs)
    finally:
        try:
            guard.leave()
        finally:
            guard.leave()  # see Note [An interrupt at any moment]
            if recorder is not None:
                recorder.kept_run_ended(site.name)
