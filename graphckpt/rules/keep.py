"""Keeps everything, as the plain step does. Within a recomputed block, it excludes the child from recomputation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch

from graphckpt._compat import active_saved_tensor_hooks
from graphckpt.engine.block import BlockContext
from graphckpt.engine.call_state import set_rng_state
from graphckpt.engine.frame import (
    CallMismatch,
    Execution,
    Guard,
    Recomputation,
    modes_paused,
    running,
)
from graphckpt.engine.mismatch import excluded_differ
from graphckpt.engine.objects import copy_objects, differs
from graphckpt.engine.saved import KEEP_ON_DEVICE, StoredCall, are_mutated, hooks_around, versions_of
from graphckpt.rules.base import Rule
from graphckpt.stores.base import DeviceStore
from graphckpt.tree import flatten_call


@final
@dataclass(frozen=True)
class Keep(Rule):
    """Keeps every intermediate result. ``activation_checkpointing = False`` means this rule."""

    name: ClassVar[str] = "keep"

    def run(self, block: BlockContext, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs the block once; a recomputation of the block around it gets the same outputs."""
        return run_excluded(block, function, args, kwargs)

    def run_without_gradients(
        self, block: BlockContext, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Runs the block; a recomputation of the block around it does so again."""
        return run_excluded_without_gradients(block, function, args, kwargs)

    def graph_break(self, *, has_gradients: bool) -> str | None:
        """Returns ``None``: the block is a part of the graph, as without a rule."""
        del has_gradients
        return None


@final
class _Inputs:
    """The arguments of an excluded child, to find out whether its forward modifies them in place."""

    __slots__ = ("_objects", "_versions")

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        leaves, _ = flatten_call(args, kwargs)
        self._versions = versions_of(leaves)
        self._objects = copy_objects([*args, *kwargs.values(), *leaves])

    def mutated(self) -> list[torch.Tensor]:
        return [tensor for tensor, version in self._versions if tensor._version != version]

    def are_mutated(self) -> bool:
        return are_mutated(self._versions) or any(differs(owner, then) for owner, then in self._objects)


def run_excluded(block: BlockContext, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs an excluded child; outside of a recomputed block this is a plain call.

    Blocks may nest: the child is excluded from every block around it, up to the one that is being recomputed.
    """
    runs = _runs_around(running.get())
    if not runs:
        return _run_alone(block, function, args, kwargs)
    outermost = runs[-1]
    originals = runs[:-1] if isinstance(outermost, Recomputation) else runs
    inputs = stored = None
    with modes_paused(runs[0]):  # copies of a store, or of hooks, are no ops of the block
        answered, output = _ask(outermost, block) if isinstance(outermost, Recomputation) else (False, None)
    if not answered:
        stored = (
            None if isinstance(outermost, Recomputation) or outermost.frame.outer_hooks is not None else _stored(block)
        )
        keep = None if isinstance(outermost, Recomputation) else outermost.frame.outer_hooks
        hooks = (stored.pack, stored.unpack) if stored is not None else keep or KEEP_ON_DEVICE
        inputs = _Inputs(args, kwargs) if originals else None
        try:
            output = _run_kept(runs, hooks, block, function, args, kwargs, is_stored=stored is not None)
        except Exception:
            with modes_paused(runs[0]):
                _drop_mutated(originals, inputs)
            for run in originals:
                run.frame.add_excluded(block, None, is_repeated=True)
            raise
    with modes_paused(runs[0]):
        if stored is not None:
            stored.seal()
        is_repeated = _drop_mutated(originals, inputs)
        for frame in (run.frame for run in originals):
            frame.add_excluded(block, output, is_repeated=is_repeated)
    return output


def _drop_mutated(originals: list[Execution], inputs: _Inputs | None) -> bool:
    """Drops the kept results of the blocks around that the child has modified. Returns whether it has."""
    if inputs is None or not inputs.are_mutated():
        return False
    for run in originals:
        if run.frame.contexts is not None:
            run.frame.contexts.drop_mutated_outside(inputs.mutated())
    return True


def run_excluded_without_gradients(
    block: BlockContext, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Runs an excluded child with autograd off. The recomputation does so again, as it keeps nothing.

    With buffers, it is noted: the other calls must be repeated too, for it must find the buffers as they leave them.
    """
    runs = _runs_around(running.get())
    if runs and block.state.buffer_ids():
        for run in runs:
            if isinstance(run, Recomputation):
                run.excluded_cursor += 1
            else:
                run.frame.add_excluded(block, None, is_repeated=True)
    return function(*args, **kwargs)


def _run_alone(block: BlockContext, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs a block that is in no recomputed block: what it saves goes to its store."""
    if not block.is_placed and block.recorder is None:
        return function(*args, **kwargs)
    hooks: Any = active_saved_tensor_hooks()
    if hooks is not None and hooks_around(block, hooks) is not None:
        if block.is_placed:
            block.note("saved_tensors_hooks are active around it: its saved tensors go to them, not to its store")
        return function(*args, **kwargs)
    stored = _stored(block)
    hooks = KEEP_ON_DEVICE if stored is None else (stored.pack, stored.unpack)
    output = _run_kept([], hooks, block, function, args, kwargs, is_stored=stored is not None)
    if stored is not None:
        stored.seal()
    return output


def _stored(block: BlockContext) -> StoredCall | None:
    return None if isinstance(block.store, DeviceStore) else StoredCall(block)


def _runs_around(run: Execution | None) -> list[Execution]:
    runs = []
    while run is not None:
        runs.append(run)
        if isinstance(run, Recomputation):
            break
        run = run.outer
    return runs


def _ask(run: Recomputation, block: BlockContext) -> tuple[bool, Any]:
    frame = run.frame
    position = run.excluded_cursor
    run.excluded_cursor += 1
    call = frame.excluded[position] if position < len(frame.excluded) else None
    if call is None or call.name != block.name:
        raise excluded_differ(frame.block.title, call.name if call else None, block.name)
    answered, output = call.answer()
    if answered:
        set_rng_state(call.random)
    else:
        before = [each for each in frame.excluded[:position] if each.buffer_ids and not each.is_repeated]
        if before and call.buffer_ids:  # which it must find as they have left them
            for each in frame.excluded:
                each.repeat()
            raise CallMismatch
        block.note("it is recomputed: it modifies its arguments or sets attributes, or its parent modifies its output")
    return answered, output


def _run_kept(
    runs: list[Execution],
    keep: tuple[Any, Any],
    block: BlockContext,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    is_stored: bool = False,
) -> Any:
    recorder = block.recorder
    if recorder is not None:
        keep = recorder.original_forward_began(block.name, *keep, is_kept=True, is_stored=is_stored)
    try:
        # what runs in here belongs to no recomputed block
        with Guard(None, *keep), modes_paused(runs[0] if runs else None):
            return function(*args, **kwargs)
    finally:
        if recorder is not None:
            recorder.original_forward_ended(block.name)
