"""The ops of a ``selective`` block: which results are kept, and what a recomputation does with each op.

::

    original forward   addmm -> pow -> mul -> add -> tanh -> mul -> addmm      kept: addmm, tanh
    recomputation      (addmm)  -      -      -     (tanh)   mul               cached: in brackets, skipped: -

An op that only leads up to a kept result, or comes after the last tensor that autograd saves, is skipped: the
recomputation carries a tensor without values in its place, which nothing may read. A result that no recomputation would
read is not kept. The first call of a block records all this as an op schedule, which calls with arguments of the same
shapes follow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, TypeAlias, final
from weakref import WeakKeyDictionary

import torch

from graphckpt._compat import WithoutValues, call_with_autocast, pytree, storage_of, version_sharing_detach
from graphckpt._compat_compiler import DispatchMode, never_compiled
from graphckpt.engine import mismatch
from graphckpt.engine.execution import (
    Recomputation,
    ScheduleMismatch,
    engine_ops,
    may_be_filled_later,
    modes_paused,
    running,
)
from graphckpt.engine.frame import Contexts, Frame
from graphckpt.engine.saved import SavedTensor, are_mutated, save_tensor, take_all, versions_of
from graphckpt.errors import RecomputeError
from graphckpt.rules.effects import (
    PLAIN_CLASSES,
    Effects,
    is_plain_tensor,
    mutated_by,
    statistics_of,
    tensors_among,
)
from graphckpt.thread_state import RNGState, get_rng_state, set_rng_state

# Note [How an op is recognized]
#
# The original forward and the recomputation are two runs of the user's code, and only the order of ops ties them:
#
#   with a schedule, which a first call has recorded        by position: op number 7 must be the `addmm` of number 7
#   without one: a policy function, DTensors, a mismatch    by count: the second `addmm` of each, whatever runs between
#
# So both runs must agree on which ops count (`is_counted`). A position is the stricter key. Only under it may ops be
# skipped, as an op that runs in one of the two alone would shift the meaning of all positions behind it: each run
# compares every op, and the first that differs ends the skipping (`leave_schedule`, ScheduleMismatch).
#
# An example, `fc2(gelu(fc1(x))) + x` under "matmul":
#
#     position  op     reads  is saved  in the recomputation
#     0         t                       runs: a view, and its base is there
#     1         addmm         for gelu  is cached
#     2         gelu   1      for fc2   runs: backward needs its values, and it is not kept
#     3         t                       runs
#     4         addmm  2                is skipped: it is behind the last saved result (`num_saving` is 4), so its own
#                                       result is dropped after the forward, although the policy names it
#     5         add    4                is skipped

_MAX_SCHEDULES = 16  # of a block: one for each set of argument shapes
_AUTOCAST_DTYPES = (torch.float16, torch.bfloat16)
_DETACH = torch.ops.aten.detach.default

Op: TypeAlias = Any
"""A ``torch._ops.OpOverload`` such as ``torch.ops.aten.mm.default``."""


class TensorMeta(NamedTuple):
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    dtype: torch.dtype
    device: torch.device


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
    """One op of the original forward.

    Its *position* is its index among all ops of the forward, its *number* that among the calls of the same op: in
    ``mm, relu, mm`` the second ``mm`` has position 2 and number 1.
    """

    func: Op
    number: int
    inputs: frozenset[int]
    """The positions of the ops whose results it reads; none if it reads only a size."""
    outputs: tuple[Any, ...]
    """The :class:`TensorMeta` of each tensor that it returns, and what else it returns."""
    spec: Any
    """Of the value that holds the outputs; ``None`` if it is one tensor."""
    is_in_place: bool = False
    """Whether it writes to its first argument alone and returns it. Other ops that write have :attr:`must_run`."""
    is_view: bool = False
    must_run: bool = False
    """Whether it has side effects: writes to a tensor from outside the block, is a collective, returns no tensor."""
    is_random: bool = False
    has_statistics: bool = False
    """Whether it updates running statistics. A kept result has them as well, for the ops that read them later."""
    is_mutated: bool = False
    """Whether a later op writes to a result of it."""
    is_read: bool = False
    """Whether another op reads a result of it."""
    num_bytes: int = 0
    """Bytes of its results, if they are new tensors."""

    @property
    def can_be_kept(self) -> bool:
        return not (self.is_view or self.is_in_place or self.must_run or self.is_mutated)


@final
@dataclass(slots=True)
class OpGraph:
    """The ops of one forward, in order.

    A result that counts as needed although it is not costs only time. The opposite error shows in the recomputation,
    which meets a tensor without values, and is repeated with all ops.
    """

    calls: list[OpCall] = field(default_factory=list)
    saved: set[int] = field(default_factory=set)
    """The positions of the ops whose results autograd saves."""
    saved_bytes: int = 0
    """Bytes of these results."""
    num_saving: int = 0
    """The number of ops up to the last tensor that autograd saves, where a recomputation ends."""
    is_complete: bool = True
    """Whether all ops of the block are in the graph. ``False`` with tensor subclasses such as DTensor, sparse tensors,
    higher-order ops or a recomputed block inside of it."""
    _saved_storages: set[int] = field(default_factory=set)
    _producer: WeakKeyDictionary[torch.UntypedStorage, int] = field(default_factory=WeakKeyDictionary)
    """By storage: the position of the op that has written it last. Weak keys, as ids of freed storages are reused."""

    def add(self, func: Op, number: int, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        effects = Effects.of(func, args, kwargs, output)
        if effects is None:
            self.is_complete = False
            return
        # Read before this op is added as the producer of what it writes: `y.add_(1)` reads the `y` of an earlier op.
        producers = frozenset(p for t in effects.reads if (p := self._producer.get(t.untyped_storage())) is not None)
        call = OpCall(func, number, producers, tuple(map(_meta, effects.leaves)), effects.spec)
        own_position, results = len(self.calls), effects.makes
        call.is_view, call.has_statistics = effects.is_view, bool(effects.statistics)
        if effects.writes is not None:
            # `y.add_(1)` on a `y` of the block can be skipped with `y`. An op that writes to other arguments, or to a
            # tensor from before the block, has an effect that outlives the recomputation: it must run.
            call.is_in_place = len(effects.writes) == 1 and effects.writes[0] is output and args[0] is output
            call.must_run = not call.is_in_place or output.untyped_storage() not in self._producer
        modified = dict.fromkeys(t.untyped_storage() for t in chain(effects.writes or (), effects.statistics))
        for storage in modified:  # several may be views of one; `instance_norm` repeats statistics for each sample
            producer = self._producer.get(storage)
            if producer is not None:
                self.calls[producer].is_mutated = True
        self._producer.update(dict.fromkeys((t.untyped_storage() for t in effects.writes or ()), own_position))
        # Now all is there that says whether the result can be kept, and so whether this op is the producer of its
        # memory. A view is not: the op that has made its memory stays the producer, and is what readers of the view
        # depend on.
        call.is_random = torch.Tag.nondeterministic_seeded in func.tags
        call.must_run |= not results or func.namespace in _COLLECTIVE_NAMESPACES
        if call.can_be_kept:
            storages = dict.fromkeys((result.untyped_storage() for result in results), own_position)
            call.num_bytes = sum(storage.nbytes() for storage in storages)
            self._producer.update(storages)
        # A view reads no values. If only an undispatched kernel reads the view, its base counts as unread: see `roots`.
        if not call.is_view:
            for producer in producers:
                self.calls[producer].is_read = True
        # After that: an op that is read for its size alone does not count as unread, and can be skipped.
        if func in METADATA_ONLY_OPS:
            call.inputs = frozenset()
        self.calls.append(call)

    def saves(self, tensor: torch.Tensor) -> None:
        # Autograd saves the inputs of an op before it is in `calls`, and the results after. An input that the op may
        # still fill, as `rrelu` fills its noise, is complete only behind that op: one more.
        self.num_saving = max(self.num_saving, len(self.calls) + may_be_filled_later(tensor))
        if not is_plain_tensor(tensor):
            self.is_complete = False
            return
        storage = tensor.untyped_storage()
        producer = self._producer.get(storage)
        if producer is not None:
            self.saved_bytes += 0 if id(storage) in self._saved_storages else storage.nbytes()
            self._saved_storages.add(id(storage))
            self.saved.add(producer)

    def close(self) -> None:
        """Forgets storages: after the forward they may be freed, and their ids given to others."""
        self._producer.clear()
        self._saved_storages.clear()

    def roots(self) -> set[int]:
        """Returns the positions of the ops that a recomputation needs whatever is kept.

        Those are ops whose results autograd saves, ops with side effects, random ops, which advance the generator
        for later ones, updates of running statistics, and ops whose results no op reads: a custom kernel that is not
        dispatched may read them.
        """
        roots = {
            position
            for position, call in enumerate(self.calls[: self.num_saving])
            if call.must_run or call.is_random or call.has_statistics or not (call.is_read or call.is_view)
        }
        return roots | self.saved

    def needed(self, is_kept: Callable[[OpCall], bool]) -> set[int]:
        """Returns the positions of the roots and of all that they are computed from, back to kept results."""
        needed: set[int] = set()
        todo = list(self.roots())
        while todo:
            position = todo.pop()
            if position not in needed:
                needed.add(position)
                if not is_kept(self.calls[position]):
                    todo.extend(self.calls[position].inputs)
        return needed


def _meta(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return TensorMeta(leaf.size(), leaf.stride(), leaf.storage_offset(), leaf.dtype, leaf.device)


Key: TypeAlias = "tuple[Op, int]"
"""An op and its number: how often it has been called before in the block."""

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
            called = {number for op, number in keys if op in ops}
            if not called or (numbers is not None and not called.issuperset(numbers)):
                missing.append(name)
        return missing


@final
@dataclass(slots=True)
class OpSchedule:
    """The ops of a block's forward in order, and what a recomputation does with each."""

    keys: list[Key]
    cached: set[int]
    """The positions of the ops whose results are kept."""
    skipped: dict[int, OpCall]
    """By position: the ops that a recomputation does not run."""
    num_saved: int
    """How many tensors autograd saves."""
    updates: frozenset[int] = frozenset()
    """The positions of the ops that update running statistics."""
    is_valid: bool = True
    """``False``: calls did not follow it, or not all ops of the block are visible."""

    def has(self, position: int, func: Op) -> bool:
        return position < len(self.keys) and self.keys[position][0] is func

    def is_like(self, position: int, func: Op, output: Any) -> bool:
        """Whether an op is the one that was recorded, and has returned the like if the recomputation will skip it."""
        if not self.has(position, func):
            return False
        call = self.skipped.get(position)
        if call is None:
            return True
        if call.spec is None:
            return bool(call.outputs[0] == _meta(output))
        leaves, spec = pytree.tree_flatten(output)
        return bool(spec == call.spec and tuple(map(_meta, leaves)) == call.outputs)

    def without_values(self, position: int, args: Any) -> Any:
        call = self.skipped[position]
        if call.is_in_place:
            return args[0]
        leaves = [WithoutValues.like(meta) if isinstance(meta, TensorMeta) else meta for meta in call.outputs]
        return leaves[0] if call.spec is None else pytree.tree_unflatten(leaves, call.spec)


