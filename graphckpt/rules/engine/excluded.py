"""Excluded children: children of a recomputed block that are not recomputed, as their outputs are kept."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import nn

from graphckpt._compat import WithoutValues
from graphckpt.errors import MutatedError, RecomputeError
from graphckpt.rules.engine.argument import TensorKind, has_attributes
from graphckpt.rules.engine.context import BlockContext
from graphckpt.rules.engine.execution import (
    CallMismatch,
    ChildCall,
    Execution,
    RecomputableCall,
    Recomputation,
    modes_paused,
    running,
)
from graphckpt.rules.engine.guard import Guard
from graphckpt.rules.engine.mismatch import excluded_differ, runs_backward
from graphckpt.rules.engine.saved import SavedTensor, are_mutated, versions_of
from graphckpt.rules.engine.saved_hooks import KEEP_ON_DEVICE, StoredCall, hooks_around
from graphckpt.state.rng import set_rng_state
from graphckpt.state.values import Snapshot, copy_objects
from graphckpt.stores.device import DeviceStore
from graphckpt.tree import build_value, flatten_call, flatten_value
from graphckpt.undo import differs


@final
class ExcludedCall:
    """One call of an excluded child: the recomputation takes its outputs from here, or repeats it.

    Args:
        block: The child.
        output: What it has returned.
        frame: The call of the block around it.
        is_repeated: Whether the recomputation repeats the call, as it raised or has modified its arguments in place.
    """

    __slots__ = ("_block", "_handles", "_leaves", "_spec", "_versions", "is_repeated", "random")

    def __init__(self, block: BlockContext, output: Any, frame: RecomputableCall, *, is_repeated: bool = False) -> None:
        self._block = block
        self.random = frame.rng_state()
        leaves, self._spec = flatten_value(output)
        self.is_repeated: bool = is_repeated or any(map(_is_special, leaves))
        if self.is_repeated:
            leaves = []
        self._handles = [_watch_node(leaf, frame) for leaf in leaves if _has_history(leaf)]
        self._versions = [(tensor.detach(), version) for tensor, version in versions_of(leaves)]
        self._leaves = [_Output(leaf, frame) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    @property
    def name(self) -> str:
        """Path of the child."""
        return self._block.name

    @property
    def buffer_ids(self) -> set[int]:
        """The ids of the child's buffers."""
        return self._block.state.buffer_ids()

    @property
    def parameter_ids(self) -> set[int]:
        """The ids of the child's parameters."""
        return {id(tensor) for tensor in self._block.tensors() if isinstance(tensor, nn.Parameter)}

    def decide(self, snapshot: Snapshot) -> None:
        """Decides whether the recomputation can take the outputs from here.

        It cannot where the parent has modified one in place, and where the child sets attributes of its modules, which
        the parent may read.
        """
        attributes = {id(place.owner) for place, _ in snapshot.changed if not place.in_place}
        if are_mutated(self._versions) or (attributes and not attributes.isdisjoint(self._block.state.attribute_ids())):
            self.repeat()

    def repeat(self) -> None:
        """Drops the outputs: the recomputation repeats the call."""
        self.is_repeated = True
        self._leaves = []

    def after_forward(self) -> None:
        """Drops what is needed only during the original forward."""
        self._versions = []
        while self._handles:
            self._handles.pop().remove()

    def answer(self) -> tuple[bool, Any]:
        """Returns ``(True, output)``, or ``(False, None)`` if the child has to be recomputed after all."""
        if self.is_repeated:
            return False, None
        leaves = []
        for leaf in self._leaves:
            if isinstance(leaf, _Output):
                tensor = leaf.take()
                if tensor is None:
                    return False, None
                leaves.append(tensor)
            else:
                leaves.append(leaf)
        set_rng_state(self.random)
        return True, build_value(self._spec, leaves)


@final
class _Output:
    """A tensor that an excluded child has returned."""

    __slots__ = ("_kept", "_kind")

    def __init__(self, tensor: torch.Tensor, frame: RecomputableCall) -> None:
        self._kept = SavedTensor(tensor, frame, frame.outer_hooks)
        self._kind = TensorKind.of(tensor)

    def take(self) -> torch.Tensor | None:
        """Returns the tensor, with a history if it had one; ``None`` if it was modified in place since."""
        tensor = self._kept.take()
        return None if tensor is None else self._kind.apply_to(tensor.detach())


