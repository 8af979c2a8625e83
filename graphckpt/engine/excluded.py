"""Excluded children of a recomputed block: they run once, and the recomputation takes their outputs from here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import torch
from torch import nn

from graphckpt._compat import active_saved_tensor_hooks, pop_saved_tensor_hooks, push_saved_tensor_hooks
from graphckpt.engine import mismatch
from graphckpt.engine.block import BlockContext
from graphckpt.engine.call_state import CallState, ModuleState, has_changed
from graphckpt.engine.execution import (
    Execution,
    Frame,
    Recomputation,
    engine_ops,
    innermost,
    put_surroundings_back,
    running,
    surroundings,
)
from graphckpt.engine.objects import copy_objects, differs
from graphckpt.engine.saved import (
    Call,
    StoredCall,
    are_mutated,
    class_of,
    has_attributes,
    hooks_around,
    save_tensor,
    take_all,
    versions_of,
)
from graphckpt.errors import RecomputeError
from graphckpt.stores.base import KEEP_ON_DEVICE, without_records
from graphckpt.thread_state import RNGState, set_rng_state
from graphckpt.tree import build_value, flatten_call, flatten_value

# Note [The log of excluded children]
#
# A call of an excluded child is logged with its output, and with the state of its modules after it: buffers,
# attributes and what these hold, as `ModuleState.take` copies them. The recomputation puts both in place, so that
# what comes behind finds all as in the original forward. That holds for a call that it has to repeat too, whatever the
# calls before it were: each has left its own state.


def _state_after(block: BlockContext, frames: Iterable[Frame]) -> tuple[ModuleState, CallState]:
    """Returns the state of the modules of an excluded child after its call, within the calls ``frames``."""
    # Of these a block around has a clone from before the child, which its recomputation puts in place.
    copies = {
        id(each.tensors[index]): (each, index) for each in (f.call_state for f in frames) for index in each.copies
    }

    def has_moved(tensor: torch.Tensor) -> bool:
        # A first call has cloned all, and must compare. A later one has cloned what moves, or is cheap to clone.
        before, index = copies.get(id(tensor), (None, 0))
        return before is not None and (not before.is_first or has_changed(before, index))

    return block.take(has_moved=has_moved)


@final
class ExcludedCall:
    """One call of an excluded child ``block`` within ``call``: the recomputation takes its outputs from here.

    It repeats the call where that has raised, has modified its arguments in place, or cannot be answered from here.
    """

    __slots__ = ("_handles", "_leaves", "_spec", "_state", "_versions", "block", "random", "why_repeated")

    def __init__(
        self,
        block: BlockContext,
        output: Any,
        call: Call,
        random: RNGState,
        state: tuple[ModuleState, CallState] | None,
        *,
        why_repeated: str | None = None,
    ) -> None:
        self.block = block
        self.random = random  # after the call: an answered call draws nothing, and what follows must draw as in forward
        leaves, self._spec = flatten_value(output)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if why_repeated is None and any(isinstance(t, nn.Parameter) or has_attributes(t) for t in tensors):
            why_repeated = "it returns a parameter, or a tensor with attributes"  # an answer would be another object
        self.why_repeated = why_repeated
        """Why the recomputation repeats the call, as ``explain()`` shows it; ``None`` if it takes the output."""
        self._leaves: list[Any] = []
        """Of the output."""
        self._state = state  # after the call; `None` within a recomputation, where nothing asks for it
        self._handles: list[Any] = []
        self._versions: list[tuple[torch.Tensor, int]] = []
        if why_repeated is not None:
            return

        title = call.block.title

        def refuse(_: Any) -> None:
            raise RecomputeError(mismatch.runs_backward(title))

        # A backward within the forward of the block around, through the child alone, reaches none of its holders.
        self._handles = [t.grad_fn.register_prehook(refuse) for t in tensors if t.grad_fn is not None]
        # Of the parent's ops alone: what comes behind the block is seen by `take_all`, when backward asks.
        # Detached tensors share the version counters, and do not hold the graph, which holds this.
        self._versions = [(tensor.detach(), version) for tensor, version in versions_of(tensors)]
        self._leaves = [save_tensor(x, call, class_of(x)) if isinstance(x, torch.Tensor) else x for x in leaves]

    @property
    def num_hooks(self) -> int:
        """How many hooks it has registered that :meth:`remove_hooks` has not removed yet."""
        return len(self._handles)

    def after_forward(self) -> None:
        """Notes what the parent has done since."""
        if are_mutated(self._versions):
            self.why_repeated = "its parent modifies its output in place"
            self._leaves = []
        self._versions = []

    def remove_hooks(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def answer(self, run: Recomputation) -> tuple[bool, Any]:
        """Returns ``(True, output)``, or ``(False, None)`` if the child has to be recomputed after all."""
        leaves = None if self.why_repeated else take_all(self._leaves)
        if leaves is None or self._state is None:
            return False, None
        # A large tensor that no clone exists of may have changed since: the call that is repeated makes it again. Not a
        # parameter, which only the child reads: an optimizer may have stepped once backward was through it.
        state, after = self._state
        if state.mutated(after, [id(each) for each in after.tensors[: len(after.trainable)]]) is not None:
            return False, None
        run.borrow(state.put_in_place(after, run.frame.stand_in, run.undo, is_of_child=True))
        return True, build_value(self._spec, leaves)


def run_excluded(block: BlockContext, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs an excluded child; outside of a recomputed block this is a plain call.

    Blocks may nest: the child is excluded from every block around it, up to the one that is being recomputed.
    """
    # executions around, innermost first        the child                what it saves goes to       logged in
    # none                                      runs                     its store                   -
    # original forward of A                     runs                     hooks that A has entered,   A
    #                                                                    or those around A, or
    #                                                                    else its store
    # original forward of B, in that of A       runs                     likewise                    B and A
    # recomputation of A                        is answered from the     -                           -
    #                                           log of A, or repeated    a graph that is freed       -
    # original forward of B, in the             likewise                 likewise                    B, a new frame
    # recomputation of A
    #
    # In the second and third case each of the frames logs the call, as it may be recomputed by itself.
    runs = _runs_around()
    if not runs:
        return _run_alone(block, function, args, kwargs)
    outermost, originals = runs[-1], [run.frame for run in runs if not isinstance(run, Recomputation)]
    with engine_ops():  # copies of a store, or of hooks, are no ops of the block
        is_answered, output = _answer(outermost, block) if isinstance(outermost, Recomputation) else (False, None)
        inputs = [*args, *kwargs.values()] if originals and not is_answered else []
        # The arguments and their leaves: the child may modify a list itself, or the tensors in it, which `mutated`
        # names.
        inputs += flatten_call(args, kwargs)[0] if inputs else []
        versions, objects = versions_of(inputs), copy_objects(inputs)
    is_done = is_answered
    try:
        if not is_answered:
            # In a recomputation, the tensors that the child saves are never read: backward reads those of the original
            # forward. So neither its store nor hooks get them. With the hooks of the recomputation they would fill the
            # holders of other ops.
            hooks = KEEP_ON_DEVICE if isinstance(outermost, Recomputation) else _hooks_around(block, originals)
            output = _run_with_hooks(hooks, block, function, args, kwargs)
            is_done = True
    finally:
        # Also where the child has raised, which forward may catch: a recomputation finds calls by their positions.
        with engine_ops():
            mutated = [tensor for tensor, version in versions if tensor._version != version]
            why = None if is_done else "it raises an error"
            if mutated or any(differs(owner, then) for owner, then in objects):
                why = why or "it modifies its arguments"
            elif isinstance(output, torch.Tensor) and any(output is each for each in inputs):
                why = why or "it returns its argument"  # which the block may test: `if y is x`
            is_repeated = why is not None or isinstance(outermost, Recomputation)
            state = None if is_repeated else _state_after(block, originals)
            for frame in originals:
                if mutated and frame.contexts is not None:
                    frame.contexts.drop_mutated(mutated)
                call = ExcludedCall(block, output, frame, frame.rng_state(), state, why_repeated=why)
                frame.excluded.append(call)
    return output


