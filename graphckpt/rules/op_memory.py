"""The op results that one call of a block keeps, and the second run that is handed them.

::

    first run     addmm -> pow -> mul -> add -> tanh -> mul -> addmm      kept: addmm, tanh
    second run    (addmm)  -      -      -     (tanh)   mul               handed back: in brackets

What only leads up to a kept result, or comes after all that autograd saves, is not run again: the second run carries a
tensor without values in its place, which nothing may read. A result that the second run would not ask for is not kept.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphckpt._compat import WithoutValues, pytree, version_sharing_detach
from graphckpt.rng import set_random_state, take_random_state
from graphckpt.rules.kept import Kept
from graphckpt.rules.op_log import Kind, Op, OpCall, OpLog
from graphckpt.rules.passes import SecondRun, running
from graphckpt.state import edited_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from graphckpt.rng import RandomState
    from graphckpt.rules.frame import Frame

    Policy = Callable[[Any, Op, Any, dict[str, Any], int], bool]
    """Called with an op's result, the op, its arguments, and how often it has been called before in the block."""


@final
class OpMemory:
    """The kept op results of one call of a block."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.results: dict[Op, dict[int, _Result]] = defaultdict(dict)
        self.storages: dict[int, tuple[Op, int]] = {}  # id of a kept result's storage: which one it is
        self.log: OpLog | None = OpLog()
        self.idle: dict[tuple[Op, int], OpCall] = {}
        """The ops that a second run can do without."""
        self.views: dict[tuple[Op, int], OpCall] = {}
        """The ops whose results are views: of a tensor without values, they have none either."""
        self.passed_over: list[tuple[Op, int]] = []
        """Chosen ops whose results are not kept, as earlier calls of the block had no use for them."""
        self._modes: list[_Counting] = []

    def first_run(self, frame: Frame) -> AbstractContextManager[None]:
        """Returns the context that keeps the chosen results."""
        return self._in_force(_Keep(self, frame))

    def second_run(self, frame: Frame) -> AbstractContextManager[None]:
        """Returns the context that hands them back."""
        run = running.get()
        skips = isinstance(run, SecondRun) and run.frame is frame and run.stops_early
        return self._in_force(_HandBack(self, frame, skips=skips))

    def saves(self, tensor: torch.Tensor) -> None:
        """Autograd saves a tensor of the first run."""
        if self.log is not None:
            self.log.saves(tensor)

    @contextmanager
    def _in_force(self, mode: _Counting) -> Iterator[None]:
        self._modes.append(mode)
        try:
            with mode:
                yield
        finally:
            self._modes.remove(mode)  # it holds this object: a cycle would keep what it keeps alive

    def forget_edited(self, func: Op, args: Any, kwargs: dict[str, Any]) -> None:
        """Forgets a kept result that ``func`` edits, also through a view that does not share its version counter.

        GRU edits what ``unsafe_chunk`` returns, which is such a view.
        """
        for tensor in edited_by(func, args, kwargs):
            func_and_number = self.storages.get(id(tensor.untyped_storage()))
            if func_and_number is not None:
                kept, number = func_and_number
                self.results[kept].pop(number, None)

    def settle(self, frame: Frame) -> None:
        """Forgets the results that the block edited in place after they were kept, and those of no use."""
        self.storages.clear()
        for results in self.results.values():
            for number, result in list(results.items()):
                if result.is_edited():
                    del results[number]
                elif frame.outer is not None or frame.group is not None:
                    result.versions.clear()  # what is around the block keeps it, or a store, and sees edits itself
        log, self.log = self.log, None
        if log is not None and log.is_whole and not frame.holes:
            self._leave_out(log, frame)

    def _leave_out(self, log: OpLog, frame: Frame) -> None:
        """Finds the ops that a second run can do without."""
        needed = log.needed(lambda call: call.number in self.results.get(call.func, ()))
        for number, call in enumerate(log.calls[: log.num_saving]):
            key = call.func, call.number
            if call.is_view:
                self.views[key] = call
            elif number not in needed:
                self.idle[key] = call
            elif key in self.passed_over:
                frame.site.unneeded[key] = False  # this call is unlike those before
        for number, call in enumerate(log.calls):
            result = self.results.get(call.func, {}).get(call.number)
            if result is None or result.random is not None or (number in needed and number < log.num_saving):
                continue
            frame.site.unneeded.setdefault((call.func, call.number), True)
            if frame.stops_early:
                del self.results[call.func][call.number]
                result.let_go(frame)

    def run_all(self) -> bool:
        """Has the next second run leave nothing out; returns whether that is any different."""
        left_out = bool(self.idle)
        self.idle.clear()
        self.views.clear()
        return left_out

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Lets ops run unseen by the modes that are in force now."""
        modes = [mode for mode in self._modes if not mode.is_paused]
        for mode in modes:
            mode.is_paused = True
        try:
            yield
        finally:
            for mode in modes:
                mode.is_paused = False


