"""Compares a Graph's step with the plain one, from the same state, in every bit; and puts the state back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any, final

import torch

from graphckpt.engine.sampling import without_value_checks
from graphckpt.errors import GraphError
from graphckpt.graph.capture import modules_of
from graphckpt.training_state import ModuleTree, TrainingState
from graphckpt.tree import flatten_value
from graphckpt.units import format_bytes

if TYPE_CHECKING:
    from graphckpt.graph.step import Step


@final
@dataclass(frozen=True, slots=True)
class Verification:
    """What :meth:`graphckpt.Graph.verify` has compared, and found equal in every bit."""

    num_steps: int
    num_tensors: int
    num_bytes: int
    is_captured: bool
    """Whether the steps were replays of a capture."""

    def __str__(self) -> str:
        steps = f"{self.num_steps} {'replays' if self.is_captured else 'steps'}"
        return f"bitwise equal to the plain step: {steps}, {self.num_tensors} tensors, {format_bytes(self.num_bytes)}"


@without_value_checks()
def verify(graph_step: Step, call: Callable[[], Any], steps: int) -> Verification:
    """Runs each step twice from one state, as the Graph does it and plainly, and compares outputs and state.

    With captures, the Graph runs until one is replayed before anything is compared.

    Raises:
        GraphError: Something differs. The message names the step, the block and the tensor that differ first, or says
            that two plain steps differ as well.
    """
    graph_step.prepare()
    captures = graph_step.captured

    def run() -> dict[str, Any]:
        copies = {
            f"output {number}": leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
            for number, leaf in enumerate(flatten_value(call())[0])
        }  # the outputs themselves are freed before the state is copied
        return {**copies, **_State(graph_step).values()}

    start = _State(graph_step)
    try:
        num_tensors = num_bytes = num_replays = 0
        if captures is not None:
            captures.until_replayed(call)
            num_replays = -captures.num_replays
        for number in range(1, steps + 1):
            before = _State(graph_step)
            ours = run()
            before.put_back()
            with graph_step.without_policies():
                plain = run()
            difference = _difference(ours, plain)
            if difference is not None:
                before.put_back()
                with graph_step.without_policies():
                    repeated = run()
                what = f"{difference} · {_FIX}"
                if (among_plain := _difference(repeated, plain)) is not None:
                    what = f"two plain steps differ already: {among_plain} · {_FIX_OF_PLAIN}"
                raise GraphError(f"{graph_step.name}.verify: step {number}: {what}")
            tensors = [value for value in plain.values() if isinstance(value, torch.Tensor)]
            num_tensors += len(tensors)
            num_bytes += sum(tensor.nbytes for tensor in tensors)
        num_replays += captures.num_replays if captures is not None else 0
        return Verification(steps, num_tensors, num_bytes, is_captured=num_replays == steps)
    finally:
        if start.put_back() and captures is not None:
            captures.release()  # they go on with optimizer states that are there no more


@contextmanager
def unchanged(graph_step: Step) -> Iterator[None]:
    """Puts back, in the end, all that steps in the ``with`` block have changed."""
    start = _State(graph_step)
    try:
        yield
    finally:
        start.put_back()


@final
class _State:
    """Copies of all that a step changes. They are put back in place: a capture holds the addresses."""

    def __init__(self, graph_step: Step) -> None:
        graph_step.count_steps()
        roots, update = graph_step.roots, graph_step.update
        self._step = graph_step
        self._update = update
        self._num_steps = update.num_steps
        named = {
            f"{path}.{key}": tensor
            for path, module in modules_of(roots.items())
            for key, tensor in {**module._parameters, **module._buffers}.items()
            if tensor is not None
        }
        tree = ModuleTree(roots.values())
        attributes = [value for value in tree.attributes() if isinstance(value, torch.Tensor)]
        self._state = TrainingState([*named.values(), *attributes], update.optimizers, tree=tree)
        self._tensors = {name: copied for name, (_, copied) in zip(named, self._state.tensors, strict=False)}
        owners: dict[torch.Tensor, str] = {}
        for name, tensor in named.items():
            owners.setdefault(tensor, name)
        for parameter, key, copied in self._state.optimizer_copies():
            self._tensors[f"{owners.get(parameter, 'a parameter')}, optimizer's {key}"] = copied
        self._plain = {
            f"{name}.{key}": value
            for name, module in modules_of(roots.items())
            for key, value in module.__dict__.items()
            if key not in _OF_TORCH and isinstance(value, (int, float, str, NoneType))
        }
        self._schedules = [copy.deepcopy(s.state_dict()) if s is not None else None for s in update.schedulers]
        self._scaler = copy.deepcopy(update.scaler.state_dict()) if update.scaler is not None else None

    def values(self) -> dict[str, Any]:
        assert self._state.random is not None
        cpu, devices, host = self._state.random
        random = {f"RNG state {number}": t for number, t in enumerate([cpu, *(t for _, t in devices)])}
        on_host = {f"RNG state of {library}": number for library, number in host.fingerprints().items()} if host else {}
        return {**self._tensors, **self._plain, **random, **on_host}

    def put_back(self) -> bool:
        self._step.count_steps()
        has_removed = self._state.restore()
        for scheduler, schedule in zip(self._update.schedulers, self._schedules, strict=True):
            if scheduler is not None and schedule is not None:
                scheduler.load_state_dict(schedule)  # what it cannot copy, such as a function, it leaves as it is
        if self._update.scaler is not None and self._scaler is not None:
            self._update.scaler.load_state_dict(self._scaler)
        self._update.num_steps = self._num_steps
        return has_removed


_OF_TORCH = frozenset(torch.nn.Module().__dict__) - {"training"} | {"forward"}


_FIX = "fix: look at the policies on this block, or for an op in it whose result varies from run to run"
_FIX_OF_PLAIN = (
    "fix: torch.use_deterministic_algorithms(True), since the result of a kernel varies from run to run, as that of "
    "cuDNN's attention may"
)


def _difference(ours: Mapping[str, Any], plain: Mapping[str, Any]) -> str | None:
    for what in dict.fromkeys([*plain, *ours]):
        if what not in ours or what not in plain:
            return f"`{what}` is only in the {'plain' if what in plain else 'own'} step"
        a, b = ours[what], plain[what]
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            if a.shape != b.shape or a.dtype != b.dtype:
                return f"`{what}` is {_dtype_and_shape(a)} and in the plain step {_dtype_and_shape(b)}"
            if not torch.equal(a.nan_to_num(), b.nan_to_num()) or not torch.equal(a.isnan(), b.isnan()):
                gap = (a.double() - b.double()).abs()
                return (
                    f"`{what}` differs from the plain step's in {int((a != b).sum())} of {a.numel()} elements, by up "
                    f"to {float(gap.max()):.3g}"
                )
        elif a != b:
            return f"`{what}` is {a!r} and in the plain step {b!r}"
    return None


def _dtype_and_shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
