"""Sees the ops of a block's two runs: keeps results in the first, hands them back in the second."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphckpt._compat import WithoutValues
from graphckpt._compat_autocast import call_with_autocast
from graphckpt._compat_compiler import never_compiled
from graphckpt.rules.op_log import BY_SIZE
from graphckpt.rules.passes import running
from graphckpt.rules.recipe import Act, Recipe

if TYPE_CHECKING:
    from graphckpt.rules.frame import Frame
    from graphckpt.rules.op_log import Op
    from graphckpt.rules.op_memory import OpMemory
    from graphckpt.rules.recipe import Key


class Mode(TorchDispatchMode):
    """Sees each op of one run of a block that is the block's own."""

    def __init__(self, memory: OpMemory, frame: Frame) -> None:
        super().__init__()
        self._memory = memory
        self._frame = frame
        self.is_paused = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Sees nothing of what compiled code does."""
        return True

    @never_compiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self.is_paused or not is_counted(func, args):
            has_values = func is not DETACH or not isinstance(args[0], WithoutValues)
            return call_with_autocast(func, args, kwargs) if has_values else args[0].twin()
        return self._call(func, args, kwargs)

    def _call(self, func: Op, args: Any, kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


class Counting(Mode):
    """Knows an op by how often it was called before."""

    def __init__(self, memory: OpMemory, frame: Frame) -> None:
        super().__init__(memory, frame)
        self._numbers: dict[Op, int] = defaultdict(int)

    def _key(self, func: Op) -> Key:
        number = self._numbers[func]
        self._numbers[func] = number + 1
        return func, number


@final
class Keep(Counting):
    """Keeps what the policy says, and notes the ops, where there is a log."""

    def _call(self, func: Op, args: Any, kwargs: dict[str, Any]) -> Any:
        return self.see(self._key(func), args, kwargs, call_with_autocast(func, args, kwargs))

    def see(self, key: Key, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """An op has run."""
        func, number = key
        memory, frame = self._memory, self._frame
        memory.forget_edited(func, args, kwargs)
        if _makes_new_tensors(func) and memory.policy(output, func, args, kwargs, number) and self._is_of_use(func):
            memory.keep(key, output, frame)
        log = memory.log
        if log is not None:
            run = running.get()
            log.is_whole &= run is not None and run.frame is frame  # the ops of a block inside have slots of their own
            log.add(func, number, args, kwargs, output)
        return output

    def _is_of_use(self, func: Op) -> bool:
        """Whether the second run can hand the results of an op back: one that follows a recipe can any."""
        return self._memory.log is not None or self._memory.hands_back(func)


@final
class Follow(Mode):
    """Keeps what a recipe says, as long as the ops come as it says."""

    def __init__(self, memory: OpMemory, frame: Frame, recipe: Recipe) -> None:
        super().__init__(memory, frame)
        self._recipe = recipe
        self._position = 0
        self._instead: Keep | None = None

    def _call(self, func: Op, args: Any, kwargs: dict[str, Any]) -> Any:
        output = call_with_autocast(func, args, kwargs)
        if self._instead is not None:
            return self._instead.see(self._instead._key(func), args, kwargs, output)
        memory, recipe, position = self._memory, self._recipe, self._position
        self._position = position + 1
        is_next = position < len(recipe.ops) and recipe.ops[position] is func
        act = recipe.acts[position] if is_next else None
        if act is None or (act is Act.LEAVE_OUT and not recipe.is_like(position, output)):
            return self._leave(func, args, kwargs, output)
        if act is Act.HAND_BACK:
            memory.keep(recipe.keys[position], output, self._frame)
        elif memory.storages:
            memory.forget_edited(func, args, kwargs)
        return output

    def end(self) -> None:
        """The forward is over."""
        if self._instead is None and self._position != len(self._recipe.ops):
            self._memory.does_not_follow(self._frame)

    def _leave(self, func: Op, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        self._memory.does_not_follow(self._frame)
        self._instead = Keep(self._memory, self._frame)
        for known, _ in self._recipe.keys[: self._position - 1]:
            self._instead._key(known)
        return self._instead.see(self._instead._key(func), args, kwargs, output)


@final
class HandBack(Counting):
    """Hands back what is kept, and runs the rest."""

    def _call(self, func: Op, args: Any, kwargs: dict[str, Any]) -> Any:
        key = self._key(func)
        output = self._memory.hand_back(key, self._frame) if self._memory.hands_back(func) else None
        return call_with_autocast(func, args, kwargs) if output is None else output


@final
class HandBackInOrder(Mode):
    """Does what a recipe says."""

    def __init__(self, memory: OpMemory, frame: Frame, recipe: Recipe, *, leaves_out: bool) -> None:
        super().__init__(memory, frame)
        self._recipe = recipe
        self._leaves_out = leaves_out
        self._position = 0

    def _call(self, func: Op, args: Any, kwargs: dict[str, Any]) -> Any:
        recipe, position = self._recipe, self._position
        self._position = position + 1
        if position >= len(recipe.ops) or recipe.ops[position] is not func:
            raise RuntimeError(f"{func} is not what ran here the first time")  # and all runs again
        act = recipe.acts[position]
        if act is Act.LEAVE_OUT and self._leaves_out:
            return recipe.without_values(position, args)
        output = self._memory.hand_back(recipe.keys[position], self._frame) if act is Act.HAND_BACK else None
        if output is not None:
            return output
        if func in BY_SIZE and isinstance(args[0], WithoutValues):
            args = (_with_any_values(args[0]), *args[1:])
        return call_with_autocast(func, args, kwargs)


def _with_any_values(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor like it that has memory, and nothing in it that means anything."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)


DETACH = torch.ops.aten.detach.default
CAST = torch.ops.aten._to_copy.default


def is_counted(func: Op, args: Any) -> bool:
    """Whether an op is one of the block's own, and so part of the original forward and of the recomputation alike.

    The hooks of the two detach unlike often, and ``prim`` ops ask a fake tensor for its device. Autocast keeps what it
    casts of a leaf that requires gradients, for all blocks and up to the end of its region, so that a parameter may be
    cast in one of the two alone.

    Args:
        func: the op.
        args: its arguments.
    """
    if func is CAST:
        tensor = args[0]
        return not (tensor.requires_grad and tensor.is_leaf and tensor.dtype is torch.float32)
    return func is not DETACH and func.namespace != "prim"


def _makes_new_tensors(func: Op) -> bool:
    """Whether the op neither edits a tensor nor returns a view: those cost nothing to run again."""
    schema = getattr(func, "_schema", None)
    return schema is not None and not schema.is_mutable and all(r.alias_info is None for r in schema.returns)
