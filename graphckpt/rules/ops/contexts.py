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

from collections import defaultdict
from collections.abc import Iterable
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, final

import torch

from graphckpt._compat import WithoutValues, pytree, storage_of, version_sharing_detach
from graphckpt._compat_autocast import call_with_autocast
from graphckpt._compat_compiler import DispatchMode, never_compiled
from graphckpt.engine.frame import Recomputation, ScheduleMismatch, running
from graphckpt.engine.objects import mutated_by
from graphckpt.engine.saved import Call, SavedResult, SavedTensor
from graphckpt.engine.thread_state import get_rng_state, set_rng_state
from graphckpt.errors import RecomputeError
from graphckpt.rules.ops.schedule import (
    CAST,
    METADATA_ONLY_OPS,
    Action,
    Key,
    NamedOps,
    Op,
    OpGraph,
    OpSchedule,
    Policy,
    make_schedule,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import TracebackType

    from graphckpt.engine.frame import Frame
    from graphckpt.rules.ops.schedule import Key, Op, OpSchedule, Policy


@final
class KeptResults:
    """The kept results of one call.

    Args:
        policy: Decides which results to keep.
        learns: Whether calls with arguments of the same shapes follow one schedule of ops.
    """

    def __init__(self, policy: Policy, *, learns: bool) -> None:
        self.policy = policy
        self.results: dict[Key, SavedResult] = {}
        self.graph: OpGraph | None = None
        """The ops of a call that no schedule exists for yet."""
        self.num_saved = 0
        """How many tensors autograd has saved."""
        self.has_failed_op = False
        """Whether an op has raised an exception, which forward may catch: nothing is kept then."""
        self._learns = learns
        self._fetched: dict[Key, list[Any]] = {}
        self._storages: dict[int, list[Key]] = {}  # id of a storage: the kept results in it
        self._keys: list[Key] = []  # of all kept results, in order
        self._num_used = 0  # of them: no recomputation reads what is kept after the last saved tensor

    def saves(self, tensor: torch.Tensor) -> None:
        """Is called when autograd saves a tensor of the original forward."""
        self.num_saved += 1
        self._num_used = len(self._keys)
        if self.graph is not None:
            self.graph.saves(tensor)

    def run(self, func: Op, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs an op of the original forward."""
        try:
            return call_with_autocast(func, args, kwargs)
        except BaseException:
            self.has_failed_op = True
            if self.graph is not None:
                self.graph.is_complete = False
            raise

    def keep(self, key: Key, output: Any, frame: Call) -> None:
        """Keeps the result of an op."""
        leaves, spec = ([output], None) if isinstance(output, torch.Tensor) else pytree.tree_flatten(output)
        aliases = [version_sharing_detach(x) if isinstance(x, torch.Tensor) else x for x in leaves]
        versions = [(x, x._version) for x in aliases if isinstance(x, torch.Tensor)]
        kept = [SavedTensor(x, frame) if isinstance(x, torch.Tensor) else x for x in aliases]
        random = get_rng_state(frame.devices) if torch.Tag.nondeterministic_seeded in key[0].tags else None
        for tensor, _ in versions:
            self._storages.setdefault(id(storage_of(tensor)), []).append(key)
        self.results[key] = SavedResult(kept, spec, versions, random)
        self._keys.append(key)

    def fetch(self) -> None:
        """Takes all results from the hooks around the call, before the mode of a recomputation is active.

        The hooks may recompute the block around, which must not happen within an op that a mode handles: autograd and
        autocast are not as in a forward there.
        """
        self._fetched.clear()
        for key, result in self.results.items():
            with suppress(RecomputeError):  # modified in place since, as the block around found: the op is recomputed
                leaves = result.take()
                if leaves is not None:
                    self._fetched[key] = leaves

    def take(self, key: Key, frame: Call) -> Any:
        """Returns the result of an op, or ``None`` if it is not kept."""
        result = self.results.get(key)
        if result is None:
            return None
        leaves = result.take() if frame.outer_hooks is None else self._fetched.pop(key, None)
        if leaves is None:
            return None
        if result.random is not None:
            set_rng_state(result.random)
        return leaves[0] if result.spec is None else pytree.tree_unflatten(leaves, result.spec)

    def drop_mutated(self, func: Op, args: Any, kwargs: dict[str, Any]) -> None:
        """Drops a kept result that ``func`` modifies, also through a view that does not share its version counter.

        GRU modifies what ``unsafe_chunk`` returns, which is such a view.
        """
        if self._storages:
            self.drop_sharing(mutated_by(func, args, kwargs))

    def drop_sharing(self, tensors: Iterable[torch.Tensor]) -> None:
        """Drops the kept results that share memory with one of ``tensors``, which were modified."""
        for tensor in tensors:
            for key in self._storages.pop(id(storage_of(tensor)), ()):
                self.results.pop(key, None)

    def after_forward(self, frame: Call) -> None:
        """Drops the results that the block has modified in place since, and those that no recomputation reads."""
        self._storages.clear()
        for key in self._keys[0 if self.has_failed_op else self._num_used :]:
            self.release(key, frame)
        for key, result in list(self.results.items()):
            if result.is_mutated():
                del self.results[key]
            elif frame.outer_hooks is not None or frame.group is not None:
                result.versions.clear()  # the block around, or the store, checks versions itself

    def release(self, key: Key, frame: Call) -> None:
        """Drops one result."""
        result = self.results.pop(key, None)
        if result is not None:
            result.release(frame)

    def is_found_by_number(self, func: Op) -> bool:
        """Whether a result is known by how often its op was called before, whatever ops come in between.

        A cast is not: autocast casts a weight once per region, so in one of the two executions alone.
        """
        return func is not CAST and (not self._learns or func in getattr(self.policy, "ops", ()))


class OpMode(DispatchMode):
    """Receives the ops of one execution of a block, but for those of the engine."""

    def __init__(self, results: KeptResults, frame: Frame) -> None:
        super().__init__()
        self._results = results
        self._frame = frame
        self.is_paused = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Returns ``True``: the mode ignores ops that are compiled by ``torch.compile``."""
        return True

    @never_compiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self.is_paused or not is_counted(func, args):
            has_values = func is not DETACH or not isinstance(args[0], WithoutValues)
            return call_with_autocast(func, args, kwargs) if has_values else args[0].twin()
        return self._call(func, args, kwargs)

    def _call(self, func: Op, args: Any, kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def end(self) -> None:
        """Is called after an execution without an error."""


class CountingMode(OpMode):
    """Identifies an op by how often it was called before."""

    def __init__(self, results: KeptResults, frame: Frame) -> None:
        super().__init__(results, frame)
        self._numbers: dict[Op, int] = defaultdict(int)

    def _key(self, func: Op) -> Key:
        number = self._numbers[func]
        self._numbers[func] = number + 1
        return func, number


@final
class CachingMode(CountingMode):
    """Keeps the results that the policy chooses, and records the ops if the call has a graph."""

    def _call(self, func: Op, args: Any, kwargs: dict[str, Any]) -> Any:
        return self.see(self._key(func), args, kwargs, self._results.run(func, args, kwargs))

    def see(self, key: Key, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """Is called after an op."""
        func, number = key
        results, frame = self._results, self._frame
        results.drop_mutated(func, args, kwargs)
        is_wanted = _makes_new_tensors(func) and results.policy(output, func, args, kwargs, number)
        if is_wanted and self._is_of_use(func) and not results.has_failed_op:
            results.keep(key, output, frame)
        graph = results.graph
        if graph is not None:
            run = running.get()
            graph.is_complete &= (
                run is not None and run.frame is frame
            )  # the ops of a block inside have holders of their own
            graph.add(func, number, args, kwargs, output)
        return output

    def _is_of_use(self, func: Op) -> bool:
        """Whether the recomputation can use the results of an op: with a schedule, it can use any."""
        return self._results.graph is not None or self._results.is_found_by_number(func)


class ScheduledMode(OpMode):
    """Follows the schedule of an earlier call."""

    def __init__(self, results: KeptResults, frame: Frame, schedule: OpSchedule) -> None:
        super().__init__(results, frame)
        self._schedule = schedule
        self._plain: Sequence[Op | None] = schedule.plain
        self._position = 0

    @never_compiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        position = self._position
        op = self._plain[position] if position < len(self._plain) else None
        if self.is_paused or op is None or op is not func:
            return super().__torch_dispatch__(func, types, args, kwargs)
        self._position = position + 1
        try:
            return op(*args, **kwargs) if kwargs else op(*args)
        except BaseException:
            self._results.has_failed_op = True
            raise


@final
class ScheduledCachingMode(ScheduledMode):
    """Keeps the results that a schedule names, as long as the ops follow it.

    Args:
        results: The kept results.
        frame: The call.
        schedule: The schedule of an earlier call.
        on_mismatch: Is called with ``frame`` if the ops do not follow the schedule.
    """

    def __init__(
        self,
        results: KeptResults,
        frame: Frame,
        schedule: OpSchedule,
        on_mismatch: Callable[[Frame], None],
    ) -> None:
        super().__init__(results, frame, schedule)
        self._on_mismatch = on_mismatch
        self._fallback: CachingMode | None = None

    def _call(self, func: Op, args: Any, kwargs: dict[str, Any]) -> Any:
        output = self._results.run(func, args, kwargs)
        if self._fallback is not None:
            return self._fallback.see(self._fallback._key(func), args, kwargs, output)
        results, schedule, position = self._results, self._schedule, self._position
        self._position = position + 1
        is_next = position < len(schedule.ops) and schedule.ops[position] is func and not results.has_failed_op
        act = schedule.actions[position] if is_next else None
        if act is None or (act is Action.SKIP and not schedule.is_like(position, output)):
            return self._fall_back(func, args, kwargs, output)
        if act is Action.CACHED:
            results.keep(schedule.keys[position], output, self._frame)
        else:
            results.drop_mutated(func, args, kwargs)
        return output

    def end(self) -> None:
        """Checks that the forward has run all ops of the schedule."""
        if self._fallback is None and (self._results.has_failed_op or self._position != len(self._schedule.ops)):
            self._on_mismatch(self._frame)

    def _fall_back(self, func: Op, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        self._on_mismatch(self._frame)
        self._plain = ()
        self._fallback = CachingMode(self._results, self._frame)
        for known, _ in self._schedule.keys[: self._position - 1]:
            self._fallback._key(known)
        return self._fallback.see(self._fallback._key(func), args, kwargs, output)


@final
class CachedMode(CountingMode):
    """Returns kept results, and runs the other ops."""

    def _call(self, func: Op, args: Any, kwargs: dict[str, Any]) -> Any:
        key = self._key(func)
        output = self._results.take(key, self._frame) if self._results.is_found_by_number(func) else None
        return call_with_autocast(func, args, kwargs) if output is None else output


@final
class ScheduledCachedMode(ScheduledMode):
    """Runs, skips or returns the result of each op, as a schedule says."""

    def __init__(self, results: KeptResults, frame: Frame, schedule: OpSchedule, *, skips: bool) -> None:
        super().__init__(results, frame, schedule)
        self._skips = skips

    def _call(self, func: Op, args: Any, kwargs: dict[str, Any]) -> Any:
        schedule, position = self._schedule, self._position
        self._position = position + 1
        if position >= len(schedule.ops) or schedule.ops[position] is not func:
            raise ScheduleMismatch(f"{func} is not the op of the original forward")  # no op is skipped then
        act = schedule.actions[position]
        if act is Action.SKIP and self._skips:
            return schedule.without_values(position, args)
        output = self._results.take(schedule.keys[position], self._frame) if act is Action.CACHED else None
        if output is not None:
            return output
        if func in METADATA_ONLY_OPS and isinstance(args[0], WithoutValues):
            args = (_uninitialized_like(args[0]), *args[1:])
        return call_with_autocast(func, args, kwargs)


def _uninitialized_like(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an uninitialized tensor with the same size, stride, dtype and device."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)


DETACH = torch.ops.aten.detach.default


def is_counted(func: Op, args: Any) -> bool:
    """Whether an op is one of the block's own, and so part of the original forward and of the recomputation alike.

    ``detach`` is not: the saved-tensor hooks of the two call it a different number of times. Nor are ``prim`` ops,
    which query the device of a fake tensor. Nor is the cast of a float32 leaf that requires grad: autocast caches it
    until its region ends, so that a parameter may be cast in only one of the two.

    Args:
        func: the op.
        args: its arguments.
    """
    if func is CAST:
        tensor = args[0]
        return not (tensor.requires_grad and tensor.is_leaf and tensor.dtype is torch.float32)
    return func is not DETACH and func.namespace != "prim"


def _makes_new_tensors(func: Op) -> bool:
    """Whether the op returns new tensors: it is neither an in-place op nor a view, whose results are never cached."""
    schema = getattr(func, "_schema", None)
    return schema is not None and not schema.is_mutable and all(r.alias_info is None for r in schema.returns)


_MAX_SCHEDULES = 16  # of a block: one for each set of argument shapes
_MAX_MISMATCHES = 16  # calls of a block that did not follow their schedule, before schedules are disabled for it


@final
class _Active:
    """Makes a mode the innermost one, and lists it among ``modes``.

    It is not a generator: if an interrupt left one behind, the garbage collector would end it later, and then it would
    pop the mode that is innermost by then.
    """

    __slots__ = ("_mode", "_modes")

    def __init__(self, mode: OpMode, modes: list[OpMode]) -> None:
        self._mode = mode
        self._modes = modes

    def __enter__(self) -> None:
        self._modes.append(self._mode)
        self._mode.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._mode.__exit__(kind, error, traceback)
        finally:
            self._modes.remove(self._mode)  # it refers to the call: a cycle would keep all results alive
        if kind is None:
            self._mode.end()


@final
class SelectiveContexts:
    """The contexts around one call of a block.

    Args:
        policy: Decides which results to keep.
        signature: What calls that run the same ops have in common, such as the shapes of their arguments; ``None`` for
            a policy that may decide otherwise in each call.
    """

    def __init__(self, policy: Policy, signature: object = None) -> None:
        self._results = KeptResults(policy, learns=signature is not None)
        self._schedule: OpSchedule | None = None  # that the recomputation follows
        self._signature = signature
        self._is_complete = False
        self._modes: list[OpMode] = []

    def original_forward(self, frame: Frame) -> AbstractContextManager[None]:
        """Returns the context that keeps the chosen results."""
        if (
            frame.outer_hooks is not None or self._signature is None
        ):  # the hooks around must see the same tensors in each call
            return self._active(CachingMode(self._results, frame))
        schedule: OpSchedule | None = frame.block.schedules.get(self._signature)
        if schedule is None:
            self._results.graph = OpGraph()
        elif schedule.is_valid:
            self._schedule = schedule
            return self._active(ScheduledCachingMode(self._results, frame, schedule, self._drop_schedule))
        return self._active(CachingMode(self._results, frame))

    def recomputation(self, frame: Frame) -> AbstractContextManager[None]:
        """Returns the context that returns the kept results in place of running their ops."""
        run = running.get()
        is_for_backward = isinstance(run, Recomputation) and run.frame is frame and not run.returns_output
        if self._schedule is not None and self._schedule.is_valid and self._is_complete:
            return self._active(ScheduledCachedMode(self._results, frame, self._schedule, skips=is_for_backward))
        if frame.outer_hooks is not None:
            self._results.fetch()
        return self._active(CachedMode(self._results, frame))

    def saves(self, tensor: torch.Tensor) -> None:
        """Is called when autograd saves a tensor of the original forward."""
        self._results.saves(tensor)

    def drop_mutated_outside(self, tensors: Iterable[torch.Tensor]) -> None:
        """Drops the kept results that ops have modified which the modes have not seen."""
        self._results.drop_sharing(tensors)

    def _active(self, mode: OpMode) -> AbstractContextManager[None]:
        return _Active(mode, self._modes)

    def after_forward(self, frame: Frame, *, has_failed: bool) -> None:
        """Drops what the recomputation does not need, and records or checks the schedule of the ops."""
        results = self._results
        results.has_failed_op |= has_failed
        results.after_forward(frame)
        graph, results.graph = results.graph, None
        if has_failed:
            self._schedule = None  # other calls may follow it
        elif graph is not None:
            self._record(graph, frame)
        elif self._schedule is not None and results.num_saved != self._schedule.num_saved:
            self._drop_schedule(frame)
        self._is_complete = True

    def _record(self, graph: OpGraph, frame: Frame) -> None:
        results = self._results
        schedule = make_schedule(graph, set(results.results), results.num_saved)
        schedule.is_valid = graph.is_complete and not frame.excluded
        if not schedule.is_valid:
            self._note(frame)
        elif isinstance(results.policy, NamedOps):
            for word in results.policy.missing(schedule.keys):
                frame.block.note(f"selective: the block runs no {word}, so no result of it is kept")
        schedules = frame.block.schedules
        schedules[self._signature] = schedule
        while len(schedules) > _MAX_SCHEDULES:
            del schedules[next(iter(schedules))]
        if schedule.is_valid:
            self._schedule = schedule
            for position in schedule.skipped:
                results.release(schedule.keys[position], frame)

    def _drop_schedule(self, frame: Frame) -> None:
        """Is called when a call does not follow its schedule: all that is not kept will be recomputed."""
        block, schedule = frame.block, self._schedule
        known: OpSchedule | None = block.schedules.get(self._signature)
        if schedule is not None and known is schedule:
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
        policy = self._results.policy
        if isinstance(policy, NamedOps) and policy.numbered:
            frame.block.note(
                "selective: its calls, or the original forward and the recomputation, do not run the same ops, or not "
                "all of its ops are visible; all that is not kept is recomputed, and results named by number are not "
                "kept"
            )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Hides ops from the modes that are active now."""
        modes = [mode for mode in self._modes if not mode.is_paused]
        for mode in modes:
            mode.is_paused = True
        try:
            yield
        finally:
            for mode in modes:
                mode.is_paused = False
