"""Messages for a recomputation that differs from the original forward: which tensor, op and line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, final

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode, resolve_name

from graphckpt._compat import has_scripted_code, parametrizations_are_cached, saved_tensors_are_cloned
from graphckpt.errors import RecomputeError

_Kind = tuple[torch.dtype, torch.Size]

_FIX = (
    "fix: make forward depend on its arguments, parameters and RNG state alone, or set "
    "activation_checkpointing = False on this block, or call the function without checkpoint()"
)
_LIBRARIES = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])


@final
@dataclass(frozen=True, slots=True)
class Fault:
    """The first difference between the original forward and the recomputation.

    ``first`` and ``second`` are ``(dtype, shape)`` of saved tensor number ``position``, or the counts of saved tensors.
    """

    position: int
    first: _Kind | int
    second: _Kind | int
    op: str = ""
    line: str = ""
    difference: float = 0.0
    """Of the values, relative, where ``first`` and ``second`` are equal."""

    def located(self, recompute: Callable[[Callable[[int], None]], None]) -> Fault:
        """Returns the fault with its op and line. ``recompute`` passes the number of each saved tensor on."""
        # Errors are suppressed: the fault is certain, and a failed search for its line must not hide it.
        finder = _OpFinder(self.position)
        with suppress(Exception), finder:
            recompute(finder.on_pack)
        return replace(self, op=finder.op, line=finder.line)


@final
class _OpFinder(TorchFunctionMode):
    """Finds out which PyTorch function is running when saved tensor number ``position`` is made."""

    def __init__(self, position: int) -> None:
        super().__init__()
        self.op = ""
        self.line = ""
        self._position = position
        self._running: list[Any] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._running.append(func)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._running.pop()

    def on_pack(self, position: int) -> None:
        if position != self._position:
            return
        func = self._running[0] if self._running else None  # the outermost: the function that the program has called
        self.op = "an op" if func is None else resolve_name(func) or getattr(func, "__name__", repr(func))
        self.line = calling_line(sys._getframe(1))  # inspect.stack() reads every source file on the way


def calling_code(frame: FrameType | None) -> CodeType | None:
    """Returns the innermost code from ``frame`` outwards that is not ours: what calls the op that saves a tensor."""
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES[1]):
        frame = frame.f_back
    return None if frame is None else frame.f_code


def calling_line(frame: FrameType | None) -> str:
    """Returns the file and the line of the innermost code from ``frame`` outwards that is neither torch's nor ours."""
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_LIBRARIES):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def differs(block: str, fault: Fault) -> str:
    where = f", saved by {fault.op} at {fault.line}" if fault.op else ""
    # The compiler uses code that it has made for another block, with dynamic shapes or numbers, for this one too.
    fix = _FIX + _SCRIPTED if has_scripted_code() else _FIX
    fix += "; if it is compiled, compile={'dynamic': False}" if "torch._dynamo" in sys.modules else ""
    if isinstance(fault.first, int):
        number = f"the original forward saved {fault.first} tensors, the recomputation {fault.second}"
        return f"{block}: {number}; the last one{where and where + ','} differs · {fix}"
    assert not isinstance(fault.second, int)
    was, now = _describe(*fault.first), _describe(*fault.second)
    return f"{block}: saved tensor {fault.position}{where}: expected {was}, got {now} in the recomputation · {fix}"


def ops_differ(block: str, what: str) -> str:
    return f"{what or block + ': its recomputation runs other ops than the original forward'} · {_FIX}"


def raised_in_recomputation(block: str) -> str:
    return (
        f"{block}: raised while backward recomputed the forward of this block, which had run without this error. A "
        "likely cause is something that forward reads and that has changed since: a global variable, a submodule, "
        "a context that has ended, a tensor whose `data` was replaced · fix: leave it as it is until backward() has "
        "ended, or set activation_checkpointing = False on this block"
    )


_SCRIPTED = (
    "; if it runs code of torch.jit, which is optimized after its first calls, run two steps within "
    "graphckpt.blocks.disable_checkpointing() before"
)
_CAUSES = (
    "forward reads something that has changed since: a global, an attribute, a submodule, a mode, a tensor through "
    "`.data`, or a random generator from which another thread draws"
)
_FIX_VALUES = (
    "fix: pass it to the block as an argument, or leave it unchanged until backward() is over; if the difference is "
    "deliberate, check graphckpt.blocks.is_recomputing() in forward, or set determinism_check='none' for this block"
)


