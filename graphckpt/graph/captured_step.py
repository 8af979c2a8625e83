"""Decides for each call of a Graph's step whether it runs eagerly, is captured, or replays a capture."""

from __future__ import annotations

import gc
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import nn
from torch.backends import cuda, cudnn
from torch.nn.parallel import DistributedDataParallel

from graphckpt._compat import silence_capturable
from graphckpt.errors import GraphError
from graphckpt.graph.capture import (
    AttentionMasks,
    Capture,
    CaptureBackend,
    ModuleAttributes,
    StaticInputs,
    capture_failure,
    input_key,
)
from graphckpt.graph.config import GraphConfig
from graphckpt.graph.update import Update, clip, step_scaled, zero
from graphckpt.thread_state import take_ambient
from graphckpt.tree import CallShape, build_value, flatten_call, flatten_value
from graphckpt.units import format_bytes

# Note [From the first call to a replay]
# Of a training graph on CUDA, with batches of shape A and, later, one of shape B:
#
#     call    1  2  3         4                    5 - 9     10 - 12 (B)   13 (B)               14 (A)
#     runs    eagerly         captured, replayed   replayed  eagerly       captured, replayed   replayed
#             and recorded for `explain()`, which needs Python: these are the calls that warm up anyway
#
# Each kind of inputs and modes warms up on its own, as it may choose other kernels and make other buffers. The capture
# itself runs nothing: call 4 is a step because its first replay is.

# Calls before a capture, as in the documentation of `torch.cuda.make_graphed_callables`: DDP settles its buckets and
# communicators in its first ten.
WARM_UP, _WARM_UP_DDP = 3, 11
_MIN_REPLAYS = 3  # a capture takes the time of about ten steps: with fewer replays it was not worth it
_MAX_WASTED = 3  # captures in a row
_CUDA = (torch.device("cuda"),)

_Gradients = list[tuple[torch.Tensor, torch.Tensor]]


def _uncapturable_groups(optimizer: torch.optim.Optimizer) -> list[str | None]:
    """Returns for each group whose step reads values on the host the setting that prevents it, if there is one."""
    settings: list[str | None] = []
    for group in optimizer.param_groups:
        # Of Adam and its like, whose fused step alone still reads the step count on the host, it is "capturable".
        is_capturable = "capturable" in group and any(parameter.is_cuda for parameter in group["params"])
        setting = "capturable" if is_capturable else "fused" if "fused" in group else None
        if setting is None or not group[setting]:
            settings.append(setting)
    return settings


def _can_be_inside(optimizer: torch.optim.Optimizer, *, scaled: bool) -> bool:
    # Hooks are Python, which a replay does not run. With a scaler the step is skipped on the device, by optimizers that
    # take `found_inf`, such as fused ones; the others need the host to decide.
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    skips = getattr(optimizer, "_step_supports_amp_scaling", False)
    return not _uncapturable_groups(optimizer) and not hooks and (skips or not scaled)


