"""The op results that one call of a block keeps, and the second run that is handed them.

::

    first run     addmm -> pow -> mul -> add -> tanh -> mul -> addmm      kept: addmm, tanh
    second run    (addmm)  -      -      -     (tanh)   mul               handed back: in brackets

What only leads up to a kept result, or comes after all that autograd saves, is not run again: the second run carries a
tensor without values in its place, which nothing may read. A result that the second run would not ask for is not kept.
All this shows in the first call of a block; calls like it follow the recipe that it has left.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphckpt._compat import WithoutValues, pytree, version_sharing_detach
from graphckpt.rng import set_random_state, take_random_state
from graphckpt.rules.kept import Kept, KeptResult
from graphckpt.rules.op_log import OpLog
from graphckpt.rules.passes import SecondRun, running
from graphckpt.rules.recipe import Act, Recipe, learn
from graphckpt.state import edited_by

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphckpt.rules.frame import Frame
    from graphckpt.rules.op_log import Op
    from graphckpt.rules.recipe import Key, Policy

_MOST_RECIPES = 16  # of a block: one for each shape of its arguments


@final
class OpMemory:
    """The kept op results of one call of a block.

    Args:
        policy: says which results to keep.
        kind: what calls that are alike have in common, such as the shapes of their arguments; ``None``: nothing can be
            learnt from one for another, as the policy may change its mind.
    """

    def __init__(self, policy: Policy, kind: object = None) -> None:
        self.policy = policy
        self.results: dict[Key, KeptResult] = {}
        self.storages: dict[int, Key] = {}  # id of a kept result's storage: which one it is
        self.log: OpLog | None = None
        self.recipe: Recipe | None = None
        """What the second run goes by."""
        self._kind = kind
        self._num_saved = 0
        self._is_settled = False
        self._modes: list[_Mode] = []

    def first_run(self, frame: Frame) -> AbstractContextManager[None]:
        """Returns the context that keeps the chosen results."""
        if frame.outer is not None or self._kind is None:  # what is around the block must see it keep the same again
            return self._in_force(_Keep(self, frame))
        recipe = frame.site.recipes.get(self._kind)
        if recipe is None:
            self.log = OpLog()
        elif recipe.is_of_use:
            self.recipe = recipe
            return self._following(_Follow(self, frame, recipe))
        return self._in_force(_Keep(self, frame))

    def second_run(self, frame: Frame) -> AbstractContextManager[None]:
        """Returns the context that hands them back."""
        run = running.get()
        stops_early = isinstance(run, SecondRun) and run.frame is frame and run.stops_early
        if self.recipe is not None and self.recipe.is_of_use and stops_early and self._is_settled:
            return self._in_force(_HandBackInOrder(self, frame, self.recipe))
        return self._in_force(_HandBack(self, frame))

    def saves(self, tensor: torch.Tensor) -> None:
        """Autograd saves a tensor of the first run."""
        self._num_saved += 1
        if self.log is not None:
            self.log.saves(tensor)

    @contextmanager
    def _in_force(self, mode: _Mode) -> Iterator[None]:
        self._modes.append(mode)
        try:
            with mode:
                yield
        finally:
            self._modes.remove(mode)  # it holds this object: a cycle would keep what it keeps alive

    @contextmanager
    def _following(self, mode: _Follow) -> Iterator[None]:
        with self._in_force(mode):
            yield
        mode.end()

    def keep(self, key: Key, output: Any, frame: Frame) -> None:
        """Keeps what an op has returned."""
        leaves, spec = ([output], None) if isinstance(output, torch.Tensor) else pytree.tree_flatten(output)
        aliases = [version_sharing_detach(x) if isinstance(x, torch.Tensor) else x for x in leaves]
        versions = [(x, x._version) for x in aliases if isinstance(x, torch.Tensor)]
        kept = [Kept(x, frame, frame.outer) if isinstance(x, torch.Tensor) else x for x in aliases]
        random = take_random_state(frame.devices) if torch.Tag.nondeterministic_seeded in key[0].tags else None
        for tensor, _ in versions:
            self.storages[id(tensor.untyped_storage())] = key
        self.results[key] = KeptResult(kept, spec, versions, random)

    def hand_back(self, key: Key) -> Any:
        """Returns what an op has returned, or ``None`` if that is not kept."""
        result = self.results.get(key)
        leaves = result.take() if result is not None else None
        if result is None or leaves is None:
            return None
        if result.random is not None:
            set_random_state(result.random)
        return leaves[0] if result.spec is None else pytree.tree_unflatten(leaves, result.spec)

    def forget_edited(self, func: Op, args: Any, kwargs: dict[str, Any]) -> None:
        """Forgets a kept result that ``func`` edits, also through a view that does not share its version counter.

        GRU edits what ``unsafe_chunk`` returns, which is such a view.
        """
        for tensor in edited_by(func, args, kwargs):
            key = self.storages.get(id(tensor.untyped_storage()))
            if key is not None:
                self.results.pop(key, None)

    def settle(self, frame: Frame) -> None:
        """Forgets the results that the block edited in place after they were kept, and those of no use."""
        self.storages.clear()
        for key, result in list(self.results.items()):
            if result.is_edited():
                del self.results[key]
            elif frame.outer is not None or frame.group is not None:
                result.versions.clear()  # what is around the block keeps it, or a store, and sees edits itself
        if self.log is not None:
            self._learn(self.log, frame)
            self.log = None
        elif self.recipe is not None and self._num_saved != self.recipe.num_saved:
            self.does_not_follow(frame)
        self._is_settled = True

    def _learn(self, log: OpLog, frame: Frame) -> None:
        recipe = learn(log, set(self.results), self._num_saved)
        recipe.is_of_use = log.is_whole and not frame.holes
        recipes = frame.site.recipes
        recipes[self._kind] = recipe
        while len(recipes) > _MOST_RECIPES:
            del recipes[next(iter(recipes))]
        if recipe.is_of_use:
            self.recipe = recipe
            for position in recipe.left_out:
                result = self.results.pop(recipe.keys[position], None)
                if result is not None:
                    result.let_go(frame)

    def does_not_follow(self, frame: Frame) -> None:
        """This call is unlike the one that has left the recipe: all that is not kept runs again."""
        if self.recipe is not None and frame.site.recipes.get(self._kind) is self.recipe:
            del frame.site.recipes[self._kind]  # the next call leaves one of its own
        self.recipe = None

    def run_all(self) -> bool:
        """Has second runs leave nothing out from now on; returns whether that is any different."""
        if self.recipe is None or not self.recipe.is_of_use:
            return False
        self.recipe.is_of_use = False
        return True

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


class _Mode(TorchDispatchMode):
    def __init__(self, memory: OpMemory, frame: Frame) -> None:
        super().__init__()
        self._memory = memory
        self._frame = frame
        self.is_paused = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if self.is_paused or not is_counted(func):
            has_values = func is not DETACH or not isinstance(args[0], WithoutValues)
            return func(*args, **(kwargs or {})) if has_values else args[0].twin()
        return self._call(func, args, kwargs or {})

    def _call(self, func: Op, args: Any, kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


class _Counting(_Mode):
    """Knows an op by how often it was called before."""

    def __init__(self, memory: OpMemory, frame: Frame) -> None:
        super().__init__(memory, frame)
        self._numbers: dict[Op, int] = defaultdict(int)

    def _key(self, func: Op) -> Key:
        number = self._numbers[func]
        self._numbers[func] = number + 1
        return func, number


@final
class _Keep(_Counting):
    def _call(self, func: Op, args: Any, kwargs: dict[str, Any]) -> Any:
        return self.see(self._key(func), args, kwargs, func(*args, **kwargs))

    def see(self, key: Key, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """An op has run."""
        func, number = key
        memory, frame = self._memory, self._frame
        memory.forget_edited(func, args, kwargs)
        if _makes_new_tensors(func) and memory.policy(output, func, args, kwargs, number):
            memory.keep(key, output, frame)
        log = memory.log
        if log is not None:
            run = running.get()
            log.is_whole &= run is not None and run.frame is frame  # the ops of a block inside have slots of their own
            log.add(func, number, args, kwargs, output)
        return output


@final
class _Follow(_Mode):
    """Keeps what a recipe says, as long as the ops come as it says."""

    def __init__(self, memory: OpMemory, frame: Frame, recipe: Recipe) -> None:
        super().__init__(memory, frame)
        self._recipe = recipe
        self._position = 0
        self._instead: _Keep | None = None

    def _call(self, func: Op, args: Any, kwargs: dict[str, Any]) -> Any:
        output = func(*args, **kwargs)
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
        self._instead = _Keep(self._memory, self._frame)
        for known, _ in self._recipe.keys[: self._position - 1]:
            self._instead._key(known)
        return self._instead.see(self._instead._key(func), args, kwargs, output)


@final
class _HandBack(_Counting):
    def _call(self, func: Op, args: Any, kwargs: dict[str, Any]) -> Any:
        output = self._memory.hand_back(self._key(func))
        return func(*args, **kwargs) if output is None else output


@final
class _HandBackInOrder(_Mode):
    """Does what a recipe says."""

    def __init__(self, memory: OpMemory, frame: Frame, recipe: Recipe) -> None:
        super().__init__(memory, frame)
        self._recipe = recipe
        self._position = 0

    def _call(self, func: Op, args: Any, kwargs: dict[str, Any]) -> Any:
        recipe, position = self._recipe, self._position
        self._position = position + 1
        if position >= len(recipe.ops) or recipe.ops[position] is not func:
            raise RuntimeError(f"{func} is not what ran here the first time")  # and all runs again
        act = recipe.acts[position]
        if act is Act.LEAVE_OUT:
            return recipe.without_values(position, args)
        output = self._memory.hand_back(recipe.keys[position]) if act is Act.HAND_BACK else None
        return func(*args, **kwargs) if output is None else output


DETACH = torch.ops.aten.detach.default


def is_counted(func: Op) -> bool:
    """Whether an op is one of the block's own.

    The hooks of the two runs detach unlike often, and ``prim`` ops ask a fake tensor for its device.
    """
    return func is not DETACH and func.namespace != "prim"


def _makes_new_tensors(func: Op) -> bool:
    """Whether the op neither edits a tensor nor returns a view: those cost nothing to run again."""
    schema = getattr(func, "_schema", None)
    return schema is not None and all(result.alias_info is None for result in schema.returns)
