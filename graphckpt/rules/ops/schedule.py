"""What the calls of a block have in common, op by op: learnt from one forward, followed by those like it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeAlias, final

import torch

from graphckpt._compat import WithoutValues, pytree
from graphckpt.rules.ops.op_graph import Kind

if TYPE_CHECKING:
    from graphckpt.rules.ops.op_graph import Op, OpCall, OpGraph

Key: TypeAlias = "tuple[Op, int]"
"""An op, and how often it has been called before in the block."""

Policy: TypeAlias = Callable[[Any, Any, Any, dict[str, Any], int], bool]
"""Called with an op's result, the op, its arguments, and how often it was called before in the block."""


@final
@dataclass(frozen=True, slots=True)
class NamedOps:
    """The policy that keeps what is named."""

    whole: Collection[Op]
    """Ops of which all results are kept."""
    some: Mapping[Op, Collection[int]] = field(default_factory=dict)
    """Ops of which those with some numbers are."""
    words: Mapping[str, Collection[Op]] = field(default_factory=dict)
    """What a user has named one by one, and the ops that each word means."""

    def __call__(self, output: Any, func: Op, args: Any, kwargs: dict[str, Any], number: int) -> bool:
        """Returns whether the result is named."""
        return func in self.whole or number in self.some.get(func, ())

    def missed(self, ops: Collection[Op]) -> list[str]:
        """Returns the words for which none of ``ops`` stands."""
        return [word for word, meant in self.words.items() if not any(op in ops for op in meant)]


class Action(Enum):
    """What a second run does where an op is called."""

    RUN = "run"
    CACHED = "hand back"
    SKIP = "leave out"


@final
@dataclass(slots=True)
class OpSchedule:
    """The ops of a block's forward in order, and what a second run does with each."""

    ops: list[Op]
    keys: list[Key]
    acts: list[Action]
    skipped: dict[int, OpCall]
    num_saved: int
    """Tensors that autograd saves."""
    is_of_use: bool = True
    """``False``: it did not hold, or there is nothing to follow."""

    def is_like(self, position: int, output: Any) -> bool:
        """Returns whether an op that a second run will leave out has returned the same as when this was learnt."""
        call = self.skipped[position]
        if call.spec is None:
            return bool(call.outputs[0] == Kind.of(output))
        leaves, spec = pytree.tree_flatten(output)
        return spec == call.spec and all(map(_is_same, leaves, call.outputs))

    def without_values(self, position: int, args: Any) -> Any:
        """Returns what an op that is left out has returned, with no values in it."""
        call = self.skipped[position]
        if call.edits:
            return args[0]
        leaves = [WithoutValues.like(kind) if isinstance(kind, Kind) else kind for kind in call.outputs]
        return leaves[0] if call.spec is None else pytree.tree_unflatten(leaves, call.spec)


def learn(log: OpGraph, kept: set[Key], num_saved: int) -> OpSchedule:
    """Returns what follows from one forward.

    Args:
        log: its ops.
        kept: those whose results can be outputs back.
        num_saved: tensors that autograd saves.
    """
    keys = [(call.func, call.number) for call in log.calls]
    needed = log.needed(lambda call: (call.func, call.number) in kept)
    schedule = OpSchedule([call.func for call in log.calls], keys, [], {}, num_saved)
    for position, call in enumerate(log.calls):
        is_late = position >= log.num_saving  # no second run comes this far
        if call.is_view:
            is_idle = any(schedule.acts[maker] is Action.SKIP for maker in call.inputs)
        else:
            is_idle = position not in needed
        if keys[position] in kept and not (is_idle or is_late):
            schedule.acts.append(Action.CACHED)
        elif is_idle or is_late:
            schedule.acts.append(Action.SKIP)
            schedule.skipped[position] = call
        else:
            schedule.acts.append(Action.RUN)
    return schedule


def _is_same(leaf: Any, known: Any) -> bool:
    return bool((Kind.of(leaf) if isinstance(leaf, torch.Tensor) else leaf) == known)
