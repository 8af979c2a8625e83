"""Compares a training step with the plain one, from the same state, in every bit: of a user's loop, or of a Graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import NoneType
from typing import Any, Protocol, TypeAlias, final

import torch
from torch import nn
from torch.optim import Optimizer

from graphckpt.engine.sampling import forcing_check
from graphckpt.errors import ConfigError, GraphError, RecomputeError, shown
from graphckpt.reached import StepReach
from graphckpt.training_state import ModuleTree, TrainingState
from graphckpt.tree import flatten_value, inner_tensors
from graphckpt.units import format_bytes

Values: TypeAlias = dict[str, dict[str, Any]]
"""The results of a step, by kind and by the name in messages."""

_FIX = (
    "fix: look at the policies on the block of this tensor and on those behind it, and for an op in them whose result "
    "varies from run to run"
)
UNSTABLE_FIX = (
    "fix: torch.use_deterministic_algorithms(True), since the result of a kernel varies from run to run, as that of "
    "cuDNN's attention may"
)
# Attributes that every module has say nothing, but for its mode; `forward` is what a policy replaces.
_OF_TORCH = frozenset(nn.Module().__dict__) - {"training"} | {"forward"}
# Bits are compared as integers of the same size: as numbers, NaNs would differ and zeros of either sign be equal.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# Note [The states of a comparison]
#
#     snapshot                      S        of all that a step changes
#     run                           S to A   under the policies
#     put_back                      S
#     run within plain              S to B   A is compared with B, and the next step begins with B
#
# If they differ, two more runs from S say why: C, a plain one, and one with all recomputations compared. Where C is not
# B, the step itself varies, and the policies are not the cause.


class Stateful(Protocol):
    """An object that is saved and restored by its ``state_dict``."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@final
@dataclass(frozen=True, slots=True, repr=False)
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

    def __repr__(self) -> str:
        steps = f"{self.num_steps} {'replay' if self.is_captured else 'step'}{'s' * (self.num_steps != 1)}"
        size = f"{self.num_tensors} tensors, {format_bytes(self.num_bytes)}"
        return f"bitwise equal to the plain step: {self.contents} ({steps}, {size})"


def compare(
    name: str,
    run: Callable[[], Values],
    plain: Callable[[], AbstractContextManager[None]],
    snapshot: Callable[[], StepState],
    steps: int,
    unstable_fix: str = UNSTABLE_FIX,
    uncaptured: Callable[[], AbstractContextManager[None]] = nullcontext,
    count_replays: Callable[[], int] = int,
) -> Verification:
    """Compares the results of ``run`` with those in ``plain``, from the same state, step by step."""
    num_tensors = num_bytes = 0
    contents = ""
    num_replays = count_replays()
    for number in range(1, steps + 1):
        # From where the plain step before has ended, with its gradients: an error of a policy is not carried on.
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
                what = f"two plain steps differ already: {among_plain} · {unstable_fix}"
                raise GraphError(f"{name}: step {number}: {what}")
            before.put_back()
            with uncaptured():
                cause = _cause(run)
            raise GraphError(f"{name}: step {number}: {difference} · {cause}")
        tensors = [v for values in expected.values() for v in values.values() if isinstance(v, torch.Tensor)]
        num_tensors += len(tensors)
        num_bytes += sum(map(_num_bytes, tensors))
        contents = _contents(expected)
    # Plain steps are no replays: as many as there were steps, if each ran as one.
    is_captured = count_replays() == num_replays + steps
    return Verification(steps, num_tensors, num_bytes, is_captured=is_captured, contents=contents)


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
class StepState:
    """Copies of what a step changes, with names for messages: modules, optimizers, RNG states and stateful objects.

    With ``reached`` it can be put back, in place: a capture holds the addresses.
    """

    def __init__(
        self,
        roots: Mapping[str, nn.Module],
        optimizers: Iterable[Optimizer],
        stateful: Iterable[Stateful] = (),
        reached: StepReach | None = None,
    ) -> None:
        modules = [pair for root, top in roots.items() for pair in top.named_modules(prefix=root)]
        tree = ModuleTree(roots.values())
        attributes = [value for value in tree.attributes() if isinstance(value, torch.Tensor)]
        # TrainingState copies these first, in this order: by it `values` finds their copies.
        self._names = {**_named(modules, "buffer"), **_named(modules, "parameter")}
        self._state = TrainingState(
            [*self._names, *attributes], optimizers, tree=tree, reached=reached, has_gradients=reached is not None
        )
        self._attributes = {
            f"{name}.{key}".removeprefix("."): value
            for name, module in modules
            for key, value in module.__dict__.items()
            if key not in _OF_TORCH and isinstance(value, (int, float, str, NoneType))
        }
        self._stateful = [(each, copy.deepcopy(each.state_dict())) for each in stateful]

    def add(self, optimizer: Optimizer) -> None:
        # With the parameters of modules outside of the model, such as a head.
        self._state.add(optimizer)

    def values(self) -> Values:
        assert self._state.random is not None
        cpu, devices, host = self._state.random
        random = {f"RNG state {number}": t for number, t in enumerate([cpu, *(t for _, t in devices)])}
        on_host = {f"RNG state of {library}": number for library, number in host.fingerprints().items()} if host else {}
        values: Values = {"parameter": {}, "buffer": {}, "optimizer state": {}}
        for (kind, name), (_, copied) in zip(self._names.values(), self._state.tensors, strict=False):
            values[kind][name] = copied
        for parameter, key, copied in self._state.optimizer_copies():
            _, name = self._names.get(parameter, ("", "a parameter"))
            values["optimizer state"][f"{name}, optimizer's {key}"] = copied
        return {**values, "attribute": self._attributes, "RNG": {**random, **on_host}}

    def put_back(self) -> bool:
        """Puts everything back; returns whether that has removed states of optimizers."""
        has_removed = self._state.restore()
        for each, state in self._stateful:
            # A copy, as it may be put back again, and objects keep the lists and dicts that they load.
            each.load_state_dict(copy.deepcopy(state))
        return has_removed


def _named(modules: Iterable[tuple[str, nn.Module]], kind: str) -> dict[torch.Tensor, tuple[str, str]]:
    """Returns the kind of each tensor and its first name: tied weights have several."""
    names: dict[torch.Tensor, tuple[str, str]] = {}
    for name, module in modules:
        for key, tensor in getattr(module, f"_{kind}s").items():
            if tensor is not None:
                names.setdefault(tensor, (kind, f"{name}.{key}".removeprefix(".")))
    return names


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
    # An object is not copied, and would be equal to itself whatever the step has done to it.
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


def _dtype_and_shape(tensor: torch.Tensor) -> str:
    where = "" if tensor.device.type == "cpu" else f" on {tensor.device}"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{where}"


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.nbytes if tensor.layout is torch.strided else sum(map(_num_bytes, inner_tensors(tensor)))
