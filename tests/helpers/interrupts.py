"""Interrupts at every place of a step: what is left of them in the thread, the model and the next steps."""

from __future__ import annotations

import copy
import dis
import functools
import gc
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import CodeType, FrameType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import graphckpt
from graphckpt import Segments, Selective, Tiles
from graphckpt._compat import active_saved_tensor_hooks, num_function_modes
from graphckpt.engine.execution import modes_paused, running
from graphckpt.stores.disk import CHUNK
from helpers.hard_modules import B, BatchNorm, Counts, D, Mlp

ON = {"activation_checkpointing": True, "min_elements": 1}
POLICIES: dict[str, dict[str, Any]] = {
    "full": {"[123]": ON},
    "selective": {"[123]": Selective("matmul")},
    "joined": {"1": ON, "[23]": "joined"},
    "excluded child": {"[123]": ON, "re:[123]\\.(drop|linear)": False},
    "segments": {"": Segments("log")},
    "tiles": {"1": Tiles(2), "3": Selective("matmul")},
    "disk": {"[123]": {**ON, "offload": "disk"}},
    "slab": {"[123]": {**ON, "contiguous": True}},
}
Place = tuple[CodeType, int]
"""An instruction: the code that has it, and its offset."""

# Modules of others whose code runs while the engine has set something: where a `with` of theirs is entered or left.
_WATCHED = ("/graphckpt/", "/torch/utils/_python_dispatch.py", "/torch/overrides.py", "/contextlib.py")


