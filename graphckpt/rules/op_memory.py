"""The op results that one call of a block keeps, and the second run that is handed them.

::

    first run     addmm -> pow -> mul -> add -> tanh -> mul -> addmm      kept: addmm, tanh
    second run    (addmm)  -      -      -     (tanh)   mul               handed back: in brackets

What only leads up to a kept result, or comes after all that autograd saves, is not run again: the second run carries a
tensor without values in its place, which nothing may read. A result that the second run would not ask for is not kept.
All this shows in the first call of a block; calls like it follow the recipe that it has left.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, final

import torch

from graphckpt._compat import pytree, storage_of, version_sharing_detach
from graphckpt._compat_autocast import above_dispatch_modes
from graphckpt.errors import RecomputeError
from graphckpt.rng import set_random_state, take_random_state
from graphckpt.rules.kept import Kept, KeptResult
from graphckpt.rules.op_log import OpLog
from graphckpt.rules.op_modes import CAST, Follow, HandBack, HandBackInOrder, Keep
from graphckpt.rules.passes import SecondRun, running
from graphckpt.rules.recipe import Chosen, learn
from graphckpt.writes import edited_by

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphckpt.rules.frame import Frame
    from graphckpt.rules.op_log import Op
    from graphckpt.rules.op_modes import Mode
    from graphckpt.rules.recipe import Key, Policy, Recipe

_MOST_RECIPES = 16  # of a block: one for each shape of its arguments
_MOST_STRAYS = 16  # calls of a block that were unlike those before, until it is taken as it comes


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
        self.storages: dict[int, list[Key]] = {}  # id of a storage: the kept results that lie in it
        self.log: OpLog | None = None
        self.recipe: Recipe | None = None
        """What the second run goes by."""
        self._kind = kind
        self._num_saved = 0
        self._keys: list[Key] = []  # of all that was kept, in order
        self._num_asked_for = 0  # of them: what is kept after autograd has saved its last tensor, nothing asks for
        self._is_settled = False
        self._modes: list[Mode] = []

    def first_run(self, frame: Frame) -> AbstractContextManager[None]:
        """Returns the context that keeps the chosen results."""
        if frame.outer is not None or self._kind is None:  # what is around the block must see it keep the same again
            return self._in_force(Keep(self, frame))
        recipe = frame.site.recipes.get(self._kind)
        if recipe is None:
            self.log = OpLog()
        elif recipe.is_of_use:
            self.recipe = recipe
            return self._following(Follow(self, frame, recipe))
        return self._in_force(Keep(self, frame))

    def second_run(self, frame: Frame) -> AbstractContextManager[None]:
        """Returns the context that hands them back."""
        run = running.get()
        is_for_backward = isinstance(run, SecondRun) and run.frame is frame and not run.hands_on
        if self.recipe is not None and self.recipe.is_of_use and self._is_settled:
            return self._in_force(HandBackInOrder(self, frame, self.recipe, leaves_out=is_for_backward))
        return self._in_force(HandBack(self, frame))

    def saves(self, tensor: torch.Tensor) -> None:
        """Autograd saves a tensor of the first run."""
        self._num_saved += 1
        self._num_asked_for = len(self._keys)
        if self.log is not None:
            self.log.saves(tensor)

    @contextmanager
    def _in_force(self, mode: Mode) -> Iterator[None]:
        self._modes.append(mode)
        try:
            with mode:
                yield
        finally:
            self._modes.remove(mode)  # it holds this object: a cycle would keep what it keeps alive

    @contextmanager
    def _following(self, mode: Follow) -> Iterator[None]:
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
            self.storages.setdefault(id(storage_of(tensor)), []).append(key)
        self.results[key] = KeptResult(kept, spec, versions, random)
        self._keys.append(key)

    def hand_back(self, key: Key, frame: Frame) -> Any:
        """Returns what an op has returned, or ``None`` if that is not kept."""
        result = self.results.get(key)
        try:
            # the block around, if it is the one that keeps the result, may have to be recomputed for it
            with nullcontext() if frame.outer is None else above_dispatch_modes():
                leaves = result.take() if result is not None else None
        except RecomputeError:  # the block around keeps it, and says that it was edited in place: the op runs again
            return None
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
            for key in self.storages.pop(id(storage_of(tensor)), ()):
                self.results.pop(key, None)

    def settle(self, frame: Frame) -> None:
        """Forgets the results that the block edited in place after they were kept, and those of no use."""
        self.storages.clear()
        for key in self._keys[self._num_asked_for :]:
            self._let_go(key, frame)
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
        if not recipe.is_of_use:
            self._note(frame)
        elif isinstance(self.policy, Chosen):
            for word in self.policy.missed(recipe.ops):
                frame.site.note(f"selective: no {word} has run in it, and so nothing of it is kept")
        recipes = frame.site.recipes
        recipes[self._kind] = recipe
        while len(recipes) > _MOST_RECIPES:
            del recipes[next(iter(recipes))]
        if recipe.is_of_use:
            self.recipe = recipe
            for position in recipe.left_out:
                self._let_go(recipe.keys[position], frame)

    def _let_go(self, key: Key, frame: Frame) -> None:
        result = self.results.pop(key, None)
        if result is not None:
            result.let_go(frame)

    def does_not_follow(self, frame: Frame) -> None:
        """This call is unlike the one that has left the recipe: all that is not kept runs again."""
        site = frame.site
        if self.recipe is not None and site.recipes.get(self._kind) is self.recipe:
            site.num_strays += 1
            if site.num_strays < _MOST_STRAYS:
                del site.recipes[self._kind]  # the next call leaves one of its own
            else:
                self.recipe.is_of_use = False
                self._note(frame)
        self.recipe = None

    def run_all(self, frame: Frame) -> bool:
        """Has second runs leave nothing out from now on; returns whether that is any different."""
        if self.recipe is None or not self.recipe.is_of_use:
            return False
        self.recipe.is_of_use = False
        self._note(frame)
        return True

    def hands_back(self, func: Op) -> bool:
        """Whether a result can be known by how often its op was called before, whatever other ops come between.

        A cast cannot: autocast casts a weight once for all calls around which it stands, in one of the runs alone.
        """
        return func is not CAST and (self._kind is None or func in getattr(self.policy, "whole", ()))

    def _note(self, frame: Frame) -> None:
        if not (isinstance(self.policy, Chosen) and self.policy.some):
            return
        frame.site.note(
            "selective: its calls, or their two runs, are not alike op by op, or not all ops are seen; all that is not "
            "kept runs again, and results that are named by number are not kept"
        )

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