@dataclass(frozen=True, slots=True)
class _Result:
    leaves: list[Any]
    spec: Any
    versions: list[tuple[torch.Tensor, int]]
    random: RandomState | None  # after an op that draws: the second run must not lose its place in the stream

    def is_edited(self) -> bool:
        return any(tensor._version != version for tensor, version in self.versions)

    def take(self) -> list[Any] | None:
        if self.is_edited():
            return None  # by code after the block: the op runs again
        taken = [leaf.take() if isinstance(leaf, Kept) else leaf for leaf in self.leaves]
        edited = any(isinstance(leaf, Kept) and value is None for leaf, value in zip(self.leaves, taken, strict=True))
        return None if edited else taken

    def let_go(self, frame: Frame) -> None:
        for leaf in self.leaves:
            if isinstance(leaf, Kept):
                leaf.let_go(frame)


class _Counting(TorchDispatchMode):
    def __init__(self, memory: OpMemory, frame: Frame) -> None:
        super().__init__()
        self._memory = memory
        self._frame = frame
        self._calls: dict[Op, int] = defaultdict(int)
        self.is_paused = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        if func is DETACH:  # the hooks of the two runs detach unlike often
            return args[0].twin() if isinstance(args[0], WithoutValues) else func(*args, **kwargs)
        number = self._calls[func]
        self._calls[func] = number + 1
        return self._call(func, number, args, kwargs)

    def _call(self, func: Op, number: int, args: Any, kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


@final
class _Keep(_Counting):
    def _call(self, func: Op, number: int, args: Any, kwargs: dict[str, Any]) -> Any:
        output = func(*args, **kwargs)
        memory, frame = self._memory, self._frame
        memory.forget_edited(func, args, kwargs)
        log = memory.log
        if log is not None:
            run = running.get()
            log.is_whole &= run is not None and run.frame is frame  # the ops of a block inside have slots of their own
            log.add(func, number, args, kwargs, output)
        if _makes_new_tensors(func) and memory.policy(output, func, args, kwargs, number):
            if frame.outer is None and frame.site.unneeded.get((func, number), False):
                memory.passed_over.append((func, number))
                return output
            leaves, spec = pytree.tree_flatten(output)
            aliases = [version_sharing_detach(x) if isinstance(x, torch.Tensor) else x for x in leaves]
            versions = [(x, x._version) for x in aliases if isinstance(x, torch.Tensor)]
            kept = [Kept(x, frame, frame.outer) if isinstance(x, torch.Tensor) else x for x in aliases]
            random = take_random_state(frame.devices) if torch.Tag.nondeterministic_seeded in func.tags else None
            for tensor, _ in versions:
                memory.storages[id(tensor.untyped_storage())] = (func, number)
            memory.results[func][number] = _Result(kept, spec, versions, random)
        return output


@final
class _HandBack(_Counting):
    def __init__(self, memory: OpMemory, frame: Frame, *, skips: bool) -> None:
        super().__init__(memory, frame)
        self._skips = skips

    def _call(self, func: Op, number: int, args: Any, kwargs: dict[str, Any]) -> Any:
        memory = self._memory
        result = memory.results[func].get(number) if func in memory.results else None
        leaves = result.take() if result is not None else None
        if result is not None and leaves is not None:
            if result.random is not None:
                set_random_state(result.random)
            return pytree.tree_unflatten(leaves, result.spec)
        if self._skips:
            call = memory.idle.get((func, number))
            if call is None and any(isinstance(arg, WithoutValues) for arg in args):
                call = memory.views.get((func, number))
            if call is not None:
                return args[0] if call.edits else _without_values(call)
        return func(*args, **kwargs)


DETACH = torch.ops.aten.detach.default
"""Is not counted: the hooks of the two runs detach unlike often."""


def _without_values(call: OpCall) -> Any:
    """Returns what an op returned, with no values in it."""
    kinds = iter(call.outputs)
    leaves = [WithoutValues.like(kind) if isinstance(kind, Kind) else kind for kind in kinds]
    return leaves[0] if call.spec is None else pytree.tree_unflatten(leaves, call.spec)


def _makes_new_tensors(func: Op) -> bool:
    """Whether the op neither edits a tensor nor returns a view: those cost nothing to run again."""
    schema = getattr(func, "_schema", None)
    return schema is not None and all(result.alias_info is None for result in schema.returns)