class _Instructions:
    """Calls a function before each instruction of the watched code; it may raise an interrupt there."""

    def __init__(self, on_instruction: Callable[[Place], object], codes: frozenset[CodeType] | None = None) -> None:
        self._on_instruction, self._codes = on_instruction, codes
        sys._getframe().f_trace_opcodes = True  # in Python 3.12 `settrace` asks whether any frame has had this set

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if code not in self._codes if self._codes is not None else not _is_watched(code):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._local

    def _local(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "opcode":
            self._on_instruction((frame.f_code, frame.f_lasti))
        return self._local


def _is_watched(code: CodeType) -> bool:
    return any(part in code.co_filename for part in _WATCHED)


def places(step: Callable[[], object]) -> list[Place]:
    """Returns the instructions of the engine that ``step`` runs, each once, in order."""
    seen: dict[Place, None] = {}
    sys.settrace(_Instructions(seen.setdefault))
    try:
        step()
    finally:
        sys.settrace(None)
    return [place for place in seen if place[1] not in _within_handling(place[0])]


def is_interrupted(step: Callable[[], object], place: Place) -> bool:
    """Whether :func:`interrupt_at` raises."""
    try:
        interrupt_at(step, place)
    except KeyboardInterrupt:
        return True
    return False


def interrupt_at(step: Callable[[], object], place: Place) -> None:
    """Runs ``step`` until a ``KeyboardInterrupt`` is raised before the instruction at ``place``, the first time."""
    armed = [True]

    def raise_there(now: Place) -> None:
        if armed and now == place:
            armed.clear()
            raise KeyboardInterrupt

    sys.settrace(_Instructions(raise_there, frozenset([place[0]])))
    try:
        step()
    finally:
        sys.settrace(None)


def left_in_thread() -> list[str]:
    """Names what a step has left in this thread, which has nothing active outside of a step."""
    found = {
        "execution": running.get() is not None,
        "saved-tensor hooks": active_saved_tensor_hooks() is not None,
        "dispatch modes": bool(_get_current_dispatch_mode_stack()),
        "function modes": bool(num_function_modes()),
        "pause": modes_paused.depth != 0,
        "grad mode": not torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu") or not torch.is_autocast_cache_enabled(),
        "nesting of autocast": torch.autocast_increment_nesting() != 1,
        "default dtype": torch.get_default_dtype() is not torch.float32,
    }
    torch.autocast_decrement_nesting()
    return [name for name, is_left in found.items() if is_left]


def live_bytes() -> int:
    """Returns the bytes of all tensors that Python can reach, without the chunk of each thread of a disk store.

    It starts another thread when writes pile up, as on a busy machine.
    """
    gc.collect()
    tensors = (value for value in gc.get_objects() if type(value) in (Tensor, nn.Parameter))
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(size for size in sizes.values() if size < CHUNK)


MAX_POOL = 8
"""Threads that the pool of a disk store may start later."""


@final
class Subject:
    """A model with a policy, and a twin that is never interrupted, with the same policy.

    Each interrupted step begins with the same state, so that the twin takes few steps.
    """

    def __init__(self, policy: dict[str, Any] | Callable[[nn.Module], object], *, autocast: bool = False) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(D, D), Mlp(), BatchNorm(), nn.Sequential(nn.Tanh(), Counts()), nn.Linear(D, D)]
        self.model = nn.Sequential(*layers)
        self.twin = copy.deepcopy(self.model)
        self.handles = []
        for model in (self.model, self.twin):
            if callable(policy):
                policy(model)
            else:
                self.handles.append(graphckpt.apply(model, policy))
        self._autocast = autocast
        for seed in range(3):  # until all is learnt
            self.step(seed)
            self.step(seed, self.twin)
        self._before = self._state(self.model)
        self._set_state(self.twin, self._before)
        self.step(5, self.twin)
        self._after = self._state(self.twin)
        self._results: dict[Any, list[Any]] = {}
        """Of the next steps of the twin, by the state that they begin with: as bytes, since live ones are counted."""
        self._num_threads = threading.active_count()
        self._num_bytes = 0
        for _ in range(3):  # what is alive after steps without an interrupt
            self.faults(lambda: None)

    def step(self, seed: int, model: nn.Module | None = None) -> list[Tensor]:
        model = model or self.model
        torch.manual_seed(seed)
        model.zero_grad()
        x = torch.randn(B, D)
        with torch.autocast("cpu", torch.bfloat16) if self._autocast else nullcontext():
            y = model(x)
        y.float().square().sum().backward()
        return [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    def faults(
        self, interrupt: Callable[[], object], *, checks_bytes: bool = True, checks_state: bool = True
    ) -> list[str]:
        """Names what is wrong after ``interrupt``, which interrupts a step of the model with seed 5, and later.

        Without ``checks_state``, buffers may be between those before and after the step.
        """
        before, after = self._before, self._after
        self._set_state(self.model, before)
        places = self._addresses()
        interrupt()
        faults = left_in_thread()
        state = self._state(self.model)
        for name, value in state[0].items() if checks_state else ():
            if not (torch.equal(value, before[0][name]) or torch.equal(value, after[0][name])):
                faults.append(f"{name} is neither that before the step nor that after it")
        faults += ["another memory of a parameter or buffer"] if self._addresses() != places else []
        for seed, expected in zip((6, 7), self._next_results(state), strict=True):
            try:
                if _frozen(self.step(seed)) != expected:
                    faults.append(f"other results in step {seed - 5} after it")
            except Exception as error:
                faults.append(f"{type(error).__name__} in step {seed - 5} after it")
        faults += [f"{name} after later steps" for name in left_in_thread()]
        stores = [wrapper.context.store for handle in self.handles for wrapper in handle._wrappers]
        if any(getattr(store, "num_alive", 0) for store in stores):
            gc.collect()  # an exception and the frames that it has come through refer to each other
            faults += ["stores hold tensors"] if any(getattr(store, "num_alive", 0) for store in stores) else []
        faults += ["threads"] if threading.active_count() > self._num_threads + MAX_POOL else []
        if checks_bytes:
            del state
            now = live_bytes() - self.slab_bytes()  # a slab has room for what an exception held beside the next step
            if now > self._num_bytes > 0:
                faults.append(f"{now - self._num_bytes} more bytes alive")
            self._num_bytes = max(now, self._num_bytes)
        return faults

    def slab_bytes(self) -> int:
        """Returns the sizes of the slabs of the stores."""
        stores = {wrapper.context.store for handle in self.handles for wrapper in handle._wrappers}
        parts = (part for store in stores if hasattr(store, "_open_stores") for part in store._open_stores())
        return sum(getattr(part, "slab_bytes", 0) for part in parts)

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _state(self, model: nn.Module) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        names = ("count", "last", "seen", "table")
        counts = [copy.deepcopy({n: vars(m)[n] for n in names}) for m in model.modules() if isinstance(m, Counts)]
        return {name: value.clone() for name, value in model.state_dict().items()}, counts

    def _next_results(self, state: tuple[dict[str, Tensor], list[dict[str, Any]]]) -> list[Any]:
        """Returns what the steps with seeds 6 and 7 return from a state on, of which there are few."""
        key = _frozen(state)
        if key not in self._results:
            self._set_state(self.twin, state)
            self._results[key] = [_frozen(self.step(seed, self.twin)) for seed in (6, 7)]
        return self._results[key]

    @staticmethod
    def _set_state(model: nn.Module, state: tuple[dict[str, Tensor], list[dict[str, Any]]]) -> None:
        model.load_state_dict(state[0])
        counts = (m for m in model.modules() if isinstance(m, Counts))
        for module, values in zip(counts, copy.deepcopy(state[1]), strict=True):
            vars(module).update(values)

    def _addresses(self) -> dict[str, tuple[int, int]]:
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name: (id(tensor), tensor.data_ptr()) for name, tensor in tensors}


def _frozen(value: Any) -> Any:
    """Returns a value that can be hashed, with the bits of all tensors in it."""
    if isinstance(value, Tensor):
        return value.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return tuple((key, _frozen(each)) for key, each in value.items())
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


@functools.cache
def _within_handling(code: CodeType) -> frozenset[int]:
    """Returns the instructions that begin or end the handling of an exception.

    No signal is handled there, and an exception there would leave the interpreter's own reference to that one.
    """
    instructions = dis.get_instructions(code)
    return frozenset(
        each.offset
        for each in instructions
        if each.opname in ("PUSH_EXC_INFO", "POP_EXCEPT") or each.positions is None or each.positions.lineno is None
    )


def _line_of(place: Place) -> int | None:
    code, offset = place
    return next(line for start, end, line in code.co_lines() if start <= offset < end)


def name_of(place: Place) -> str:
    """Returns file, line, function and offset of a place."""
    code, offset = place
    return f"{code.co_filename.rpartition('/')[2]}:{_line_of(place)} {code.co_qualname} +{offset}"