def make_schedule(graph: OpGraph, kept_keys: set[Key], num_saved: int) -> OpSchedule:
    """Returns the schedule that follows from one forward, of which the results with ``kept_keys`` are kept."""
    updates = frozenset(position for position, call in enumerate(graph.calls) if call.has_statistics)
    schedule = OpSchedule([(call.func, call.number) for call in graph.calls], set(), {}, num_saved, updates)
    needed = graph.needed(lambda call: (call.func, call.number) in kept_keys)
    for position, call in enumerate(graph.calls):
        # A view costs nothing: it runs unless its base was skipped, which has no memory to view.
        is_unused = not call.inputs.isdisjoint(schedule.skipped) if call.is_view else position not in needed
        if is_unused or position >= graph.num_saving:  # no recomputation comes this far
            schedule.skipped[position] = call
        elif schedule.keys[position] in kept_keys:
            schedule.cached.add(position)
    return schedule


class SavedResult(NamedTuple):
    """A kept result of an op: its leaves; ``spec`` is ``None`` if it is one tensor."""

    leaves: list[Any]
    """And behind them copies of the running statistics that the op has updated: later ops may read these."""
    spec: Any
    versions: list[tuple[torch.Tensor, int]]
    random: RNGState | None
    """The RNG state after an op that draws random numbers: later ops must draw those that follow."""
    num_statistics: int
    """How many of the leaves are running statistics."""

    def take(self) -> list[Any] | None:
        """Returns the leaves; ``None`` if one was modified in place, by code after the block: the op is recomputed."""
        return None if are_mutated(self.versions) else take_all(self.leaves)


