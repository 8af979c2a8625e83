"""A Graph's step as a capture needs it: what the device does, apart from what Python does in every call."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, final
from weakref import WeakMethod

import torch
from torch import nn
from torch.backends import cuda, cudnn
from torch.nn.parallel import DistributedDataParallel

from graphckpt._compat import silence_capturable
from graphckpt.capture.choose import backend_for
from graphckpt.capture.learning_rates import LearningRates, capturable_fix, constant_settings, is_capturable
from graphckpt.capture.manager import CaptureManager, Program
from graphckpt.engine.call_state import take_ambient
from graphckpt.graph.config import GraphConfig
from graphckpt.graph.update import Update, clip, step_scaled, zero
from graphckpt.units import format_bytes

_WARM_UP, _WARM_UP_DDP = 3, 11  # calls before a capture; DDP settles its buckets and communicators in its first ten
_CUDA = (torch.device("cuda"),)

_Gradients = list[tuple[torch.Tensor, torch.Tensor]]


@final
class CapturedUpdate:
    """The update of a captured step: some optimizers step inside of the capture, the others after it.

    With a scaler it is all or none: an overflow is known inside only to optimizers that can skip a step by themselves.
    """

    def __init__(self, update: Update) -> None:
        self._update = update
        optimizers = update.optimizers
        scaled = update.scaler is not None and update.scaler.is_enabled()
        able = [_can_be_inside(optimizer, scaled=scaled) for optimizer in optimizers]
        if scaled and not all(able):
            able = [False] * len(able)
        self.inside = [optimizer for optimizer, is_able in zip(optimizers, able, strict=True) if is_able]
        self.outside = [optimizer for optimizer, is_able in zip(optimizers, able, strict=True) if not is_able]
        for optimizer in self.inside:
            silence_capturable(optimizer)
        self._rates = LearningRates(self.inside)
        self._num_skipped: torch.Tensor | None = None  # on the device: steps counted that the scaler has skipped inside

    def before(self) -> None:
        """Gradients that others left are dropped, and learning rates that others set are applied."""
        self._update.begin()
        self._rates.update_tensors()

    def work(self) -> tuple[_Gradients, torch.Tensor | None]:
        """Steps what is inside. Returns the gradients for what is outside, and the scale before it was updated."""
        scaler, scale = self._update.scaler, None
        if scaler is not None and scaler.is_enabled() and self.inside:
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
        for parameter, _ in gradients:
            parameter.grad = None
        return gradients, scale

    def after(self, kept: tuple[_Gradients, torch.Tensor | None]) -> None:
        """Steps what is outside, and the schedules."""
        gradients, scale = kept
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
        """Drops the gradients of half a step."""
        self._update.abandon()

    def settings(self) -> tuple[Hashable, ...]:
        """Returns the values that a capture holds as constants."""
        scaler = self._update.scaler
        if scaler is None or not scaler.is_enabled():
            return constant_settings(self.inside)
        numbers = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
        return *constant_settings(self.inside), numbers

    def states(self) -> list[Any]:
        """Returns the objects that hold the optimizers' states: loading a state replaces them."""
        return [optimizer.state for optimizer in self.inside]


@final
class GraphProgram(Program):
    """One Graph's step."""

    def __init__(
        self,
        name: str,
        roots: Sequence[tuple[str, nn.Module]],
        update: CapturedUpdate,
        run: WeakMethod[Callable[..., Any]],
        forward_backward: WeakMethod[Callable[..., Any]],
    ) -> None:
        self.name = name
        self.build: Callable[..., Any] | None = None
        self.update = update
        self._roots = roots
        self._known: list[nn.Module] = []
        self._children: list[nn.Module | None] | None = None  # of those, when they were listed
        self._run = run
        self._forward_backward = forward_backward

    def roots(self) -> Sequence[tuple[str, nn.Module]]:
        """Returns the modules of the step."""
        return self._roots

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs the whole step as it is."""
        return self._called(self._run, args, kwargs)

    def _called(self, method: WeakMethod[Callable[..., Any]], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        function = method()
        assert function is not None  # the step that holds this program calls it
        return function(self.build, args, kwargs)

    def pre_replay(self) -> None:
        """Applies what was changed outside."""
        self.update.before()

    def body(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Runs `build`, and what of the update can be captured."""
        output = self._called(self._forward_backward, args, kwargs)
        return output, self.update.work()

    def post_replay(self, kept: Any) -> None:
        """Does the rest of the update."""
        self.update.after(kept)

    def abandon(self) -> None:
        """Drops what half a step has left behind."""
        self.update.abandon()

    def fingerprint(self) -> tuple[Hashable, Hashable, Any]:
        """Returns the active modes, the identity of tensors and optimizer states, and these themselves."""
        modules = self._modules()
        tensors = [t for m in modules for own in (m._parameters, m._buffers) for t in own.values() if t is not None]
        states = self.update.states()
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
            self.update.settings(),
        )
        return modes, identity, (tensors, states)  # held, so that no other object gets their identity

    def _modules(self) -> list[nn.Module]:
        """Returns all modules; to walk them anew takes most of a replay's time on the host."""
        if self._children is None or self._children != _children(self._known):
            self._known = [module for _, root in self._roots for module in root.modules()]
            self._children = _children(self._known)
        return self._known


