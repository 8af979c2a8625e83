"""Op schedules: the ops of a block in order, and what the recomputation does with each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import Any, NamedTuple, Self, TypeAlias, final

import torch

from graphckpt._compat import WithoutValues, is_fake, pytree
from graphckpt.engine.objects import mutated_by
from graphckpt.engine.saved import may_be_filled_later

Op: TypeAlias = Any
"""A ``torch._ops.OpOverload`` such as ``torch.ops.aten.mm.default``."""


class TensorMeta(NamedTuple):
    """The metadata of a tensor."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        return cls(tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device)


METADATA_ONLY_OPS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like",
        "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full",
    )
)  # fmt: skip
"""Factory ops that read the metadata of a tensor but not its values, as for a dropout mask."""

CAST = torch.ops.aten._to_copy.default

_COLLECTIVE_NAMESPACES = frozenset({"c10d", "c10d_functional", "_c10d_functional", "symm_mem"})


@final
@dataclass(slots=True)
class OpCall:
    """One op of the original forward. ``number`` counts the earlier calls of the same op."""

    func: Op
    number: int
    inputs: frozenset[int]
    """The earlier calls of the block whose results it reads; none if it reads only a size."""
    outputs: tuple[Any, ...]
    """The :class:`TensorMeta` of each tensor that it returns, and what else it returns."""
    spec: Any
    """Of the value that holds the outputs; ``None`` if it is one tensor."""
    mutates: bool = False
    """Whether it is an in-place op: it writes to its first argument alone and returns it."""
    is_view: bool = False
    must_run: bool = False
    """Whether it has side effects: writes to a tensor from outside the block, is a collective, returns no tensor."""
    is_random: bool = False
    is_mutated: bool = False
    """Whether a later op writes to a result of it."""
    is_read: bool = False
    """Whether another op reads a result of it."""
    num_bytes: int = 0
    """Bytes of its results, if they are new tensors."""

    @property
    def can_be_kept(self) -> bool:
        """Whether its results are new tensors, which stay as they are."""
        return not (self.is_view or self.mutates or self.must_run or self.is_mutated)