@final
class SelectiveContexts(Contexts):
    """The kept results of one call of a block, and the contexts around its forward and its recomputation.

    ``signature`` is what calls that run the same ops have in common, such as the shapes of their arguments; ``None``
    for a policy that may decide otherwise in each call.
    """

    def __init__(self, policy: Policy, signature: object = None) -> None:
        self.policy = policy
        self.graph: OpGraph | None = None
        """The ops of a call that no schedule exists for yet."""
        self.schedule: OpSchedule | None = None
        """The schedule of an earlier call, which this one follows; after the forward, that of the recomputation."""
        self.position = 0
        """Of the next op of the original forward; it counts only while the call follows a schedule."""
        self._signature = signature
        self._num_saved = 0  # tensors that autograd has saved
        self._results: dict[Key, SavedResult] = {}
        self._fetched: dict[Key, list[Any]] = {}  # results that hooks around have returned, before the recomputation
        self.storages: dict[int, list[Key]] = {}  # id of a storage: the kept results in it
        self._keys: list[Key] = []  # of all results that were kept, in order
        self._num_used = 0  # of them: no recomputation reads what is kept after the last saved tensor
        self._memory: list[tuple[torch.Tensor, int]] = []  # during the forward: tensors of the block, and addresses
        self.assigns_data = False
        """Whether the forward has given a parameter or a buffer other memory, as ``parameter.data = ...`` does."""

    def original_forward(self, frame: Frame) -> OpMode:
        plain = (each for each in frame.call_state.tensors if type(each) in PLAIN_CLASSES and is_plain_tensor(each))
        self._memory = [(each, each.data_ptr()) for each in plain]
        # The hooks around must see the same tensors in each call.
        if frame.outer_hooks is None and self._signature is not None:
            schedule: OpSchedule | None = frame.block.schedules.get(self._signature)
            if schedule is None:
                self.graph = OpGraph()
            elif schedule.is_valid:
                self.schedule = schedule
        return ForwardMode(self, frame)

    def recomputation(self, frame: Frame) -> OpMode:
        if self.schedule is not None and not self.schedule.is_valid:
            self.schedule = None
        if frame.outer_hooks is not None:
            # The hooks may recompute the block around, which must not happen within an op that a mode handles: autograd
            # and autocast are not as in a forward there.
            self._fetched.clear()
            for key, result in self._results.items():
                with suppress(RecomputeError):  # modified in place since, as the block around shows: the op runs
                    self._fetched[key] = result.take()  # type: ignore[assignment]
        return RecomputationMode(self, frame)

    def saves(self, tensor: torch.Tensor) -> None:
        self._num_saved += 1
        self._num_used = len(self._keys)
        if self.graph is not None:
            self.graph.saves(tensor)

    def keep(self, key: Key, output: Any, frame: Frame, statistics: Sequence[torch.Tensor] = ()) -> None:
        leaves, spec = ([output], None) if isinstance(output, torch.Tensor) else pytree.tree_flatten(output)
        if statistics:  # copied, as later calls update them
            with engine_ops(frame.block.recorder, frame.block.name):
                leaves = [*leaves, *(tensor.clone() for tensor in statistics)]
        # Aliases: when this mode has returned, autograd gives `output` its history, which would hold the frame.
        aliases = [version_sharing_detach(x) if isinstance(x, torch.Tensor) else x for x in leaves]
        versions = versions_of(aliases)
        entries = [save_tensor(x, frame) if isinstance(x, torch.Tensor) else x for x in aliases]
        random = get_rng_state(frame.devices) if torch.Tag.nondeterministic_seeded in key[0].tags else None
        for tensor in tensors_among(aliases):
            self.storages.setdefault(id(storage_of(tensor)), []).append(key)
        self._results[key] = SavedResult(entries, spec, versions, random, len(statistics))
        self._keys.append(key)

    def take(self, key: Key, frame: Frame, args: Any, kwargs: dict[str, Any]) -> Any:
        """Returns the kept result of an op that is called with ``args``, and has it change what the op has changed."""
        result = self._results.get(key)
        if result is None:
            return None
        leaves = result.take() if frame.outer_hooks is None else self._fetched.pop(key, None)
        if leaves is None:
            return None
        if result.random is not None:
            set_rng_state(result.random)
        if result.num_statistics:
            num_leaves = len(leaves) - result.num_statistics
            with engine_ops(frame.block.recorder, frame.block.name):
                for tensor, value in zip(statistics_of(key[0], args, kwargs), leaves[num_leaves:], strict=True):
                    if not isinstance(tensor, WithoutValues):
                        tensor.data.copy_(value)  # without a new version, as the op
            leaves = leaves[:num_leaves]
        return leaves[0] if result.spec is None else pytree.tree_unflatten(leaves, result.spec)

    def is_found_by_number(self, func: Op) -> bool:
        """Whether a result is known by how often its op was called before, whatever ops come in between.

        A cast is not: autocast casts a weight once per region, so in one of the two executions alone. Nor is an op of
        which a list names some results: a number means another result if the ops of the block differ.
        """
        return func is not CAST and (self._signature is None or func in getattr(self.policy, "ops", ()))

    def drop_mutated(self, tensors: Iterable[torch.Tensor]) -> None:
        """Drops the kept results that share memory with one of ``tensors``, which were modified.

        The version counter does not always show it: GRU modifies what ``unsafe_chunk`` returns, a view without it.
        """
        for tensor in tensors:
            for key in self.storages.pop(id(storage_of(tensor)), ()):
                self._results.pop(key, None)

    def after_forward(self, frame: Frame, *, has_failed: bool) -> None:
        """Drops what the recomputation does not need, and records or checks the schedule of the ops."""
        self.storages.clear()  # by ids, which are given anew from here on
        self._release(self._keys[self._num_used :], frame)
        for key, result in list(self._results.items()):
            if are_mutated(result.versions):
                del self._results[key]
            elif frame.outer_hooks is not None or frame.group is not None:
                result.versions.clear()  # the block around, or the store, checks versions itself
        graph, self.graph = self.graph, None
        schedule = self.schedule
        # `parameter.data = result` passes no mode, and a skipped result would leave the parameter without memory.
        memory, self._memory = self._memory, []
        self.assigns_data = any(each.data_ptr() != address for each, address in memory)
        if has_failed or self.assigns_data:
            self.schedule = None  # other calls may follow it
        elif graph is not None:
            self._record(graph, frame)
        elif schedule is not None and (self._num_saved, self.position) != (schedule.num_saved, len(schedule.keys)):
            self.leave_schedule(frame)
        if self.schedule is not None and any(call.is_random for call in self.schedule.skipped.values()):
            # Without a check of the RNG state: a recomputation that skips random ops never reaches this state.
            frame.random_after = None

    def _release(self, keys: Iterable[Key], frame: Frame) -> None:
        for key in keys:
            result = self._results.pop(key, None)
            for leaf in () if result is None else result.leaves:
                if isinstance(leaf, SavedTensor):
                    leaf.release(frame)

    def _record(self, graph: OpGraph, frame: Frame) -> None:
        schedule = make_schedule(graph, set(self._results), self._num_saved)
        # The ops of excluded children pass no mode of this block: a result that only they read would look unused.
        schedule.is_valid = graph.is_complete and not frame.excluded
        schedules = frame.block.schedules
        schedules[self._signature] = schedule
        while len(schedules) > _MAX_SCHEDULES:
            del schedules[next(iter(schedules))]
        if not schedule.is_valid:
            self._note(frame)
            return
        self.schedule = schedule
        self._release([schedule.keys[position] for position in schedule.skipped], frame)
        for name in self.policy.missing(schedule.keys) if isinstance(self.policy, NamedOps) else ():
            frame.block.note(f"selective: the block does not run {name}, so no result of it is kept")

    def leave_schedule(self, frame: Frame) -> None:
        """Goes on without the schedule, which the call does not follow: all that is not kept will be recomputed."""
        schedules = frame.block.schedules
        if schedules.get(self._signature) is self.schedule:
            schedules.pop(self._signature, None)  # the next call records another one
        self.schedule = None

    def skips_ops(self) -> bool:
        """Whether a schedule says which ops are skipped."""
        return self.schedule is not None

    def run_all(self, frame: Frame) -> bool:
        """Makes later recomputations skip no op. Returns whether ops may have been skipped."""
        schedule = self.schedule
        if schedule is None or not schedule.is_valid:
            return False
        schedule.is_valid = False
        self._note(frame)
        return True

    def _note(self, frame: Frame) -> None:
        if isinstance(self.policy, NamedOps) and self.policy.numbered:
            frame.block.note(
                "selective: its calls, or the original forward and the recomputation, do not run the same ops, or not "
                "all of its ops are visible; all that is not kept is recomputed, and results named by number are not "
                "kept"
            )