@final
class _SameTensor:
    """A tensor as a key, which is equal for this tensor alone: held, as another one could get its ``id`` otherwise."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __hash__(self) -> int:
        return id(self._tensor)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameTensor) and other._tensor is self._tensor


def _value(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return _SameTensor(value)
    return tuple(value) if isinstance(value, (list, tuple)) else repr(value)


@final
class CapturedUpdate:
    """The update of a captured step: some optimizers step inside of the capture, the others after it.

    With a scaler it is all or none: an overflow is known inside only to optimizers that can skip a step.
    """

    def __init__(self, update: Update) -> None:
        self._update = update
        optimizers = update.optimizers
        self._is_scaled = update.scaler is not None and update.scaler.is_enabled()
        self.inside = [each for each in optimizers if _can_be_inside(each, scaled=self._is_scaled)]
        if self._is_scaled and len(self.inside) < len(optimizers):
            self.inside = []
        self.outside = [optimizer for optimizer in optimizers if optimizer not in self.inside]
        for optimizer in self.inside:
            silence_capturable(optimizer)
        self._rates: dict[tuple[int, int], torch.Tensor] = {}  # by optimizer and group; a capture has their addresses
        self._num_skipped: torch.Tensor | None = None  # on the device: steps counted that the scaler has skipped inside

    def before(self) -> None:
        self._update.begin()
        for number, optimizer in enumerate(self.inside):
            for position, group in enumerate(optimizer.param_groups):
                if "lr" not in group:
                    continue
                # A tensor from the first call on, and not from the capture on: fused and capturable optimizers round a
                # rate in a tensor differently from a float, and all calls must be one sequence. A scheduler either
                # fills the tensor or replaces it, such as by a float: then its value is copied into the one whose
                # address a capture has.
                rate, tensor = group["lr"], self._rates.get((number, position))
                if tensor is None:
                    device = next((p.device for p in group["params"]), torch.device("cpu"))
                    tensor = torch.as_tensor(rate, dtype=torch.float32).to(device, copy=True)
                    self._rates[number, position] = tensor
                elif rate is not tensor:
                    tensor.copy_(rate) if isinstance(rate, torch.Tensor) else tensor.fill_(float(rate))
                group["lr"] = tensor

    def work(self) -> tuple[_Gradients, torch.Tensor | None]:
        """Steps the captured optimizers. Returns the gradients for the others, and the scale before it was updated."""
        scaler, scale = self._update.scaler, None
        if scaler is not None and self._is_scaled and self.inside:
            step_scaled(scaler, self.inside)
            scale = scaler._scale.clone()  # type: ignore[union-attr]  # get_scale() waits for the device
            scaler.update()
        else:
            for optimizer in self.inside:
                clip(optimizer)
                optimizer.step()
        for optimizer in self.inside:
            zero(optimizer)
        gradients = [
            (p, p.grad) for o in self.outside for group in o.param_groups for p in group["params"] if p.grad is not None
        ]
        # `after` attaches them in each replay. If they stayed, the next capture would add to them.
        for parameter, _ in gradients:
            parameter.grad = None
        return gradients, scale

    def after(self, result: tuple[_Gradients, torch.Tensor | None]) -> None:
        gradients, scale = result
        update = self._update
        if self.outside:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            if not update.step(self.outside):
                return
        elif scale is not None and update.scaler is not None:
            is_skipped: torch.Tensor = update.scaler._scale < scale  # type: ignore[operator]
            if any(scheduler is not None for scheduler in update.schedulers):
                if bool(is_skipped):
                    return  # the step was skipped inside, and the schedule waits too
            else:  # to ask here would hold up the host in every step
                before = self._num_skipped
                self._num_skipped = is_skipped.long() if before is None else before + is_skipped
        update.schedule()

    def count_steps(self) -> None:
        """Takes the steps that were skipped off the count."""
        if self._num_skipped is not None:
            self._update.num_steps -= int(self._num_skipped)
            self._num_skipped = None

    def abandon(self) -> None:
        self._update.abandon()

    def settings(self) -> tuple[Hashable, ...]:
        """Returns the constants of a capture: settings of groups except learning rates, and of the scaler."""
        scaler = self._update.scaler
        scaling: tuple[Hashable, ...] = ()
        if scaler is not None and self._is_scaled:
            scaling = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
        return scaling + tuple(
            (key, _value(value))
            for optimizer in self.inside
            for group in optimizer.param_groups
            for key, value in group.items()
            if key not in ("params", "lr", "initial_lr")
        )

    def states(self) -> list[Any]:
        """Returns the objects that hold the optimizers' states: loading a state replaces them."""
        return [optimizer.state for optimizer in self.inside]


@dataclass(frozen=True, slots=True)
class _CachedCapture:
    capture: Capture
    inputs: StaticInputs
    constants: Any
    """The objects whose identity is baked in."""


@dataclass(slots=True)
class _CallKind:
    """Calls with the same kind of inputs, in the same modes."""

    num_calls: int = 0
    """Those that ran eagerly to their end."""
    num_captures: int = 0
    num_replays: int = 0
    """Since the last capture."""
    num_wasted: int = 0
    """Consecutive captures that were replayed too few times to pay off."""
    masks: AttentionMasks = field(default_factory=AttentionMasks)

    def is_worth_capturing(self) -> bool:
        """Returns whether to make a capture that is needed now, which depends on those before."""
        # With `max_captures = 1` and inputs of shapes A, B, A, B, ... each call would need another capture, which
        # takes the time of ten steps. The first capture of a kind is never wasted: nothing could be replayed before.
        # So A is captured three times, and runs eagerly from the fourth time on that it would need a capture.
        if self._num_wasted_now() >= _MAX_WASTED:
            self.num_wasted = _MAX_WASTED
        return not self.is_eager

    def count_capture(self) -> None:
        self.num_wasted = self._num_wasted_now()
        self.num_captures += 1
        self.num_replays = 0

    def _num_wasted_now(self) -> int:
        is_wasted = self.num_captures > 0 and self.num_replays < _MIN_REPLAYS
        return self.num_wasted + 1 if is_wasted else 0

    @property
    def is_eager(self) -> bool:
        return self.num_wasted >= _MAX_WASTED