@final
@dataclass(slots=True)
class OpGraph:
    """The ops of one forward, in order."""

    calls: list[OpCall] = field(default_factory=list)
    saved: set[int] = field(default_factory=set)
    """The calls whose results autograd saves."""
    saved_bytes: int = 0
    """Bytes of these results."""
    num_saving: int = 0
    """The number of calls before the last tensor that autograd saves, where a recomputation ends."""
    is_complete: bool = True
    """Whether all ops of the block are in the graph. ``False`` with tensor subclasses such as DTensor, sparse tensors,
    higher-order ops or a recomputed block inside of it."""
    _saved_storages: set[int] = field(default_factory=set)
    _producer: dict[int, int] = field(default_factory=dict)  # by id of a storage: the call that has written it last

    def add(self, func: Op, number: int, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        schema = getattr(func, "_schema", None)
        given = list(_tensors(chain(args, kwargs.values())))
        leaves, spec = ([output], None) if isinstance(output, torch.Tensor) else pytree.tree_flatten(output)
        results = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if schema is None or not all(map(_is_plain, chain(given, results))):
            self.is_complete = False
            return
        producers = frozenset(m for t in given if (m := self._producer.get(id(t.untyped_storage()))) is not None)
        call = OpCall(func, number, producers, tuple(map(_meta, leaves)), spec)
        own = len(self.calls)
        if schema.is_mutable:
            written = list(mutated_by(func, args, kwargs))
            call.mutates = len(written) == 1 and written[0] is output and args[0] is output
            call.must_run = not call.mutates or id(output.untyped_storage()) not in self._producer
            for tensor in written:
                producer = self._producer.get(id(tensor.untyped_storage()))
                if producer is not None:
                    self.calls[producer].is_mutated = True
                self._producer[id(tensor.untyped_storage())] = own
        else:
            mine = {id(tensor.untyped_storage()) for tensor in given}
            call.is_view = any(id(result.untyped_storage()) in mine for result in results)
        call.is_random = torch.Tag.nondeterministic_seeded in func.tags
        call.must_run |= not results or func.namespace in _COLLECTIVE_NAMESPACES
        if call.can_be_kept:
            storages = {id(s := result.untyped_storage()): s for result in results}
            call.num_bytes = sum(storage.nbytes() for storage in storages.values())
            self._producer.update(dict.fromkeys(storages, own))
        if not call.is_view:
            for producer in producers:
                self.calls[producer].is_read = True
        if func in METADATA_ONLY_OPS:
            call.inputs = frozenset()
        self.calls.append(call)

    def saves(self, tensor: torch.Tensor) -> None:
        """Is called when autograd saves a tensor."""
        # what an op fills after autograd has saved it is complete once the op has run
        self.num_saving = max(self.num_saving, len(self.calls) + may_be_filled_later(tensor))
        if not _is_plain(tensor):
            self.is_complete = False
            return
        storage = tensor.untyped_storage()
        producer = self._producer.get(id(storage))
        if producer is not None:
            self.saved_bytes += 0 if id(storage) in self._saved_storages else storage.nbytes()
            self._saved_storages.add(id(storage))
            self.saved.add(producer)

    def close(self) -> None:
        """Is called after the forward, when storages can no longer be identified by their ids."""
        self._producer.clear()
        self._saved_storages.clear()

    def roots(self) -> set[int]:
        """Returns the calls that a recomputation needs whatever is kept.

        Those are calls whose results autograd saves, calls with other effects, random ops, which advance the generator
        for later ones, and calls whose results no op reads: a custom kernel that is not dispatched may read them.
        """
        roots = {
            number
            for number, call in enumerate(self.calls[: self.num_saving])
            if call.must_run or call.is_random or not (call.is_read or call.is_view)
        }
        return roots | self.saved

    def needed(self, is_kept: Callable[[OpCall], bool]) -> set[int]:
        """Returns the calls whose results a recomputation needs."""
        needed: set[int] = set()
        todo = list(self.roots())
        while todo:
            number = todo.pop()
            if number not in needed:
                needed.add(number)
                if not is_kept(self.calls[number]):
                    todo.extend(self.calls[number].inputs)
        return needed


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _is_plain(tensor: torch.Tensor) -> bool:
    kinds: Collection[type] = (torch.Tensor, torch.nn.Parameter)
    return (type(tensor) in kinds or is_fake(tensor)) and tensor.layout is torch.strided


def _meta(leaf: Any) -> Any:
    return TensorMeta.of(leaf) if isinstance(leaf, torch.Tensor) else leaf


Key: TypeAlias = "tuple[Op, int]"
"""An op, and how often it has been called before in the block."""

Policy: TypeAlias = Callable[[Any, Any, Any, dict[str, Any], int], bool]
"""Called with an op's result, the op, its arguments, and how often it was called before in the block."""


@final
@dataclass(frozen=True, slots=True)
class NamedOps:
    """The policy that keeps the results of named ops."""

    ops: Collection[Op]
    """Ops of which every result is kept."""
    numbered: Mapping[Op, Collection[int]] = field(default_factory=dict)
    """Ops of which the results with these numbers are kept."""
    names: Mapping[str, tuple[Collection[Op], Collection[int] | None]] = field(default_factory=dict)
    """The names that the user has given, the ops that each means, and which of their results, if not all."""

    def __call__(self, output: Any, func: Op, args: Any, kwargs: dict[str, Any], number: int) -> bool:
        return func in self.ops or number in self.numbered.get(func, ())

    def decide(self, _: Any, func: Op, *__: Any, **___: Any) -> bool:
        """Does the same as a policy function of PyTorch's, without numbers."""
        return func in self.ops

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

    keys: list[Key]
    actions: list[Action]
    skipped: dict[int, OpCall]
    num_saved: int
    """How many tensors autograd saves."""
    is_valid: bool = True
    """``False``: calls did not follow it, or not all ops of the block are visible."""

    def has(self, position: int, func: Op) -> bool:
        """Whether an op is the one at a position."""
        return position < len(self.keys) and self.keys[position][0] is func

    def is_like(self, position: int, func: Op, output: Any) -> bool:
        """Whether an op is the one that was recorded, and has returned the like if the recomputation will skip it."""
        if not self.has(position, func):
            return False
        call = self.skipped.get(position)
        if call is None:
            return True
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
    schedule = OpSchedule(keys, [], {}, num_saved)
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
    return schedule


def _is_same(leaf: Any, known: Any) -> bool:
    return bool((TensorMeta.of(leaf) if isinstance(leaf, torch.Tensor) else leaf) == known)