def _run_alone(block: BlockContext, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs a block that is in no recomputed block: what it saves goes to its store."""
    if not block.is_placed and block.recorder is None:
        return function(*args, **kwargs)
    if block.is_placed:
        hooks = active_saved_tensor_hooks()
        if hooks is None or hooks_around(block, hooks) is None:
            return _run_with_hooks(None, block, function, args, kwargs)
        block.note("saved_tensors_hooks are active around it: its saved tensors go to them, not to its store")
    with block.run_in_record():
        return function(*args, **kwargs)


def run_kept_part(block: BlockContext, function: Callable[..., Any], argument: Any) -> Any:
    """Runs a part of a block that is kept. If a block around it is recomputed, the part belongs to that one."""
    return _run_alone(block, function, (argument,), {}) if innermost() is None else function(argument)


def _runs_around() -> list[Execution]:
    """Returns the executions that are going on in this thread, from the innermost up to one for a recomputation."""
    runs: list[Execution] = []
    run = innermost()
    while run is not None:
        runs.append(run)
        run = None if isinstance(run, Recomputation) else run.outer
    return runs


def _hooks_around(block: BlockContext, frames: Iterable[Frame]) -> Any:
    """Returns the saved-tensor hooks that get what an excluded child saves; ``None`` if its store does.

    They are the innermost ones of the program: those that one of the blocks has entered, such as ``save_on_cpu``, or
    else those around the outermost block.
    """
    hooks = without_records(active_saved_tensor_hooks())
    for frame in frames:
        if hooks is None or hooks[0] is not frame.own_pack:
            if block.is_placed:
                block.note("saved_tensors_hooks are active around it: its saved tensors go to them, not to its store")
            return hooks
        hooks = frame.outer_hooks
    return hooks


def _answer(run: Recomputation, block: BlockContext) -> tuple[bool, Any]:
    """Returns the output of the next excluded child, if the recomputation need not repeat the call."""
    frame = run.frame
    position = run.excluded_cursor
    run.excluded_cursor += 1
    call = frame.excluded[position] if position < len(frame.excluded) else None
    if call is None or call.block.name != block.name:
        raise mismatch.excluded_differ(frame.block.title, call.block.name if call else None, block.name)
    is_answered, output = call.answer(run)
    if is_answered:
        set_rng_state(call.random)
        return True, output
    block.note(f"it is recomputed: {call.why_repeated or 'its output was modified in place'}")
    return False, None


def _run_with_hooks(
    hooks: Any, block: BlockContext, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Runs a block that belongs to no recomputed block. ``hooks`` get what it saves; with ``None``, its store does."""
    stored = StoredCall(block) if hooks is None and not block.keeps_on_device else None
    keep = (stored.pack, stored.unpack) if stored is not None else hooks or KEEP_ON_DEVICE
    recorder = block.recorder
    if recorder is not None:
        keep = recorder.original_forward_began(block.name, *keep, is_kept=True, is_stored=stored is not None)
    before = surroundings()
    try:
        # A block in it belongs to none around it: it is recomputed by itself, and its modes act. See `_ModesPaused`.
        with engine_ops():
            running.set(None)
            push_saved_tensor_hooks(*keep)
            try:
                return function(*args, **kwargs)
            finally:
                pop_saved_tensor_hooks()
                running.set(before[0])
                if recorder is not None:
                    recorder.original_forward_ended(block.name)
                if stored is not None:
                    block.store.close_group(stored.group)
    except BaseException:
        put_surroundings_back(before)
        raise