@final
class CapturedStep:
    """The step of one Graph, and its captures."""

    def __init__(self, program: GraphProgram, captures: CaptureManager) -> None:
        self._program = program
        self.captures = captures

    @classmethod
    def make(
        cls,
        name: str,
        roots: Sequence[tuple[str, nn.Module]],
        config: GraphConfig,
        update: Update,
        run: Callable[..., Any],
        work: Callable[..., Any],
    ) -> CapturedStep | None:
        """Gets ready to record, where ``config.capture`` asks for it and the device can; else returns ``None``.

        Raises:
            ConfigError: ``config.capture`` asks for what the device cannot.
        """
        devices = list(dict.fromkeys(p.device for _, root in roots for p in root.parameters()))
        backend = backend_for(config.capture, devices)
        if backend is None:
            return None
        program = GraphProgram(name, roots, CapturedUpdate(update), WeakMethod(run), WeakMethod(work))
        is_ddp = any(isinstance(module, DistributedDataParallel) for _, root in roots for module in root.modules())
        captures = CaptureManager(
            program,
            backend,
            num_warm_up=_WARM_UP_DDP if is_ddp else _WARM_UP,
            max_captures=config.max_captures,
            must_capture=config.capture != "auto",
        )
        return cls(program, captures)

    def call(
        self, build: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], *, must_run: bool
    ) -> tuple[Any, bool]:
        """Runs one step. See :meth:`graphckpt.capture.CaptureManager.call`."""
        self._program.build = build
        try:
            return self.captures.call(args, kwargs, must_run=must_run)
        finally:
            self._program.build = None  # it is a method of the Graph, which holds this

    def describe(self) -> str:
        """Says how many captures there are, what they take, which optimizers step outside of them; or why none."""
        captures = self.captures
        if captures.reason is not None:
            return f"none, {captures.reason}"
        num_held = captures.num_held
        text = f"{captures.backend.name}, {num_held} {'capture' if num_held == 1 else 'captures'}"
        text += f", {captures.num_replays} replays"
        if (pool_bytes := captures.backend.pool_bytes()) is not None:
            text += f", pool of {format_bytes(pool_bytes)}"
        if self._program.update.outside:
            names = ", ".join(type(optimizer).__name__ for optimizer in self._program.update.outside)
            fixes = dict.fromkeys(fix for o in self._program.update.outside if (fix := capturable_fix(o)) is not None)
            text += f"; {names} steps after it" + (f" (fix: {' or '.join(fixes)})" if fixes else "")
        return "; ".join([text, *captures.notes])

    def count_steps(self) -> None:
        """Makes the count of steps exact, which waits for the device."""
        self._program.update.count_steps()

    def release(self) -> None:
        """Frees the memory of the captures."""
        self.count_steps()
        self.captures.release()


def _children(modules: Sequence[nn.Module]) -> list[nn.Module | None]:
    return [child for module in modules for child in module._modules.values()]


def _can_be_inside(optimizer: torch.optim.Optimizer, *, scaled: bool) -> bool:
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    skips = getattr(optimizer, "_step_supports_amp_scaling", False)
    return is_capturable(optimizer) and not hooks and (skips or not scaled)
