"""The dispatch modes around the original forward and the recomputation of a ``selective`` block.

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
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Self, final

import torch

from graphckpt._compat import WithoutValues, call_with_autocast, pytree, storage_of, version_sharing_detach
from graphckpt._compat_compiler import DispatchMode, never_compiled
from graphckpt.engine.call_state import get_rng_state, set_rng_state
from graphckpt.engine.frame import Recomputation, ScheduleMismatch, running
from graphckpt.engine.objects import mutated_by
from graphckpt.engine.saved import SavedResult, SavedTensor
from graphckpt.errors import RecomputeError
from graphckpt.rules.ops.schedule import CAST, METADATA_ONLY_OPS, Action, NamedOps, OpGraph, make_schedule

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import TracebackType

    from graphckpt.engine.frame import Frame
    from graphckpt.rules.ops.schedule import Key, Op, OpSchedule, Policy

_MAX_SCHEDULES = 16  # of a block: one for each set of argument shapes
_MAX_MISMATCHES = 16  # calls of a block that did not follow their schedule, before schedules are disabled for it
_AUTOCAST_DTYPES = (torch.float16, torch.bfloat16)
_DETACH = torch.ops.aten.detach.default


@final
class SelectiveContexts:
    """The kept results of one call of a block, and the contexts around its forward and its recomputation.

    Args:
        policy: Decides which results to keep.
        signature: What calls that run the same ops have in common, such as the shapes of their arguments; ``None`` for
            a policy that may decide otherwise in each call.
    """

    def __init__(self, policy: Policy, signature: object = None) -> None:
        self.policy = policy
        self.graph: OpGraph | None = None
        """The ops of a call that no schedule exists for yet."""
        self.has_failed_op = False
        """Whether an op has raised an exception, which forward may catch: nothing is kept then."""
        self.modes: list[OpMode] = []
        """Those that are active."""
        self._signature = signature
        self._schedule: OpSchedule | None = None  # that the recomputation follows
        self._is_complete = False
        self._num_saved = 0  # tensors that autograd has saved
        self._results: dict[Key, SavedResult] = {}
        self._fetched: dict[Key, list[Any]] = {}
        self._storages: dict[int, list[Key]] = {}  # id of a storage: the kept results in it
        self._keys: list[Key] = []  # of all results that were kept, in order
        self._num_used = 0  # of them: no recomputation reads what is kept after the last saved tensor

    def original_forward(self, frame: Frame) -> OpMode:
        # The hooks around must see the same tensors in each call.
        if frame.outer_hooks is None and self._signature is not None:
            schedule: OpSchedule | None = frame.block.schedules.get(self._signature)
            if schedule is None:
                self.graph = OpGraph()
            elif schedule.is_valid:
                self._schedule = schedule
        return ForwardMode(self, frame, self._schedule)

    def recomputation(self, frame: Frame) -> OpMode:
        """Returns the context that returns the kept results in place of running their ops."""
        if self._schedule is not None and self._schedule.is_valid and self._is_complete:
            run = running.get()
            is_for_backward = isinstance(run, Recomputation) and run.frame is frame and not run.returns_output
            return RecomputationMode(self, frame, self._schedule, skips=is_for_backward)
        if frame.outer_hooks is not None:
            self._fetch()
        return RecomputationMode(self, frame)

    def saves(self, tensor: torch.Tensor) -> None:
        self._num_saved += 1
        self._num_used = len(self._keys)
        if self.graph is not None:
            self.graph.saves(tensor)

    def keep(self, key: Key, output: Any, frame: Frame) -> None:
        leaves, spec = ([output], None) if isinstance(output, torch.Tensor) else pytree.tree_flatten(output)
        aliases = [version_sharing_detach(x) if isinstance(x, torch.Tensor) else x for x in leaves]
        versions = [(x, x._version) for x in aliases if isinstance(x, torch.Tensor)]
        entries = [SavedTensor(x, frame) if isinstance(x, torch.Tensor) else x for x in aliases]
        random = get_rng_state(frame.devices) if torch.Tag.nondeterministic_seeded in key[0].tags else None
        for tensor, _ in versions:
            self._storages.setdefault(id(storage_of(tensor)), []).append(key)
        self._results[key] = SavedResult(entries, spec, versions, random)
        self._keys.append(key)

    def take(self, key: Key, frame: Frame) -> Any:
        """Returns the result of an op, or ``None`` if it is not kept."""
        result = self._results.get(key)
        if result is None:
            return None
        leaves = result.take() if frame.outer_hooks is None else self._fetched.pop(key, None)
        if leaves is None:
            return None
        if result.random is not None:
            set_rng_state(result.random)
        return leaves[0] if result.spec is None else pytree.tree_unflatten(leaves, result.spec)

    def _fetch(self) -> None:
        """Takes all results from the hooks around the call, before the mode of a recomputation is active.

        The hooks may recompute the block around, which must not happen within an op that a mode handles: autograd and
        autocast are not as in a forward there.
        """
        self._fetched.clear()
        for key, result in self._results.items():
            with suppress(RecomputeError):  # modified in place since, as the block around found: the op is recomputed
                leaves = result.take()
                if leaves is not None:
                    self._fetched[key] = leaves

    def is_found_by_number(self, func: Op) -> bool:
        """Whether a result is known by how often its op was called before, whatever ops come in between.

        A cast is not: autocast casts a weight once per region, so in one of the two executions alone.
        """
        return func is not CAST and (self._signature is None or func in getattr(self.policy, "ops", ()))

    def drop_mutated(self, func: Op, args: Any, kwargs: dict[str, Any]) -> None:
        """Drops a kept result that ``func`` modifies, also through a view that does not share its version counter.

        GRU modifies what ``unsafe_chunk`` returns, which is such a view.
        """
        if self._storages:
            self.drop_mutated_outside(mutated_by(func, args, kwargs))

    def drop_mutated_outside(self, tensors: Iterable[torch.Tensor]) -> None:
        """Drops the kept results that share memory with one of ``tensors``, which were modified."""
        for tensor in tensors:
            for key in self._storages.pop(id(storage_of(tensor)), ()):
                self._results.pop(key, None)

    def after_forward(self, frame: Frame, *, has_failed: bool) -> None:
        """Drops what the recomputation does not need, and records or checks the schedule of the ops."""
        self.has_failed_op |= has_failed
        self._storages.clear()
        self._release(self._keys[0 if self.has_failed_op else self._num_used :], frame)
        for key, result in list(self._results.items()):
            if result.is_mutated():
                del self._results[key]
            elif frame.outer_hooks is not None or frame.group is not None:
                result.versions.clear()  # the block around, or the store, checks versions itself
        graph, self.graph = self.graph, None
        if has_failed:
            self._schedule = None  # other calls may follow it
        elif graph is not None:
            self._record(graph, frame)
        elif self._schedule is not None and self._num_saved != self._schedule.num_saved:
            self.leave_schedule(frame)
        self._is_complete = True

    def _release(self, keys: Iterable[Key], frame: Frame) -> None:
        for key in keys:
            result = self._results.pop(key, None)
            if result is not None:
                result.release(frame)

    def _record(self, graph: OpGraph, frame: Frame) -> None:
        schedule = make_schedule(graph, set(self._results), self._num_saved)
        schedule.is_valid = graph.is_complete and not frame.excluded
        if not schedule.is_valid:
            self._note(frame)
        elif isinstance(self.policy, NamedOps):
            for word in self.policy.missing(schedule.keys):
                frame.block.note(f"selective: the block runs no {word}, so no result of it is kept")
        schedules = frame.block.schedules
        schedules[self._signature] = schedule
        while len(schedules) > _MAX_SCHEDULES:
            del schedules[next(iter(schedules))]
        if schedule.is_valid:
            self._schedule = schedule
            self._release([schedule.keys[position] for position in schedule.skipped], frame)

    def leave_schedule(self, frame: Frame) -> None:
        """Is called when a call does not follow its schedule: all that is not kept will be recomputed."""
        block, schedule = frame.block, self._schedule
        if block.schedules.get(self._signature) is schedule and schedule is not None:
            block.num_mismatches += 1
            if block.num_mismatches < _MAX_MISMATCHES:
                del block.schedules[self._signature]  # the next call records another one
            else:
                schedule.is_valid = False
                self._note(frame)
        self._schedule = None

    def run_all(self, frame: Frame) -> bool:
        """Makes later recomputations skip no op. Returns whether ops may have been skipped."""
        schedule = self._schedule
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

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Hides ops from the modes that are active now."""
        modes = [mode for mode in self.modes if not mode.is_paused]
        for mode in modes:
            mode.is_paused = True
        try:
            yield
        finally:
            for mode in modes:
                mode.is_paused = False