class OpMode(DispatchMode):
    """Receives the ops of one execution of a block, except those of the engine."""

    supports_higher_order_operators = True  # such as `cond`, which then is one op, and its branches run below the mode

    def __init__(self, contexts: SelectiveContexts, frame: Frame) -> None:
        super().__init__()
        self._contexts = contexts
        self._frame = frame
        self._numbers: Counter[Op] = Counter()
        self._depth = modes_paused.depth  # see `_ModesPaused`
        self._run = running.get()

    @never_compiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        # One that an interrupt has left on the stack is that of an execution which is over.
        is_active = self._run is not None and self._run.is_active
        if is_active and modes_paused.depth == self._depth and is_counted(func, args, kwargs):
            return self._call(func, args, kwargs)
        if func is _DETACH and isinstance(args[0], WithoutValues):
            return WithoutValues.like(args[0])
        return call_with_autocast(func, args, kwargs)

    def _call(self, func: Op, args: Any, kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def _count(self, func: Op) -> Key:
        # Slow, as ops are hashed in Python: the keys of a schedule are used where there is one.
        number = self._numbers[func]
        self._numbers[func] = number + 1
        return func, number


@final
class ForwardMode(OpMode):
    """Keeps the results that the schedule names, or else the policy chooses, and records the ops for a schedule."""

    def _call(self, func: Op, args: Any, kwargs: dict[str, Any]) -> Any:
        contexts, frame = self._contexts, self._frame
        schedule, graph, position = contexts.schedule, contexts.graph, contexts.position
        if schedule is not None and not schedule.has(position, func):
            self._leave_schedule(position)
            schedule = None
        key = self._count(func) if schedule is None else schedule.keys[position]
        try:
            output = call_with_autocast(func, args, kwargs)
        except BaseException as error:  # which forward may catch
            if isinstance(error, Exception):  # an interrupt says nothing about what later calls do
                self._leave_schedule(position + 1)
            if graph is not None:
                graph.is_complete = False
            raise
        if schedule is not None and schedule.is_like(position, func, output):
            contexts.position = position + 1
            is_wanted = position in schedule.cached
        else:
            self._leave_schedule(position + 1)
            is_wanted = _makes_new_tensors(func) and contexts.policy(output, func, args, kwargs, key[1])
            # Without a schedule, the recomputation finds results by number alone.
            is_wanted = is_wanted and (graph is not None or contexts.is_found_by_number(func))
        # Not looked up for each op, which would hash it: the schedule knows. Not `schedule`, which the call may have
        # left.
        has_statistics = contexts.schedule is None or position in contexts.schedule.updates
        statistics = statistics_of(func, args, kwargs) if has_statistics else []
        if contexts.storages:
            contexts.drop_mutated(chain(mutated_by(func, args, kwargs), statistics))
        # Sizes of jagged tensors are ops as well, which the two executions ask for a different number of times.
        if is_wanted and any(True for _ in tensors_among((output,))):
            contexts.keep(key, output, frame, statistics)
        if graph is not None:
            run = running.get()
            graph.is_complete &= run is not None and run.frame is frame  # blocks inside have holders of their own
            graph.add(func, key[1], args, kwargs, output)
        return output

    def _leave_schedule(self, num_calls: int) -> None:
        """Goes on without a schedule after ``num_calls`` ops, which were not counted while it gave their numbers."""
        if self._contexts.schedule is not None:
            self._numbers.update(func for func, _ in self._contexts.schedule.keys[:num_calls])
            self._contexts.leave_schedule(self._frame)


@final
class RecomputationMode(OpMode):
    """Returns kept results, and runs the other ops, or skips them as the schedule says."""

    def __init__(self, contexts: SelectiveContexts, frame: Frame) -> None:
        super().__init__(contexts, frame)
        self._schedule = contexts.schedule
        # Parameters with the memory that they have now: what forward assigns to `.data` must not outlive it.
        tensors = frame.block.tensors() if contexts.assigns_data else ()
        self._memory = [
            (each, each.data) for each in tensors if type(each) is torch.nn.Parameter and is_plain_tensor(each)
        ]
        self._position = 0  # in the schedule
        run = running.get()
        self._skips = isinstance(run, Recomputation) and not run.returns_output  # which needs the values of the last op

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        memory, self._memory = self._memory, []
        moved = [(each, data) for each, data in memory if each.data_ptr() != data.data_ptr()]
        # Another value may be a function of the one that forward has assigned, as an average that moves: forward itself
        # has read others then. The same value, such as a norm that is limited once more, is not a difference.
        has_moved = any(not torch.equal(each, data) for each, data in moved)
        for each, data in moved:
            each.data = data
        if has_moved:
            raise RecomputeError(mismatch.assigns_data(self._frame.block.title))

    def _call(self, func: Op, args: Any, kwargs: dict[str, Any]) -> Any:
        contexts, schedule, position = self._contexts, self._schedule, self._position
        self._position = position + 1
        if schedule is None:
            key, is_kept = self._count(func), contexts.is_found_by_number(func)
        elif not schedule.has(position, func):
            raise ScheduleMismatch(f"{func} is not the op of the original forward")  # no op is skipped in the next try
        elif self._skips and position in schedule.skipped:
            return schedule.without_values(position, args)
        else:
            key, is_kept = schedule.keys[position], position in schedule.cached
        output = contexts.take(key, self._frame, args, kwargs) if is_kept else None
        if output is not None:
            return output
        # Its input was skipped, and the op needs no more of it than its size and strides.
        if func in METADATA_ONLY_OPS and isinstance(args[0], WithoutValues):
            like = args[0]
            empty = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=like.device)
            args = (empty, *args[1:])
        return call_with_autocast(func, args, kwargs)


def is_counted(func: Op, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an op is one of the block's own, and so part of the original forward and of the recomputation alike.

    ``detach`` is not: the saved-tensor hooks of the two call it a different number of times. Nor are ``prim`` ops,
    which query the device of a fake tensor. Nor is the cast of a float32 leaf that requires grad to the dtype of an
    autocast, which caches it until its region ends, so that a parameter may be cast in only one of the two.
    """
    # pytorch#193338: PyTorch's selective checkpoint counts these casts, and so fails where two blocks share a weight.
    if func is CAST and kwargs.get("dtype") in _AUTOCAST_DTYPES:
        tensor = args[0]
        return not (tensor.requires_grad and tensor.is_leaf and tensor.dtype is torch.float32)
    return func is not _DETACH and func.namespace != "prim"


def _makes_new_tensors(func: Op) -> bool:
    """Whether the op returns new tensors: it is neither an in-place op nor a view, whose results are never cached."""
    schema = getattr(func, "_schema", None)
    return schema is not None and not schema.is_mutable and all(r.alias_info is None for r in schema.returns)
