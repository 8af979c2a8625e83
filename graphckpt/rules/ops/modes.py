"""Dispatch modes: keep op results in the original forward, and return them in the recomputation."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, final

import torch

from graphckpt._compat import WithoutValues
from graphckpt._compat_autocast import call_with_autocast
from graphckpt._compat_compiler import DispatchMode, never_compiled
from graphckpt.rules.engine.execution import ScheduleMismatch, running
from graphckpt.rules.ops.op_graph import CAST, METADATA_ONLY_OPS
from graphckpt.rules.ops.schedule import Action, OpSchedule

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from graphckpt.rules.engine.execution import RecomputableCall
    from graphckpt.rules.ops.kept_results import KeptResults
    from graphckpt.rules.ops.op_graph import Op
    from graphckpt.rules.ops.schedule import Key


class OpMode(DispatchMode):
    """Receives the ops of one execution of a block, but for those of the engine."""

    def __init__(self, results: KeptResults, frame: RecomputableCall) -> None:
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

    def __init__(self, results: KeptResults, frame: RecomputableCall) -> None:
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

    def __init__(self, results: KeptResults, frame: RecomputableCall, schedule: OpSchedule) -> None:
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
        frame: RecomputableCall,
        schedule: OpSchedule,
        on_mismatch: Callable[[RecomputableCall], None],
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

    def __init__(self, results: KeptResults, frame: RecomputableCall, schedule: OpSchedule, *, skips: bool) -> None:
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