@final
class CapturedStep:
    """The step of one Graph, and its captures.

    The first calls of each kind are warm-up: real steps that run eagerly. The next call is captured and replayed. No
    step runs twice, and none is discarded.
    """

    def __init__(
        self,
        name: str,
        roots: Sequence[tuple[str, nn.Module]],
        backend: CaptureBackend,
        config: GraphConfig,
        update: Update,
    ) -> None:
        self.backend = backend
        self.num_captured = 0
        self.num_replays = 0
        self.reason: str | None = None
        """Why no calls are captured any more."""
        self._name = name
        self._roots = roots
        self._update = CapturedUpdate(update)
        self._modules: list[nn.Module] = []
        self._children: list[nn.Module | None] | None = None  # of the modules, when they were listed
        is_ddp = any(isinstance(module, DistributedDataParallel) for _, root in roots for module in root.modules())
        self._num_warm_up = _WARM_UP_DDP if is_ddp else WARM_UP
        self._max_captures = config.max_captures
        self._must_capture = config.capture != "auto"
        self._entries: OrderedDict[tuple[Hashable, Hashable, Hashable], _CachedCapture] = OrderedDict()
        self._kinds: dict[Hashable, _CallKind] = {}
        self._has_warned = False

    @property
    def num_cached(self) -> int:
        return len(self._entries)

    @property
    def notes(self) -> list[str]:
        kinds = self._kinds.values()
        notes = list(dict.fromkeys(kind.masks.note for kind in kinds if kind.masks.note is not None))
        num_eager = sum(kind.is_eager for kind in kinds)
        if num_eager:
            notes.append(f"{num_eager} of {len(kinds)} kinds of calls run without capture: captured too often")
        return notes

    def describe(self) -> str:
        if self.reason is not None:
            return f"none, {self.reason}"
        text = f"{self.backend.name}, {self.num_cached} {'capture' if self.num_cached == 1 else 'captures'}"
        text += f", {self.num_replays} replays"
        if (pool_bytes := self.backend.pool_bytes()) is not None:
            text += f", pool of {format_bytes(pool_bytes)}"
        if outside := self._update.outside:
            names = ", ".join(type(optimizer).__name__ for optimizer in outside)
            fixes = dict.fromkeys(f"{setting}=True" for o in outside for setting in _uncapturable_groups(o) if setting)
            text += f"; {names} steps after it" + (f" (fix: {' or '.join(fixes)})" if fixes else "")
        return "; ".join([text, *self.notes])

    def call(
        self,
        run: Callable[..., Any],
        forward_backward: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        must_run: bool = False,
    ) -> tuple[Any, bool]:
        """Runs one step. Returns its output, and whether that has separate memory, as after a replay.

        Args:
            run: The whole step, as it runs eagerly.
            forward_backward: The step without the update.
            args: Positional arguments of both.
            kwargs: Keyword arguments of both.
            must_run: The step is recorded: it must run in Python, and counts as a warm-up.
        """
        if self.reason is not None:
            return run(args, kwargs), False
        # Before the key is known: rates are tensors in each call, captured or not.
        self._update.before()
        leaves, shape = flatten_call(args, kwargs)
        inputs, cannot = input_key(leaves, shape, self.backend.device)
        if cannot is not None:
            self._refuse(cannot, None)
            self._give_up(cannot)
            return run(args, kwargs), False
        modes, identity, constants = self._fingerprint()
        key = inputs, modes, identity
        entry = self._entries.get(key)
        kind = self._kinds.setdefault((inputs, modes), _CallKind())
        if entry is not None and not must_run:
            self._entries.move_to_end(key)
            entry.inputs.load(leaves)
            return self._replay(entry, kind), True
        runs_eager = must_run or kind.num_calls < self._num_warm_up or kind.is_eager
        if not runs_eager and not kind.is_worth_capturing():
            self._stop_capturing(inputs, modes)
            runs_eager = True
        if runs_eager:
            with kind.masks.observing(), self.backend.warmup():
                output = run(args, kwargs)
            kind.num_calls += 1
            self.backend.pass_on(output)
            return output, False
        attempt = self._try_capture(forward_backward, (leaves, shape), kind, constants)
        if isinstance(attempt, str):
            # If this raises too, the error is that of the program, such as for a bad batch: the next call tries again.
            output = run(args, kwargs)
            self._give_up(attempt)
            return output, False
        kind.count_capture()
        self._entries[key] = attempt
        while len(self._entries) > self._max_captures:
            _, oldest = self._entries.popitem(last=False)
            oldest.capture.release()
        return self._replay(attempt, kind), True

    def until_replayed(self, call: Callable[[], Any]) -> None:
        replays = self.num_replays
        for _ in range(self._num_warm_up + 1):
            if self.num_replays == replays and self.reason is None:
                call()

    def count_steps(self) -> None:
        """Makes the count of steps exact, which waits for the device."""
        self._update.count_steps()

    def release(self) -> None:
        """Releases all captures; later calls start with the warm-up again."""
        self.count_steps()
        for entry in self._entries.values():
            entry.capture.release()
        self._entries.clear()
        self._kinds.clear()

    def _fingerprint(self) -> tuple[Hashable, Hashable, Any]:
        """Returns the values that the device work depends on besides its inputs.

        First the modes, each of which needs a warm-up; then what is baked into a capture, such as the addresses
        of parameters; then the objects whose identity is baked in.
        """
        modules = self._list_modules()
        tensors = [
            t for m in modules for members in (m._parameters, m._buffers) for t in members.values() if t is not None
        ]
        states = self._update.states()
        modes = (
            tuple(module.training for module in modules),
            take_ambient(_CUDA),
            torch.are_deterministic_algorithms_enabled(),
            (cuda.matmul.fp32_precision, cudnn.conv.fp32_precision),  # type: ignore[attr-defined]
            (cudnn.deterministic, cudnn.benchmark),
        )
        identity = (
            tuple((id(t), t.data_ptr(), t.requires_grad) for t in tensors),
            tuple((id(state), len(state)) for state in states),
            self._update.settings(),
        )
        return modes, identity, (tensors, states)  # so that no other object gets their identity

    def _list_modules(self) -> list[nn.Module]:
        """Returns all modules; to walk them anew takes most of a replay's time on the host."""
        if self._children is None or self._children != _children(self._modules):
            self._modules = [module for _, root in self._roots for module in root.modules()]
            self._children = _children(self._modules)
        return self._modules

    def _try_capture(
        self, forward_backward: Callable[..., Any], call: tuple[list[Any], CallShape], kind: _CallKind, constants: Any
    ) -> _CachedCapture | str:
        """Returns the reason if it fails; all that the attempt held is freed, including the error."""
        rng_state = torch.get_rng_state()
        try:
            with kind.masks.capturing():
                return self._capture(forward_backward, StaticInputs(*call), constants)
        except Exception as error:  # any error of the step or the device
            # The eager call that follows draws the numbers that the attempt has drawn on the host; on the device a
            # failed capture draws none.
            torch.set_rng_state(rng_state)
            self._update.abandon()
            why = capture_failure(error, self._roots)
            self._refuse(why, error)
        gc.collect()  # the error's frames held the step's tensors
        return why

    def _capture(self, forward_backward: Callable[..., Any], inputs: StaticInputs, constants: Any) -> _CachedCapture:
        def step() -> tuple[Any, Any]:
            output = forward_backward(inputs.args, inputs.kwargs)
            result = self._update.work()
            leaves, spec = flatten_value(output)  # detached: the autograd graph would live as long as the capture
            return build_value(spec, [x.detach() if isinstance(x, torch.Tensor) else x for x in leaves]), result

        attributes = ModuleAttributes(self._roots, self.backend.device)
        try:
            capture = self.backend.capture(step)
        except BaseException:
            attributes.restore()
            raise
        changed = attributes.changed()
        if changed is not None:
            capture.release()
            attributes.restore()
            raise GraphError(
                f"{changed}: forward changes it, which a replay would not · fix: use a buffer, modified in place"
            )
        self.num_captured += 1
        return _CachedCapture(capture, inputs, (constants, attributes))

    def _replay(self, entry: _CachedCapture, kind: _CallKind) -> Any:
        entry.capture.replay()
        self.num_replays += 1
        kind.num_replays += 1
        output, result = entry.capture.output
        self._update.after(result)
        # Copied, as the next replay overwrites the output, which the caller may still hold then; after the update, as a
        # step without a capture returns a parameter with its value after it.
        leaves, spec = flatten_value(output)
        fresh = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return build_value(spec, fresh)

    def _stop_capturing(self, inputs: Hashable, modes: Hashable) -> None:
        """Runs calls of one kind without capture from now on, since capturing them repeatedly takes longer."""
        entries = [key for key in self._entries if key[:2] == (inputs, modes)]
        for key in entries:
            self._entries.pop(key).capture.release()
        if entries:
            why = "settings baked into a capture change between calls, such as an optimizer's betas or momentum"
            fix = "keep them fixed (cycle_momentum=False for OneCycleLR and CyclicLR)"
        else:
            why = f"more than max_captures={self._max_captures} kinds of inputs alternate"
            fix = "pad batches to fewer shapes, or set a larger config.max_captures"
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{self._name}: the step was captured {_MAX_WASTED} times in a row for fewer than "
                f"{_MIN_REPLAYS} replays: {why}; such calls run without capture · fix: {fix}",
                stacklevel=5,
            )

    def _refuse(self, why: str, error: Exception | None) -> None:
        """Raises the reason as an error if the step has to be captured."""
        if self._must_capture:
            raise GraphError(f"{self._name}: the step cannot be captured: {why}") from error

    def _give_up(self, why: str) -> None:
        self.release()
        self.reason = why
        text = f"{self._name}: the step cannot be captured: {why}"
        warnings.warn(f"{text} · the step runs without capture", stacklevel=5)


def _children(modules: Sequence[nn.Module]) -> list[nn.Module | None]:
    return [child for module in modules for child in module._modules.values()]
