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

from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, final

from graphckpt.rules.engine.execution import Recomputation, running
from graphckpt.rules.ops.kept_results import KeptResults
from graphckpt.rules.ops.modes import CachedMode, CachingMode, ScheduledCachedMode, ScheduledCachingMode
from graphckpt.rules.ops.op_graph import OpGraph
from graphckpt.rules.ops.schedule import NamedOps, make_schedule

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import TracebackType

    import torch

    from graphckpt.rules.engine.execution import RecomputableCall
    from graphckpt.rules.ops.modes import OpMode
    from graphckpt.rules.ops.schedule import OpSchedule, Policy

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
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._mode.__exit__(kind, error, trace)
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

    def original_forward(self, frame: RecomputableCall) -> AbstractContextManager[None]:
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

    def recomputation(self, frame: RecomputableCall) -> AbstractContextManager[None]:
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

    def after_forward(self, frame: RecomputableCall, *, has_failed: bool) -> None:
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

    def _record(self, graph: OpGraph, frame: RecomputableCall) -> None:
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

    def _drop_schedule(self, frame: RecomputableCall) -> None:
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

    def run_all(self, frame: RecomputableCall) -> bool:
        """Makes later recomputations skip no op. Returns whether ops may have been skipped."""
        schedule = self._schedule
        if schedule is None or not schedule.is_valid:
            return False
        schedule.is_valid = False
        self._note(frame)
        return True

    def _note(self, frame: RecomputableCall) -> None:
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
