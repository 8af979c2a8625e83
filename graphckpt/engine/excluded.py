"""Children that are excluded from the recomputation of the block around them: it gets their outputs in place of a call.

Blocks that run outside of every recomputed block are a case of this: what they save goes to their store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from graphckpt._compat import active_saved_tensor_hooks
from graphckpt.engine import mismatch
from graphckpt.engine.block import BlockContext
from graphckpt.engine.frame import CallMismatch, Execution, ExecutionScope, Recomputation, modes_paused, running
from graphckpt.engine.objects import copy_objects, differs
from graphckpt.engine.saved import ExcludedCall, StoredCall, hooks_around, versions_of
from graphckpt.stores.base import KEEP_ON_DEVICE, DeviceStore
from graphckpt.thread_state import set_rng_state
from graphckpt.tree import flatten_call


def run_excluded(block: BlockContext, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs an excluded child; outside of a recomputed block this is a plain call.

    Blocks may nest: the child is excluded from every block around it, up to the one that is being recomputed.
    """
    runs = _runs_around()
    if not runs:
        return _run_alone(block, function, args, kwargs)
    outermost, originals = runs[-1], [run.frame for run in runs if not isinstance(run, Recomputation)]
    with modes_paused:  # copies of a store, or of hooks, are no ops of the block
        is_answered, output = _answer(outermost, block) if isinstance(outermost, Recomputation) else (False, None)
        inputs = [*args, *kwargs.values()] if originals and not is_answered else []
        inputs += flatten_call(args, kwargs)[0] if inputs else []
        versions, objects = versions_of(inputs), copy_objects(inputs)
    is_done = is_answered
    try:
        if not is_answered:
            hooks = KEEP_ON_DEVICE if isinstance(outermost, Recomputation) else outermost.frame.outer_hooks
            output = _run_kept(hooks, block, function, args, kwargs)
            is_done = True
    finally:
        with modes_paused:
            mutated = [tensor for tensor, version in versions if tensor._version != version]
            is_repeated = not is_done or bool(mutated) or any(differs(owner, then) for owner, then in objects)
            for frame in originals:
                if mutated and frame.contexts is not None:
                    frame.contexts.drop_mutated(mutated)
                frame.excluded.append(ExcludedCall(block, output, frame, frame.rng_state(), is_repeated=is_repeated))
    return output


def run_excluded_without_gradients(
    block: BlockContext, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Runs an excluded child with autograd off. The recomputation does so again, as it keeps nothing.

    With buffers, it is noted: the other calls must be repeated too, for it must find the buffers as they leave them.
    """
    for run in _runs_around() if block.state.buffer_ids() else ():
        if isinstance(run, Recomputation):
            run.excluded_cursor += 1
        else:
            run.frame.excluded.append(ExcludedCall(block, None, run.frame, run.frame.rng_state(), is_repeated=True))
    return function(*args, **kwargs)


def _run_alone(block: BlockContext, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs a block that is in no recomputed block: what it saves goes to its store."""
    if not block.is_placed and block.recorder is None:
        return function(*args, **kwargs)
    if block.is_placed:
        hooks = active_saved_tensor_hooks()
        if hooks is None or hooks_around(block, hooks) is None:
            return _run_kept(None, block, function, args, kwargs)
        block.note("saved_tensors_hooks are active around it: its saved tensors go to them, not to its store")
    with block.run_in_record():
        return function(*args, **kwargs)


def run_kept(block: BlockContext, function: Callable[..., Any], argument: Any) -> Any:
    """Runs a part of a block that is not recomputed, unless a block around it is."""
    return _run_alone(block, function, (argument,), {}) if running.get() is None else function(argument)


def _runs_around() -> list[Execution]:
    """Returns the executions that are going on in this thread, from the innermost up to one for a recomputation."""
    runs: list[Execution] = []
    run = running.get()
    while run is not None:
        runs.append(run)
        run = None if isinstance(run, Recomputation) else run.outer
    return runs


def _answer(run: Recomputation, block: BlockContext) -> tuple[bool, Any]:
    """Returns the output of the next excluded child, if the recomputation need not repeat the call."""
    frame = run.frame
    position = run.excluded_cursor
    run.excluded_cursor += 1
    call = frame.excluded[position] if position < len(frame.excluded) else None
    if call is None or call.block.name != block.name:
        raise mismatch.excluded_differ(frame.block.title, call.block.name if call else None, block.name)
    is_answered, output = call.answer()
    if is_answered:
        set_rng_state(call.random)
        return True, output
    before = [each for each in frame.excluded[:position] if each.buffer_ids() and not each.is_repeated]
    if before and call.buffer_ids():  # which it must find as they have left them
        for each in frame.excluded:
            each.repeat()
        raise CallMismatch
    block.note("it is recomputed: it modifies its arguments or sets attributes, or its parent modifies its output")
    return False, None


def _run_kept(
    hooks: Any, block: BlockContext, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Runs a block that belongs to no recomputed block. ``hooks`` get what it saves; with ``None``, its store does."""
    stored = StoredCall(block) if hooks is None and not isinstance(block.store, DeviceStore) else None
    keep = (stored.pack, stored.unpack) if stored is not None else hooks or KEEP_ON_DEVICE
    recorder = block.recorder
    if recorder is not None:
        keep = recorder.original_forward_began(block.name, *keep, is_kept=True, is_stored=stored is not None)
    with modes_paused:
        try:
            with ExecutionScope(None, *keep):
                return function(*args, **kwargs)
        finally:
            if recorder is not None:
                recorder.original_forward_ended(block.name)
            if stored is not None:
                block.store.close_group(stored.group)
