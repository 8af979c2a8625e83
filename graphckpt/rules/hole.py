"""A child that is kept inside of a block that runs again: its outputs are handed back, it does not run twice."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from graphckpt.rng import set_random_state, take_random_state
from graphckpt.rules.argument import own_attributes
from graphckpt.rules.frame import Frame
from graphckpt.rules.guard import Guard
from graphckpt.rules.kept import Kept
from graphckpt.rules.mismatch import holes_differ
from graphckpt.rules.passes import Run, SecondRun, running, unseen
from graphckpt.rules.stored import IN_PLACE, StoredCall
from graphckpt.stores import DeviceStore
from graphckpt.tree import build_value, flatten_value

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from graphckpt.rng import RandomState
    from graphckpt.rules.site import Site


@final
class HoleCall:
    """One call of a kept child in a first run, and how to answer for it in the second."""

    __slots__ = ("__weakref__", "_handles", "_is_differentiated", "_leaves", "_random", "_spec", "_versions", "name")

    def __init__(self, name: str, output: Any, frame: Frame, random: RandomState) -> None:
        self.name = name
        self._random = random
        self._is_differentiated = False
        leaves, self._spec = flatten_value(output)
        self._handles = [_watch_node(leaf, self) for leaf in leaves if _has_history(leaf)]
        self._versions = [
            (leaf.detach(), leaf._version)
            for leaf in leaves
            if isinstance(leaf, torch.Tensor) and not leaf.is_inference()
        ]
        self._leaves: list[Any] | None = [
            Kept(leaf, frame, frame.outer) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
        ]
        if any(_is_special(leaf) for leaf in leaves):
            self._leaves = None

    def settle(self) -> None:
        """After the first run: decides whether the outputs can be handed back.

        They cannot if the parent has edited one in place or has taken gradients through the child, which has no history
        in the second run unless it runs there.
        """
        if self._is_differentiated or any(tensor._version != version for tensor, version in self._versions):
            self._leaves = None
        self._versions = []
        while self._handles:
            self._handles.pop().remove()

    def answer(self) -> tuple[bool, Any]:
        """Returns ``(True, output)``, or ``(False, None)`` if the child has to run again after all."""
        if self._leaves is None:
            return False, None
        leaves = []
        for leaf in self._leaves:
            tensor = leaf.take() if isinstance(leaf, Kept) else leaf
            if tensor is None and isinstance(leaf, Kept):
                return False, None
            leaves.append(tensor)
        set_random_state(self._random)
        return True, build_value(self._spec, leaves)


@final
class RaisedCall:
    """One call of a kept child in a first run that has raised an exception, which its parent may have caught."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def settle(self) -> None:
        """There is nothing to decide."""

    def answer(self) -> tuple[bool, Any]:
        """The child has to run, and raise, again."""
        return False, None


def _is_special(leaf: Any) -> bool:
    """Whether a tensor is more than its values: what is handed back is not the same object."""
    return isinstance(leaf, torch.Tensor) and (isinstance(leaf, nn.Parameter) or bool(own_attributes(leaf)))


def _has_history(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None


def _watch_node(tensor: torch.Tensor, call: HoleCall) -> Any:
    """Notes in ``call`` when a backward gets to what has made ``tensor``."""
    found = weakref.ref(call)

    def note(_: Any) -> None:
        call = found()
        if call is not None:
            call._is_differentiated = True

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
    with unseen(around[0]):  # copies of a store, or of hooks, are no ops of the block
        answered, output = _ask(outermost, site) if isinstance(outermost, SecondRun) else (False, None)
    if not answered:
        stored = None if isinstance(outermost, SecondRun) or outermost.frame.outer is not None else _stored(site)
        keep = None if isinstance(outermost, SecondRun) else outermost.frame.outer
        hooks = (stored.pack, stored.unpack) if stored is not None else keep or IN_PLACE
        try:
            output = _run_kept(around, hooks, site, function, args, kwargs, is_stored=stored is not None)
        except Exception:
            for run in first_runs:
                run.frame.holes.append(RaisedCall(site.name))
            raise
    with unseen(around[0]):
        if not answered and stored is not None:
            stored.seal()
        for run in first_runs:
            frame = run.frame
            frame.holes.append(HoleCall(site.name, output, frame, take_random_state(frame.devices)))
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
    return None if isinstance(site.store, DeviceStore) else StoredCall(site)


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
        site.note("its output is edited in place or differentiated by its parent, so it is recomputed")
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
