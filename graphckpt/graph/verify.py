"""Compares a training step with the plain one, from the same state, in every bit; and puts the state back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, final

import torch
from torch import nn
from torch.optim import Optimizer

from graphckpt.engine.sampling import forcing_check, without_value_checks
from graphckpt.errors import ConfigError, GraphError, RecomputeError, shown
from graphckpt.graph.capture import modules_of
from graphckpt.reached import Restore, StepReach, reached_by
from graphckpt.training_state import ModuleTree, TrainingState
from graphckpt.tree import flatten_value, inner_tensors
from graphckpt.units import format_bytes

if TYPE_CHECKING:
    from graphckpt.graph.step import Step

Values: TypeAlias = dict[str, dict[str, Any]]
"""The results of a step, by kind and by the name in messages."""


@final
@dataclass(frozen=True, slots=True)
class Verification:
    """Result of :func:`graphckpt.verify` and :meth:`graphckpt.Graph.verify`: everything compared was bitwise equal."""

    num_steps: int
    num_tensors: int
    """Of all steps."""
    num_bytes: int
    """Of all steps."""
    is_captured: bool
    """Whether the steps were replays of a capture."""
    contents: str = ""
    """The values compared after each step, such as ``"loss, 148 gradients, 2 buffers, RNG"``."""

    def __str__(self) -> str:
        steps = f"{self.num_steps} {'replay' if self.is_captured else 'step'}{'s' * (self.num_steps != 1)}"
        size = f"{self.num_tensors} tensors, {format_bytes(self.num_bytes)}"
        return f"bitwise equal to the plain step: {self.contents} ({steps}, {size})"


@without_value_checks()
def verify_graph(graph_step: Step, build: Callable[..., Any], call: Callable[[], Any], steps: int) -> Verification:
    """Runs each step twice from one state, as the Graph does it and plainly, and compares outputs and state.

    ``call`` runs a step of it on one and the same input, by its ``build``.

    With captures, the Graph runs until one is replayed before anything is compared.

    Raises:
        GraphError: Something differs. The message names the step, the tensor that differs first, and the block, op and
            line that cause it as far as they are found, or says that two plain steps differ as well.
    """
    graph_step.prepare()
    captures = graph_step.captured

    def run() -> Values:
        outputs = outputs_of(call())  # the outputs themselves are freed before the state is copied
        return {**outputs, **_GraphState(graph_step).values()}

    def snapshot() -> _GraphState:
        return _GraphState(graph_step, reached_by_graph(graph_step, build, None, "verify"))

    start = snapshot()
    try:
        num_replays = 0
        if captures is not None:
            captures.until_replayed(call)
            # Negative: at the end it is the number of compared steps that were replays, as plain ones are not.
            num_replays = -captures.num_replays
        result = compare(
            f"{graph_step.name}.verify",
            run,
            graph_step.without_policies,
            snapshot,
            steps,
            UNSTABLE_FIX,
            graph_step.without_captures,
            is_captured=lambda: captures is not None and num_replays + captures.num_replays == steps,
        )
    finally:
        if start.put_back() and captures is not None:
            captures.release()  # they go on with optimizer states that are there no more
    return result


def reached_by_graph(graph_step: Step, build: Callable[..., Any], restore: Restore, name: str) -> StepReach:
    update = graph_step.update
    model = nn.ModuleList(graph_step.roots.values())
    # Captures hold the scale: by its state it gets its old value where it is, though it did not exist before.
    others = [each for each in (*update.schedulers, update.scaler) if each is not None]
    return reached_by(build, model, restore, f"{graph_step.name}.{name}", apart_from=others)


@contextmanager
def unchanged(graph_step: Step, reached: StepReach) -> Iterator[None]:
    """Puts back, in the end, all that steps in the ``with`` block have changed."""
    start = _GraphState(graph_step, reached)
    try:
        yield
    finally:
        start.put_back()


class _Snapshot(Protocol):
    def put_back(self) -> object: ...


def compare(
    name: str,
    run: Callable[[], Values],
    plain: Callable[[], AbstractContextManager[None]],
    snapshot: Callable[[], _Snapshot],
    steps: int,
    fix_of_plain: str,
    uncaptured: Callable[[], AbstractContextManager[None]] = nullcontext,
    is_captured: Callable[[], bool] = bool,
) -> Verification:
    """Compares the results of ``run`` with those in ``plain``, from the same state, step by step."""
    num_tensors = num_bytes = 0
    contents = ""
    for number in range(1, steps + 1):
        before = snapshot()
        ours = run()
        before.put_back()
        with plain():
            expected = run()
        if (difference := _difference(ours, expected)) is not None:
            before.put_back()
            # Only now, as it takes a step: whether the policies are the cause, or the step itself varies.
            with plain():
                repeated = run()
            if (among_plain := _difference(repeated, expected)) is not None:
                what = f"two plain steps differ already: {among_plain} · {fix_of_plain}"
                raise GraphError(f"{name}: step {number}: {what}")
            before.put_back()
            with uncaptured():
                cause = _cause(run)
            raise GraphError(f"{name}: step {number}: {difference} · {cause}")
        tensors = [v for values in expected.values() for v in values.values() if isinstance(v, torch.Tensor)]
        num_tensors += len(tensors)
        num_bytes += sum(map(_num_bytes, tensors))
        contents = _contents(expected)
    return Verification(steps, num_tensors, num_bytes, is_captured=is_captured(), contents=contents)


def _cause(run: Callable[[], Values]) -> str:
    """Repeats a step with the values of all recomputations compared, and returns the first difference in them."""
    # The results show it where a gradient arrives, often in a block before the one that is wrong and has the policy.
    try:
        with forcing_check("values") as forced:
            run()
    except RecomputeError as error:
        return str(error)
    except Exception:  # that the results differ is certain, and this error must not hide it
        return _FIX
    return next(iter(forced.differences), f"the recomputations have the values of the original forwards · {_FIX}")


@final
class _GraphState:
    """Copies of the state that a step of a Graph changes. They are restored in place: a capture holds the addresses."""

    def __init__(self, graph_step: Step, reached: StepReach | None = None) -> None:
        graph_step.count_steps()
        self._step = graph_step
        self._update = update = graph_step.update
        self._num_steps = update.num_steps
        self._state = ModelState(graph_step.roots, update.optimizers, reached)
        self._schedules = [copy.deepcopy(s.state_dict()) if s is not None else None for s in update.schedulers]
        self._scaler = copy.deepcopy(update.scaler.state_dict()) if update.scaler is not None else None

    def values(self) -> Values:
        return self._state.values()

    def put_back(self) -> bool:
        self._step.count_steps()
        has_removed = self._state.state.restore()
        for scheduler, schedule in zip(self._update.schedulers, self._schedules, strict=True):
            if scheduler is not None and schedule is not None:
                scheduler.load_state_dict(schedule)  # it leaves values that it cannot copy, such as functions
        if self._update.scaler is not None and self._scaler is not None:
            self._update.scaler.load_state_dict(self._scaler)
        self._update.num_steps = self._num_steps
        return has_removed


@final
class ModelState:
    """Copies of modules, of the states of optimizers, and of RNG states, with their names in messages."""

    def __init__(
        self, roots: Mapping[str, nn.Module], optimizers: Iterable[Optimizer], reached: StepReach | None = None
    ) -> None:
        modules = [(path.removeprefix("."), module) for path, module in modules_of(roots.items())]
        parameters = _tensors_of(modules, "_parameters")
        buffers = _tensors_of(modules, "_buffers")
        tree = ModuleTree(roots.values())
        attributes = [value for value in tree.attributes() if isinstance(value, torch.Tensor)]
        tensors = [*parameters.values(), *buffers.values(), *attributes]
        how: dict[str, Any] = {"tree": tree, "reached": reached, "has_gradients": reached is not None}
        self.state = TrainingState(tensors, optimizers, **how)
        copies = [copied for _, copied in self.state.tensors]
        # In the order in which they were passed: parameters, buffers, attributes.
        self._parameters = dict(zip(parameters, copies, strict=False))
        self._buffers = dict(zip(buffers, copies[len(parameters) :], strict=False))
        self._names = {tensor: name for name, tensor in parameters.items()}
        self._attributes = {
            f"{name}.{key}".removeprefix("."): value
            for name, module in modules
            for key, value in module.__dict__.items()
            if key not in _OF_TORCH and isinstance(value, (int, float, str, NoneType))
        }

    def values(self) -> Values:
        assert self.state.random is not None
        cpu, devices, host = self.state.random
        random = {f"RNG state {number}": t for number, t in enumerate([cpu, *(t for _, t in devices)])}
        on_host = {f"RNG state of {library}": number for library, number in host.fingerprints().items()} if host else {}
        states = {
            f"{self._names.get(parameter, 'a parameter')}, optimizer's {key}": copied
            for parameter, key, copied in self.state.optimizer_copies()
        }
        return {
            "parameter": self._parameters,
            "buffer": self._buffers,
            "optimizer state": states,
            "attribute": self._attributes,
            "RNG": {**random, **on_host},
        }


def _tensors_of(modules: Iterable[tuple[str, nn.Module]], kind: str) -> dict[str, torch.Tensor]:
    """Returns each tensor under its first name: tied weights have several."""
    names: dict[torch.Tensor, str] = {}
    for name, module in modules:
        for key, tensor in getattr(module, kind).items():
            if tensor is not None:
                names.setdefault(tensor, f"{name}.{key}".removeprefix("."))
    return {name: tensor for tensor, name in names.items()}


_OF_TORCH = frozenset(nn.Module().__dict__) - {"training"} | {"forward"}


_FIX = (
    "fix: look at the policies on the block of this tensor and on those behind it, and for an op in them whose result "
    "varies from run to run"
)
UNSTABLE_FIX = (
    "fix: torch.use_deterministic_algorithms(True), since the result of a kernel varies from run to run, as that of "
    "cuDNN's attention may"
)


def outputs_of(value: Any) -> Values:
    leaves = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in flatten_value(value)[0]]
    if len(leaves) == 1 and isinstance(leaves[0], torch.Tensor) and leaves[0].numel() == 1:
        return {"loss": {"loss": leaves[0]}}
    return {"output": {f"output {number}": leaf for number, leaf in enumerate(leaves) if leaf is not None}}


def _contents(values: Values) -> str:
    """Returns the compared values in words, such as ``"loss, 148 gradients, RNG"``."""
    texts = []
    for kind, members in values.items():
        if kind in ("loss", "RNG"):
            texts.append(kind)
        elif members and kind != "attribute":
            texts.append(f"{len(members)} {kind}{'s' * (len(members) != 1)}")
    return ", ".join(texts)


def _difference(ours: Values, plain: Values) -> str | None:
    for kind in dict.fromkeys([*plain, *ours]):
        actual, expected = ours.get(kind, {}), plain.get(kind, {})
        for what in dict.fromkeys([*expected, *actual]):
            if what not in actual or what not in expected:
                return f"`{what}` is only in the {'plain step' if what in expected else 'step with policies'}"
            if (text := _difference_of(actual[what], expected[what])) is not None:
                return f"`{what}` {text}"
    return None


def _difference_of(actual: Any, plain: Any) -> str | None:
    if not isinstance(actual, torch.Tensor) or not isinstance(plain, torch.Tensor):
        return _difference_of_values(actual, plain)
    if actual.shape != plain.shape or actual.dtype != plain.dtype or actual.device != plain.device:
        return f"is {_dtype_and_shape(actual)} and in the plain step {_dtype_and_shape(plain)}"
    inner = list(zip(inner_tensors(actual), inner_tensors(plain), strict=False))
    if inner:  # a DTensor's shard, or the indices and the values of a sparse tensor
        return next((text for pair in inner if (text := _difference_of(*pair)) is not None), None)
    if actual.is_quantized:
        return None if torch.equal(actual, plain) else "differs from the plain step's"
    num_elements = actual.numel()
    actual, plain = _of_real_numbers(actual), _of_real_numbers(plain)
    different = actual.view(_INTEGERS[actual.itemsize]) != plain.view(_INTEGERS[actual.itemsize])
    if actual.is_floating_point() and different.any():
        # NaNs are equal, whichever bits of theirs an op has left; zeros of different sign are not.
        different &= ~(actual.double().isnan() & plain.double().isnan())  # few ops support the types of eight bits
    if not different.any():
        return None
    gap = float((actual.double()[different] - plain.double()[different]).abs().max())
    by = "by the sign of zero" if gap == 0 and actual.is_floating_point() else f"by up to {gap:.3g}"
    num_different = int(different.view(num_elements, -1).any(dim=1).sum())
    return f"differs from the plain step's in {num_different} of {num_elements} elements, {by}"


def _difference_of_values(actual: Any, plain: Any) -> str | None:
    if actual is plain:
        return None
    equal: Any = type(plain).__eq__
    if equal is object.__eq__ or getattr(plain, "shape", None):  # it compares identities, or returns an array
        what = f"expected tensors and numbers as outputs of the step, got {shown(plain)}"
        raise ConfigError(f"verify: {what} · fix: return the loss, or nothing")
    is_equal = actual == plain or (actual != actual and plain != plain)  # noqa: PLR0124  # NaN
    return None if is_equal else f"is {actual!r} and in the plain step {plain!r}"


def _of_real_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Returns complex numbers as pairs, and any tensor with its elements as they are in memory, one after another."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).contiguous()


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _dtype_and_shape(tensor: torch.Tensor) -> str:
    where = "" if tensor.device.type == "cpu" else f" on {tensor.device}"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{where}"


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.nbytes if tensor.layout is torch.strided else sum(map(_num_bytes, inner_tensors(tensor)))