def values_differ(block: str, fault: Fault, *, is_late: bool = False) -> str:
    """Returns what differs, likely causes, and the fix, in a line each; ``is_late`` if its backward is over."""
    assert not isinstance(fault.first, int)
    # Empty without a line number, even if the op is known.
    where = (f", saved by {fault.op}" if fault.op else ", saved") + f" at {fault.line}" if fault.line else ""
    effect = "gradients would be wrong"
    if is_late:
        effect = "the gradients of that step may be wrong, and the update that followed it was made"
    message = (
        f"{block}: saved tensor {fault.position}{where}, {_describe(*fault.first)}: expected the values of the "
        f"original forward, got others in the recomputation (relative difference {fault.difference:.1e}), so "
        f"{effect}\n· likely cause: {_CAUSES}\n· {_FIX_VALUES}{_SCRIPTED if has_scripted_code() else ''}"
    )
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1 and not is_late:
        message += (
            "; if the program catches this error, call torch.distributed.destroy_process_group(), since the other "
            "ranks may wait in a collective that this one does not reach"
        )
    return message


_FIRST_CALL = "if the first forward sets parameters from its batch, run one forward before training"
_CLONED = (
    "torch.autograd.graph.allow_mutation_on_saved_tensors() is active: it clones what autograd saves, and not what a "
    "recomputed block reads"
)


def suspects(hooks: Any, modules: Iterable[nn.Module], *, is_first: bool) -> str:
    """Returns what is active around a block and may be why its recomputation differs, to be added to a message."""
    texts = []
    # Those of PyTorch and of blocks around this one return the values that they have got.
    if hooks is not None and not _module_of(hooks[0]).startswith(("torch.", "graphckpt.")):
        name = f"{_module_of(hooks[0])}.{getattr(hooks[0], '__qualname__', '')}".strip(".") or repr(hooks[0])
        texts.append(
            f"saved-tensor hooks around the block (`{name}`): they keep its arguments, and must return the values that "
            "they have got; if they round on purpose, enter them within the block, or set determinism_check='none'"
        )
    if parametrizations_are_cached() or any(map(parametrize.is_parametrized, modules)):
        texts.append(
            "torch.nn.utils.parametrize.cached(): if it is active in the forward or in the backward, leave it out, "
            "since what it caches is saved by one call of several"
        )
    if saved_tensors_are_cloned():
        texts.append(_CLONED)
    if is_first:
        texts.append(_FIRST_CALL)
    return "".join(f"; {text}" for text in texts)


def _module_of(function: Any) -> str:
    return getattr(function, "__module__", None) or ""


def returns_differ(block: str, number: int, was: _Kind, second: Sequence[_Kind]) -> str:
    first, now = _describe(*was), _describe(*second[number]) if number < len(second) else "nothing"
    return f"{block}: tensor {number} that it returns: expected {first}, got {now} in the recomputation · {_FIX}"


def draws_differ(block: str, op: str) -> str:
    return (
        f"{block}: expected the random numbers of the original forward (of {op}), may have got others in the "
        "recomputation, as another thread draws from the same generator: gradients would be wrong · fix: let one "
        "thread alone draw from PyTorch's default generators: run the other one in a process of its own, or pass a "
        "torch.Generator to its random ops"
    )


def modified_in_place(block: str, what: str) -> str:
    return (
        f"{block}: {what} was modified in place between forward and backward"
        f"{f' ({_CLONED})' if saved_tensors_are_cloned() else ''} · fix: modify a clone, or modify after backward()"
    )


def modified_by_forward(block: str, what: str, *, is_first: bool) -> str:
    return (
        f"{block}: forward modified {what} in place, and no copy of it from before the forward exists, which the "
        f"recomputation needs · fix: {f'{_FIRST_CALL}; else ' if is_first else ''}modify it outside of the block, "
        "modify a large buffer from the first call on, or set activation_checkpointing = False on this block"
    )


def assigns_data(block: str) -> str:
    return (
        f"{block}: expected parameters with the memory that they had, got other values by an assignment to `.data` in "
        "its forward, which the recomputation repeats · fix: assign outside of the block, or set "
        "activation_checkpointing = False on this block"
    )


def runs_backward(block: str) -> str:
    return (
        f"{block}: its forward runs a backward, which the recomputation would repeat · fix: set the policy on the "
        "layers inside of it, and activation_checkpointing = False on this block"
    )


def mutates_argument(block: str, name: str) -> str:
    return (
        f"{block}: forward modified its argument `{name}` in place, and the recomputation has no copy of it: copies "
        "are kept of the arguments that the first call of a module modifies · fix: modify a clone of it"
    )


def modifies_held_tensor(block: str) -> str:
    return (
        f"{block}: forward modified a tensor inside of a list, a dict or an object in place, which cannot be restored "
        "for the recomputation · fix: make it a buffer or an attribute of a module, call the model with "
        "use_cache=False if it is in a key-value cache, or set activation_checkpointing = False on this block"
    )


def excluded_differ(block: str, expected: str | None, got: str) -> RecomputeError:
    was = f"a call of {expected}" if expected else "no further call of an excluded child"
    return RecomputeError(f"{block}: expected {was}, got one of {got} in the recomputation · {_FIX}")


def _describe(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
