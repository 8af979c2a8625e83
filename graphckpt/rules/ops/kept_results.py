"""The op results that one call of a ``selective`` block keeps for its recomputation."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any, final

import torch

from graphckpt._compat import pytree, storage_of, version_sharing_detach
from graphckpt._compat_autocast import call_with_autocast
from graphckpt.engine.objects import mutated_by
from graphckpt.engine.saved import Call, SavedResult, SavedTensor
from graphckpt.engine.thread_state import get_rng_state, set_rng_state
from graphckpt.errors import RecomputeError
from graphckpt.rules.ops.op_graph import CAST, Op, OpGraph
from graphckpt.rules.ops.schedule import Key, Policy


@final
class KeptResults:
    """The kept results of one call.

    Args:
        policy: Decides which results to keep.
        learns: Whether calls with arguments of the same shapes follow one schedule of ops.
    """

    def __init__(self, policy: Policy, *, learns: bool) -> None:
        self.policy = policy
        self.results: dict[Key, SavedResult] = {}
        self.graph: OpGraph | None = None
        """The ops of a call that no schedule exists for yet."""
        self.num_saved = 0
        """How many tensors autograd has saved."""
        self.has_failed_op = False
        """Whether an op has raised an exception, which forward may catch: nothing is kept then."""
        self._learns = learns
        self._fetched: dict[Key, list[Any]] = {}
        self._storages: dict[int, list[Key]] = {}  # id of a storage: the kept results in it
        self._keys: list[Key] = []  # of all kept results, in order
        self._num_used = 0  # of them: no recomputation reads what is kept after the last saved tensor

    def saves(self, tensor: torch.Tensor) -> None:
        """Is called when autograd saves a tensor of the original forward."""
        self.num_saved += 1
        self._num_used = len(self._keys)
        if self.graph is not None:
            self.graph.saves(tensor)

    def run(self, func: Op, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs an op of the original forward."""
        try:
            return call_with_autocast(func, args, kwargs)
        except BaseException:
            self.has_failed_op = True
            if self.graph is not None:
                self.graph.is_complete = False
            raise

    def keep(self, key: Key, output: Any, frame: Call) -> None:
        """Keeps the result of an op."""
        leaves, spec = ([output], None) if isinstance(output, torch.Tensor) else pytree.tree_flatten(output)
        aliases = [version_sharing_detach(x) if isinstance(x, torch.Tensor) else x for x in leaves]
        versions = [(x, x._version) for x in aliases if isinstance(x, torch.Tensor)]
        kept = [SavedTensor(x, frame) if isinstance(x, torch.Tensor) else x for x in aliases]
        random = get_rng_state(frame.devices) if torch.Tag.nondeterministic_seeded in key[0].tags else None
        for tensor, _ in versions:
            self._storages.setdefault(id(storage_of(tensor)), []).append(key)
        self.results[key] = SavedResult(kept, spec, versions, random)
        self._keys.append(key)

    def fetch(self) -> None:
        """Takes all results from the hooks around the call, before the mode of a recomputation is active.

        The hooks may recompute the block around, which must not happen within an op that a mode handles: autograd and
        autocast are not as in a forward there.
        """
        self._fetched.clear()
        for key, result in self.results.items():
            with suppress(RecomputeError):  # modified in place since, as the block around found: the op is recomputed
                leaves = result.take()
                if leaves is not None:
                    self._fetched[key] = leaves

    def take(self, key: Key, frame: Call) -> Any:
        """Returns the result of an op, or ``None`` if it is not kept."""
        result = self.results.get(key)
        if result is None:
            return None
        leaves = result.take() if frame.outer_hooks is None else self._fetched.pop(key, None)
        if leaves is None:
            return None
        if result.random is not None:
            set_rng_state(result.random)
        return leaves[0] if result.spec is None else pytree.tree_unflatten(leaves, result.spec)

    def drop_mutated(self, func: Op, args: Any, kwargs: dict[str, Any]) -> None:
        """Drops a kept result that ``func`` modifies, also through a view that does not share its version counter.

        GRU modifies what ``unsafe_chunk`` returns, which is such a view.
        """
        if self._storages:
            self.drop_sharing(mutated_by(func, args, kwargs))

    def drop_sharing(self, tensors: Iterable[torch.Tensor]) -> None:
        """Drops the kept results that share memory with one of ``tensors``, which were modified."""
        for tensor in tensors:
            for key in self._storages.pop(id(storage_of(tensor)), ()):
                self.results.pop(key, None)

    def after_forward(self, frame: Call) -> None:
        """Drops the results that the block has modified in place since, and those that no recomputation reads."""
        self._storages.clear()
        for key in self._keys[0 if self.has_failed_op else self._num_used :]:
            self.release(key, frame)
        for key, result in list(self.results.items()):
            if result.is_mutated():
                del self.results[key]
            elif frame.outer_hooks is not None or frame.group is not None:
                result.versions.clear()  # the block around, or the store, checks versions itself

    def release(self, key: Key, frame: Call) -> None:
        """Drops one result."""
        result = self.results.pop(key, None)
        if result is not None:
            result.release(frame)

    def is_found_by_number(self, func: Op) -> bool:
        """Whether a result is known by how often its op was called before, whatever ops come in between.

        A cast is not: autocast casts a weight once per region, so in one of the two executions alone.
        """
        return func is not CAST and (not self._learns or func in getattr(self.policy, "whole", ()))
