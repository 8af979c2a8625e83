"""A model under a policy, interrupted steps, and what must hold after each of them."""

from __future__ import annotations

import copy
import gc
import random
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from fuzz.bench import DEVICE, frozen, same
from helpers.hard_modules import B, BatchNorm, Counts, D, EditsItsInput, Mlp, Noise, rng_state
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import graphckpt
from graphckpt import Segments, Selective
from graphckpt.ledger.recorder import Recorder
from graphckpt.rules.engine.execution import running
from interrupts.moments import AfterSeconds, AtContext, AtEvent, Moment, count_events

_BLOCKS = "[1-5]"
_SMALL = {"min_elements": 1}


def _keeps_some(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> bool:
    return "mm" in str(op) or "dropout" in str(op)


POLICIES: dict[str, Callable[[], dict[str, Any]]] = {
    "full": lambda: {_BLOCKS: True},
    "selective": lambda: {_BLOCKS: Selective("matmul")},
    "selective, by a function": lambda: {_BLOCKS: Selective(_keeps_some)},
    "joined": lambda: {"1": True, "[2-5]": "joined"},
    "excluded children": lambda: {_BLOCKS: True, "re:[1-5]\\.(drop|norm|linear)": False},
    "nested": lambda: {"": True, "[24]": Selective("matmul"), "3": False},
    "segments": lambda: {"": Segments("log")},
    "slab": lambda: {_BLOCKS: {"activation_checkpointing": True, "contiguous": True, **_SMALL}},
    "disk": lambda: {_BLOCKS: {"activation_checkpointing": True, "offload": "disk", **_SMALL}},
    "disk, slab, selective": lambda: {
        _BLOCKS: {"activation_checkpointing": "selective", "offload": "disk", "contiguous": True, **_SMALL}
    },
    "host": lambda: {
        _BLOCKS: {"activation_checkpointing": True, "offload": True, **_SMALL},
        "[1-5].drop": False,
    },
    "slab alone": lambda: {"": {"contiguous": True, **_SMALL}},
    "disk, joined": lambda: {
        "": {"offload": "disk", **_SMALL},
        "1": {"activation_checkpointing": True},
        "[2-5]": {"activation_checkpointing": "joined"},
    },
}
RIVAL = "torch.utils.checkpoint"
"""PyTorch's own checkpoint, for comparison."""


class TorchCheckpointed(nn.Module):
    """A block under PyTorch's own checkpoint."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return torch_checkpoint(self.inner, x, use_reentrant=False)


def make_model(policy: str) -> nn.Module:
    """Builds the model, always with the same weights."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        blocks: list[nn.Module] = [Mlp(), BatchNorm(), Counts(), Noise(), EditsItsInput()]
        if policy == RIVAL:
            blocks = [TorchCheckpointed(block) for block in blocks[:-1]]  # it refuses arguments that are edited
        return nn.Sequential(nn.Linear(D, D), *blocks, nn.Linear(D, 4)).train().to(DEVICE)


def state_of(model: nn.Module) -> dict[str, Any]:
    """Returns copies of buffers and attributes."""
    found = {f"buffer {name}": frozen(buffer) for name, buffer in model.named_buffers()}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if not key.startswith("_") and key != "forward":
                found[f"attribute {name}.{key}"] = frozen(value)
    return found


def copy_state(source: nn.Module, target: nn.Module) -> None:
    """Gives ``target`` the parameters, buffers and attributes of ``source``."""
    target.load_state_dict(source.state_dict())
    for module, twin in zip(source.modules(), target.modules(), strict=True):
        for key, value in vars(module).items():
            if not key.startswith("_") and key != "forward":
                twin.__dict__[key] = copy.deepcopy(value)


def left_active() -> list[str]:
    """Names what is active that was not before."""
    found = []
    if not torch.is_grad_enabled():
        found.append("gradients are off")
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        found.append("saved-tensor hooks")
    if torch.overrides._get_current_function_mode_stack():
        found.append("a function mode")
    if torch.utils._python_dispatch._len_torch_dispatch_stack():
        found.append("a dispatch mode")
    if torch.is_autocast_enabled(DEVICE.type):
        found.append("autocast")
    if running.get() is not None:
        found.append("a run")
    if graphckpt.blocks.is_recomputing():
        found.append("is_recomputing()")
    return found


def _are_of_explain() -> bool:
    """Whether the active hooks are those that record the first forward for `explain()`.

    They change nothing, and the next forward of the model removes them.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return isinstance(getattr(hooks[0], "__self__", None), Recorder)


def clear_what_is_left() -> None:
    """Puts PyTorch's state of this thread back, so that the next trial begins well."""
    torch.set_grad_enabled(True)
    while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    while torch.overrides._get_current_function_mode_stack():
        torch.overrides._pop_mode()
    while torch.utils._python_dispatch._len_torch_dispatch_stack():
        torch.utils._python_dispatch._pop_mode()
    torch.set_autocast_enabled(DEVICE.type, False)
    for _ in range(torch.autocast_increment_nesting()):
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    running.set(None)


@dataclass(frozen=True)
class Fault:
    """What was wrong after an interrupt."""

    policy: str
    number: int | float
    is_fresh: bool
    where: str
    what: tuple[str, ...]

    @property
    def kind(self) -> tuple[str, ...]:
        """What faults with one cause have in common, as a rule."""
        return tuple(sorted({what if what.startswith("left") else what.partition(":")[0] for what in self.what}))

    def __str__(self) -> str:
        fresh = "first" if self.is_fresh else "later"
        return f"{self.policy}, {fresh} step, at {self.number}: {'; '.join(self.what)} · {self.where}"


class Trial:
    """Interrupted steps of one model under one policy."""

    def __init__(self, policy: str, seed: int, *, autocast: bool = False) -> None:
        self.policy = policy
        self._rng = random.Random(seed)
        self._autocast = autocast
        self._loss: Tensor | None = None
        self._after_forward: dict[str, Any] | None = None
        self._handle: graphckpt.Handle | None = None
        self._begin()
        self._step()
        self._events = {True: 0, False: count_events(self._step)}
        begin = time.perf_counter()
        self._step()
        self._seconds = time.perf_counter() - begin
        self._begin()
        self._events[True] = count_events(self._step)
        self.swallowed = 0
        self._ignored: list[str] = []
        self.outside = 0

    def _begin(self) -> None:
        """Makes a new model."""
        if self._handle is not None:
            self._handle.remove()
        self._model = make_model(self.policy)
        self._handle = None if self.policy == RIVAL else graphckpt.apply(self._model, POLICIES[self.policy]())
        self._is_fresh = True

    def close(self) -> None:
        """Takes the policies off."""
        if self._handle is not None:
            self._handle.remove()

    def _step(self) -> None:
        self._after_forward = None
        x = torch.linspace(-1, 1, B * D, device=DEVICE).view(B, D).requires_grad_()
        with torch.autocast(DEVICE.type, torch.bfloat16) if self._autocast else nullcontext():
            y = self._model(x)
        self._loss = y.float().pow(2).mean()
        self._after_forward = state_of(self._model) | {"RNG state": rng_state(DEVICE.type)}
        self._loss.backward()

    def num_events(self, *, is_fresh: bool) -> int:
        """Returns the number of moments of the first step of a model, or of a later one."""
        return self._events[is_fresh]

    def num_contexts(self, filename: str) -> int:
        """Returns how many times code of a file enters or leaves a context in a later step."""
        moment = AtContext(filename, -1)
        moment.call(self._step)
        return moment.count

    def interrupt(
        self,
        *,
        by_timer: bool = False,
        number: int | None = None,
        is_fresh: bool | None = None,
        contexts_of: str | None = None,
    ) -> Fault | None:
        """Interrupts one step, runs another one, and says what is wrong.

        Args:
            by_timer: Interrupts after a random time, and not at an event that is counted.
            number: The event; a random one if it is not given.
            is_fresh: Whether the step is the first of a new model; random if it is not given.
            contexts_of: Counts, in place of events, the contexts that code of this file enters and leaves.
        """
        if is_fresh if is_fresh is not None else self._rng.random() < 0.25:
            self._begin()
        is_fresh = self._is_fresh
        drawn = self._rng.random()
        if number is None:
            number = 1 + int(drawn * self._events[is_fresh])
        moment: Any = AfterSeconds(drawn * self._seconds) if by_timer else AtEvent(number)
        if contexts_of is not None:
            moment = AtContext(contexts_of, number)
        hook, sys.unraisablehook = sys.unraisablehook, self._see_ignored
        self._ignored = []
        raised = False
        other: list[str] = []
        try:
            torch.manual_seed(3)
            try:
                moment.call(self._step)
            except KeyboardInterrupt:
                raised = True
            finally:
                sys.setprofile(None)
        except KeyboardInterrupt:  # the timer's, just before it was taken away
            raised = True
        except Exception as error:
            # A Condition whose wait() is interrupted as it gives up its lock raises RuntimeError: that is Python's own.
            is_pythons = bool(moment.stack) and moment.stack[-1].filename.endswith("threading.py")
            other = (
                []
                if is_pythons
                else [f"raised in its place: {type(error).__name__} {str(error).splitlines()[0][:150]}"]
            )
        try:
            what = other + self._check(moment) if moment.stack else other
        finally:
            sys.unraisablehook = hook
        what += self._ignored
        self.swallowed += bool(moment.stack) and not raised
        self._is_fresh = self._is_fresh and not moment.stack
        if moment.stack and not moment.is_in_engine:
            self.outside += 1
            what = []
        if what:
            clear_what_is_left()
            self._begin()
        place = number if not by_timer else round(drawn * self._seconds, 6)
        return Fault(self.policy, place, is_fresh, moment.where(), tuple(what)) if what else None

    def _see_ignored(self, ignored: sys.UnraisableHookArgs) -> None:
        """Notes what Python cannot raise, but keeps no reference to it, which would keep tensors alive."""
        if not issubclass(ignored.exc_type, KeyboardInterrupt):
            self._ignored.append(f"left to end later: {ignored.object!r:.80} {ignored.exc_value!r:.80}")

    def _check(self, moment: Moment) -> list[str]:
        found = [f"left: {name}" for name in left_active() if not (name == "saved-tensor hooks" and _are_of_explain())]
        if not moment.is_in_engine:
            clear_what_is_left()
        ours = state_of(self._model) | {"RNG state": rng_state(DEVICE.type)}
        after = self._after_forward
        if after is not None and self.policy != RIVAL:
            found += [f"not put back: {name}" for name in after if not same(ours[name], after[name])]
        self._after_forward = None
        self._loss = None
        twin = make_model(self.policy)
        copy_state(self._model, twin)
        for model in (self._model, twin):
            model.zero_grad()
        results = []
        for model in (self._model, twin):
            torch.manual_seed(7)
            with nullcontext() if model is self._model else graphckpt.blocks.disable_checkpointing():
                results.append(self._next_step(model))
            if model is self._model:
                found += [f"left after the next step: {name}" for name in left_active()]
                clear_what_is_left()
        names = [name for name in results[1] if not same(results[0].get(name), results[1][name])]
        found += [f"next step differs: {name}" for name in names[:3]]
        return found + self._alive()

    def _next_step(self, model: nn.Module) -> dict[str, Any]:
        try:
            x = torch.linspace(-1, 1, B * D, device=DEVICE).view(B, D).requires_grad_()
            with torch.autocast(DEVICE.type, torch.bfloat16) if self._autocast else nullcontext():
                y = model(x)
            loss = y.float().pow(2).mean()
            loss.backward()
        except Exception as error:
            if model is not self._model:
                raise
            return {f"{type(error).__name__}: {str(error).splitlines()[0][:120]}": None}
        found = {"loss": frozen(loss), "gradient of the input": frozen(x.grad)}
        found |= {f"gradient of {name}": frozen(p.grad) for name, p in model.named_parameters()}
        return found | state_of(model) | {"RNG state": rng_state(DEVICE.type)}

    def _alive(self) -> list[str]:
        stores = {wrapper.context.store for wrapper in self._handle._wrappers} if self._handle is not None else set()
        if not any(getattr(store, "num_alive", 0) for store in stores):
            return []
        gc.collect()
        return [f"{n} tensors alive in a store" for store in stores if (n := getattr(store, "num_alive", 0))]