@final
class UnreadParameter(WithoutValues):
    """Stands for a parameter of an excluded child that was modified since: the recomputation must not read it."""

    message: str

    @classmethod
    def of(cls, parameter: torch.Tensor, message: str) -> UnreadParameter:
        """Returns one that raises a :class:`MutatedError` with ``message`` when an op reads it."""
        kind = parameter.size(), parameter.stride(), parameter.storage_offset(), parameter.dtype, parameter.device
        stand_in = cls.like(kind)
        stand_in.message = message
        return stand_in

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuses every op."""
        leaves, _ = flatten_call(args, kwargs or {})
        raise MutatedError(next(leaf.message for leaf in leaves if isinstance(leaf, UnreadParameter)))


def unread_parameters(calls: Sequence[ChildCall]) -> frozenset[int]:
    """Returns the ids of the parameters of excluded children whose calls are not repeated."""
    return frozenset().union(*(call.parameter_ids for call in calls if not call.is_repeated))


def decide(calls: Sequence[ChildCall], snapshot: Snapshot) -> None:
    """Decides which calls of excluded children a recomputation repeats.

    If it repeats one whose child has buffers, it repeats all of those: each must find the buffers as the ones before it
    have left them.
    """
    for call in calls:
        call.decide(snapshot)
    if any(call.is_repeated and call.buffer_ids for call in calls):
        for call in calls:
            if call.buffer_ids:
                call.repeat()


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


def _is_special(leaf: Any) -> bool:
    """Whether code may depend on which object a tensor is: the recomputation gets another one."""
    return isinstance(leaf, torch.Tensor) and (isinstance(leaf, nn.Parameter) or has_attributes(leaf))


def _has_history(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None


def _watch_node(tensor: torch.Tensor, frame: RecomputableCall) -> Any:
    """Refuses a backward within the forward of ``frame`` that reaches the ``grad_fn`` of ``tensor``."""
    found = weakref.ref(frame)

    def note(_: Any) -> None:
        frame = found()
        if frame is not None:
            raise RecomputeError(runs_backward(frame.block.title))

    return tensor.grad_fn.register_prehook(note)  # type: ignore[union-attr]


def run_excluded(block: BlockContext, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs an excluded child; outside of a recomputed block this is a plain call.

    Blocks may nest: the child is excluded from every block around it, up to the one that is being recomputed.
    """
    around = _runs_around(running.get())
    if not around:
        return _run_alone(block, function, args, kwargs)
    outermost = around[-1]
    originals = around[:-1] if isinstance(outermost, Recomputation) else around
    inputs = stored = None
    with modes_paused(around[0]):  # copies of a store, or of hooks, are no ops of the block
        answered, output = _ask(outermost, block) if isinstance(outermost, Recomputation) else (False, None)
    if not answered:
        stored = (
            None if isinstance(outermost, Recomputation) or outermost.frame.outer_hooks is not None else _stored(block)
        )
        keep = None if isinstance(outermost, Recomputation) else outermost.frame.outer_hooks
        hooks = (stored.pack, stored.unpack) if stored is not None else keep or KEEP_ON_DEVICE
        inputs = _Inputs(args, kwargs) if originals else None
        try:
            output = _run_kept(around, hooks, block, function, args, kwargs, is_stored=stored is not None)
        except Exception:
            with modes_paused(around[0]):
                _drop_mutated(originals, inputs)
            for run in originals:
                run.frame.excluded.append(ExcludedCall(block, None, run.frame, is_repeated=True))
            raise
    with modes_paused(around[0]):
        if stored is not None:
            stored.seal()
        is_repeated = _drop_mutated(originals, inputs)
        for frame in (run.frame for run in originals):
            frame.excluded.append(ExcludedCall(block, output, frame, is_repeated=is_repeated))
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
    around = _runs_around(running.get())
    if around and block.present_state().buffer_ids():
        for run in around:
            if isinstance(run, Recomputation):
                run.excluded_cursor += 1
            else:
                run.frame.excluded.append(ExcludedCall(block, None, run.frame, is_repeated=True))
    return function(*args, **kwargs)


def _run_alone(block: BlockContext, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs a block that is in no recomputed block: what it saves goes to its store."""
    if not block.is_placed and block.recorder is None:
        return function(*args, **kwargs)
    if hooks_around(block) is not None:
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
    return None if isinstance(block.store, DeviceStore) else StoredCall(block, block.open_group())


def _runs_around(run: Execution | None) -> list[Execution]:
    around = []
    while run is not None:
        around.append(run)
        if isinstance(run, Recomputation):
            break
        run = run.outer
    return around


def _ask(run: Recomputation, block: BlockContext) -> tuple[bool, Any]:
    frame = run.frame
    position = run.excluded_cursor
    run.excluded_cursor += 1
    call = frame.excluded[position] if position < len(frame.excluded) else None
    if call is None or call.name != block.name:
        raise excluded_differ(frame.block.title, call.name if call else None, block.name)
    answered, output = call.answer()
    if not answered:
        before = [each for each in frame.excluded[:position] if each.buffer_ids and not each.is_repeated]
        if before and call.buffer_ids:  # which it must find as they have left them
            for each in frame.excluded:
                each.repeat()
            raise CallMismatch
        block.note("it is recomputed: it modifies its arguments or sets attributes, or its parent modifies its output")
    return answered, output


def _run_kept(
    around: list[Execution],
    keep: tuple[Any, Any],
    block: BlockContext,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    is_stored: bool = False,
) -> Any:
    recorder = block.recorder
    pack = keep[0] if recorder is None else recorder.stored_forward_began(block.name, keep[0], is_stored=is_stored)
    try:
        # what runs in here belongs to no recomputed block
        with Guard(None, pack, keep[1]), modes_paused(around[0] if around else None):
            return function(*args, **kwargs)
    finally:
        if recorder is not None:
            recorder.stored_forward_ended(block.name)