class OpMode(DispatchMode):
    """Receives the ops of one execution of a block, but for those of the engine.

    Args:
        contexts: Those of the call.
        frame: The call.
        schedule: The schedule of an earlier call, which this one follows.
    """

    def __init__(self, contexts: SelectiveContexts, frame: Frame, schedule: OpSchedule | None = None) -> None:
        super().__init__()
        self.is_paused = False
        self._contexts = contexts
        self._frame = frame
        self._schedule = schedule
        self._position = 0  # in the schedule
        self._numbers: Counter[Op] = Counter()

    @never_compiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if not self.is_paused and is_counted(func, args, kwargs):
            return self._call(func, args, kwargs)
        has_values = func is not _DETACH or not isinstance(args[0], WithoutValues)
        return call_with_autocast(func, args, kwargs) if has_values else args[0].twin()

    def _call(self, func: Op, args: Any, kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def _key(self, func: Op) -> Key:
        number = self._numbers[func]
        self._numbers[func] = number + 1
        return func, number

    def __enter__(self) -> Self:
        self._contexts.modes.append(self)
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, error, traceback)
        finally:
            self._contexts.modes.remove(self)  # it refers to the call: a cycle would keep all results alive


@final
class ForwardMode(OpMode):
    """Keeps the results that the schedule names, or else the policy chooses, and records the ops for a schedule."""

    def _call(self, func: Op, args: Any, kwargs: dict[str, Any]) -> Any:
        contexts, schedule = self._contexts, self._schedule
        try:
            output = call_with_autocast(func, args, kwargs)
        except BaseException:
            contexts.has_failed_op = True
            if contexts.graph is not None:
                contexts.graph.is_complete = False
            raise
        if schedule is None:
            self._choose(func, args, kwargs, output)
            return output
        position = self._position
        self._position = position + 1
        if contexts.has_failed_op or not schedule.is_like(position, func, output):
            self._leave_schedule(schedule.keys[:position])
            self._choose(func, args, kwargs, output)
        elif schedule.actions[position] is Action.CACHED:
            contexts.keep(schedule.keys[position], output, self._frame)
        else:
            contexts.drop_mutated(func, args, kwargs)
        return output

    def _leave_schedule(self, keys: Iterable[Key]) -> None:
        self._contexts.leave_schedule(self._frame)
        self._schedule = None
        self._numbers.update(func for func, _ in keys)

    def _choose(self, func: Op, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        contexts, frame = self._contexts, self._frame
        key = self._key(func)
        contexts.drop_mutated(func, args, kwargs)
        graph = contexts.graph
        is_wanted = _makes_new_tensors(func) and contexts.policy(output, func, args, kwargs, key[1])
        # With a schedule, the recomputation can use any result.
        if is_wanted and not contexts.has_failed_op and (graph is not None or contexts.is_found_by_number(func)):
            contexts.keep(key, output, frame)
        if graph is not None:
            run = running.get()
            graph.is_complete &= run is not None and run.frame is frame  # blocks inside have holders of their own
            graph.add(func, key[1], args, kwargs, output)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        schedule = self._schedule
        if kind is None and schedule is not None and self._position != len(schedule.keys):
            self._contexts.leave_schedule(self._frame)


@final
class RecomputationMode(OpMode):
    """Returns kept results, and runs the other ops, or skips them as the schedule says.

    Args:
        contexts: Those of the call.
        frame: The call.
        schedule: The schedule of its original forward.
        skips: Whether ops may be skipped: the recomputation is for backward alone, and returns no output.
    """

    def __init__(
        self, contexts: SelectiveContexts, frame: Frame, schedule: OpSchedule | None = None, *, skips: bool = False
    ) -> None:
        super().__init__(contexts, frame, schedule)
        self._skips = skips

    def _call(self, func: Op, args: Any, kwargs: dict[str, Any]) -> Any:
        contexts, schedule = self._contexts, self._schedule
        if schedule is None:
            key = self._key(func)
            output = contexts.take(key, self._frame) if contexts.is_found_by_number(func) else None
            return call_with_autocast(func, args, kwargs) if output is None else output
        position = self._position
        self._position = position + 1
        if not schedule.has(position, func):
            raise ScheduleMismatch(f"{func} is not the op of the original forward")  # no op is skipped then
        action = schedule.actions[position]
        if action is Action.SKIP and self._skips:
            return schedule.without_values(position, args)
        output = contexts.take(schedule.keys[position], self._frame) if action is Action.CACHED else None
        if output is not None:
            return output
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

    Args:
        func: the op.
        args: its arguments.
        kwargs: its keyword arguments.
    """
    if func is CAST and kwargs.get("dtype") in _AUTOCAST_DTYPES:
        tensor = args[0]
        return not (tensor.requires_grad and tensor.is_leaf and tensor.dtype is torch.float32)
    return func is not _DETACH and func.namespace != "prim"


def _makes_new_tensors(func: Op) -> bool:
    """Whether the op returns new tensors: it is neither an in-place op nor a view, whose results are never cached."""
    schema = getattr(func, "_schema", None)
    return schema is not None and not schema.is_mutable and all(r.alias_info is None for r in schema.returns)
