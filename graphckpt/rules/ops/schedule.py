"""Op schedules: the ops of a block in order, and what the recomputation does with each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias, final

import torch

from graphckpt._compat import WithoutValues, pytree
from graphckpt._compat_autocast import computes_alike
from graphckpt.rules.ops.op_graph import CAST, METADATA_ONLY_OPS, Op, OpCall, OpGraph, TensorMeta

Key: TypeAlias = "tuple[Op, int]"
"""An op, and how often it has been called before in the block."""

Policy: TypeAlias = Callable[[Any, Any, Any, dict[str, Any], int], bool]
"""Called with an op's result, the op, its arguments, and how often it was called before in the block."""


@final
@dataclass(frozen=True, slots=True)
class NamedOps:
    """The policy that keeps the results of named ops."""

    whole: Collection[Op]
    """Ops of which every result is kept."""
    numbered: Mapping[Op, Collection[int]] = field(default_factory=dict)
    """Ops of which the results with these numbers are kept."""
    names: Mapping[str, tuple[Collection[Op], Collection[int] | None]] = field(default_factory=dict)
    """The names that the user has given, the ops that each means, and which of their results, if not all."""

    def __call__(self, output: Any, func: Op, args: Any, kwargs: dict[str, Any], number: int) -> bool:
        """Returns whether the result is named."""
        return func in self.whole or number in self.numbered.get(func, ())

    def missing(self, keys: Collection[Key]) -> list[str]:
        """Returns the names that mean a result which is not among ``keys``, or none of them."""
        missing = []
        for name, (ops, numbers) in self.names.items():
            found = {number for op, number in keys if op in ops}
            if not found or (numbers is not None and not found.issuperset(numbers)):
                missing.append(name)
        return missing


class Action(Enum):
    """What a recomputation does with an op."""

    RUN = "run"
    CACHED = "cached"
    SKIP = "skip"


@final
@dataclass(slots=True)
class OpSchedule:
    """The ops of a block's forward in order, and what a recomputation does with each."""

    ops: list[Op]
    keys: list[Key]
    actions: list[Action]
    skipped: dict[int, OpCall]
    num_saved: int
    """How many tensors autograd saves."""
    plain: list[Op | None] = field(default_factory=list)
    """The ops again, where both executions call them and need to know no more of them; ``None`` for the others."""
    is_valid: bool = True
    """``False``: calls did not follow it, or not all ops of the block are visible."""

    def is_like(self, position: int, output: Any) -> bool:
        """Whether an op that the recomputation will skip has returned what it did when this was recorded."""
        call = self.skipped[position]
        if call.spec is None:
            return bool(call.outputs[0] == TensorMeta.of(output))
        leaves, spec = pytree.tree_flatten(output)
        return spec == call.spec and all(map(_is_same, leaves, call.outputs))

    def without_values(self, position: int, args: Any) -> Any:
        """Returns the result of a skipped op, as tensors without values."""
        call = self.skipped[position]
        if call.mutates:
            return args[0]
        leaves = [WithoutValues.like(meta) if isinstance(meta, TensorMeta) else meta for meta in call.outputs]
        return leaves[0] if call.spec is None else pytree.tree_unflatten(leaves, call.spec)


def make_schedule(graph: OpGraph, kept: set[Key], num_saved: int) -> OpSchedule:
    """Returns the schedule that follows from one forward.

    Args:
        graph: Its ops.
        kept: The ops whose results are kept.
        num_saved: How many tensors autograd saves.
    """
    keys = [(call.func, call.number) for call in graph.calls]
    needed = graph.needed(lambda call: (call.func, call.number) in kept)
    schedule = OpSchedule([call.func for call in graph.calls], keys, [], {}, num_saved)
    for position, call in enumerate(graph.calls):
        is_late = position >= graph.num_saving  # no recomputation comes this far
        if call.is_view:
            is_unused = any(schedule.actions[producer] is Action.SKIP for producer in call.inputs)
        else:
            is_unused = position not in needed
        if keys[position] in kept and not (is_unused or is_late):
            schedule.actions.append(Action.CACHED)
        elif is_unused or is_late:
            schedule.actions.append(Action.SKIP)
            schedule.skipped[position] = call
        else:
            schedule.actions.append(Action.RUN)
        schedule.plain.append(call.func if schedule.actions[position] is Action.RUN and _is_plain(call.func) else None)
    return schedule


def _is_plain(func: Op) -> bool:
    schema = getattr(func, "_schema", None)
    if schema is None or schema.is_mutable or func is CAST or func in METADATA_ONLY_OPS:
        return False
    return computes_alike(func)


def _is_same(leaf: Any, known: Any) -> bool:
    return bool((TensorMeta.of(leaf) if isinstance(leaf, torch.Tensor) else leaf) == known)
