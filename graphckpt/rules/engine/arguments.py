"""The arguments of one call of a recomputed block: what is kept of them, and what the recomputation is called with.

An argument that forward modifies in place is kept as a copy. The first call of a block, for which every tensor is
copied, shows which ones these are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch

from graphckpt.errors import RecomputeError
from graphckpt.rules.engine.argument import Argument
from graphckpt.rules.engine.execution import RecomputableCall
from graphckpt.rules.engine.joined_input import BlockOutput, JoinedInput
from graphckpt.rules.engine.mismatch import iterator_argument, modified_in_place, mutates_argument, shares_memory
from graphckpt.rules.engine.saved import SameArgument, has_storage
from graphckpt.state.values import Snapshot, copy_objects, drop_unchanged, rewind_objects
from graphckpt.tree import ATOMS, flatten_call
from graphckpt.undo import Undo


class _OriginalArgument(NamedTuple):
    """A tensor argument while the original forward runs."""

    position: int
    tensor: torch.Tensor
    version: int | None  # inference tensors have none
    copied: torch.Tensor | None

    def is_mutated(self) -> bool:
        return self.version is not None and self.tensor._version != self.version


@final
class Arguments:
    """What one call keeps of its arguments.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
    """

    __slots__ = (
        "_error",
        "_leaves",
        "_objects",
        "_originals",
        "_shape",
        "before",
        "mutated",
    )

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._leaves, self._shape = flatten_call(args, kwargs)
        self._originals: Sequence[_OriginalArgument] = ()
        self._objects: Any = ()
        self._error: str | None = None
        self.before: RecomputableCall | None = None
        """The call of the recomputed block right before, if the two are recomputed as one."""
        self.mutated: frozenset[int] = frozenset()
        """Positions of the tensors that forward modifies in place."""

    @property
    def leaves(self) -> Sequence[Any]:
        """The arguments, without the containers around them."""
        return self._leaves

    def name(self, position: int, function: Callable[..., Any]) -> str:
        """Names the argument that leaf number ``position`` belongs to."""
        return self._shape.name(position, function)

    def keep(self, frame: RecomputableCall, returned: BlockOutput | None, *, learning: bool) -> None:
        """Keeps what the recomputation needs, before the original forward."""
        leaves = self._leaves
        tensors: list[tuple[int, torch.Tensor]] = []
        first_of: dict[int, int] = {}
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                first = first_of.setdefault(id(leaf), position)
                if first == position:
                    tensors.append((position, leaf))
                else:  # `attention(x, x, x)` takes another path than three equal tensors
                    leaves[position] = SameArgument(first)
            elif type(leaf) not in ATOMS:
                if hasattr(leaf, "__next__"):
                    raise RecomputeError(iterator_argument(frame.block.title, frame.name_of(position)))
                self._objects = self._objects or copy_objects(leaves)
        self.mutated = frame.block.mutated
        originals: list[_OriginalArgument] = []
        self._originals = originals
        for position, tensor in tensors:
            copied = _copy_of(tensor) if learning or position in self.mutated else None
            version = None if tensor.is_inference() else tensor._version
            originals.append(_OriginalArgument(position, tensor, version, copied))
            if (
                not learning or frame.outer_hooks is not None
            ):  # else at the end of the forward, which shows what is modified in place
                leaves[position] = self._keep(frame, tensor, copied, returned)

    def after_forward(
        self, frame: RecomputableCall, snapshot: Snapshot, returned: BlockOutput | None, *, learning: bool
    ) -> None:
        """Drops what the recomputation does not need, after the original forward.

        Raises:
            RecomputeError: Forward modified an argument in place that earlier calls left alone, or that shares memory
                with another argument or a buffer.
        """
        originals, self._originals = self._originals, ()
        if self._objects:
            self._objects = drop_unchanged(self._objects)
        moved = frozenset([each.position for each in originals if each.is_mutated()])
        if learning:
            self.mutated = moved | frame.block.mutated
            frame.block.mutated = self.mutated
        message = None
        if moved or (learning and snapshot.changed):
            message = self._shared_memory(frame, snapshot, originals)
        if message is None and not moved <= self.mutated:
            message = mutates_argument(frame.block.title, frame.name_of(min(moved - self.mutated)))
        if message is not None:
            self.drop(message)
            raise RecomputeError(message)
        if learning:
            for each in originals:
                is_mutated = each.position in self.mutated
                if frame.outer_hooks is None:
                    copied = each.copied if is_mutated else None
                    self._leaves[each.position] = self._keep(frame, each.tensor, copied, returned)
                elif not is_mutated:
                    self._leaves[each.position].drop_copy(each.tensor)

    def drop(self, error: str) -> None:
        """Drops all tensors after an error: the ``grad_fn`` of one modified in place would make a reference cycle.

        Args:
            error: The message of the error that :meth:`take` raises from now on.
        """
        self._leaves, self._originals = [], ()
        self._error = error

    def take(self, frame: RecomputableCall) -> list[Any]:
        """Returns the leaves for the recomputation; :meth:`assemble` makes arguments of them.

        Raises:
            RecomputeError: One was modified in place since, or they were dropped.
        """
        if self._error is not None:
            raise RecomputeError(self._error)
        taken: list[Any] = []
        for position, leaf in enumerate(self._leaves):
            taken.append(taken[leaf.position] if isinstance(leaf, SameArgument) else self._take(frame, position, leaf))
        return taken

    def versions(self, leaves: list[Any]) -> list[tuple[int, torch.Tensor, int]]:
        """Returns the tensors among ``leaves`` that the recomputation must not modify, and their versions."""
        return [
            (position, leaf, leaf._version)
            for position, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and position not in self.mutated and not leaf.is_inference()
        ]

    def assemble(self, leaves: list[Any], undo: Undo) -> tuple[Sequence[Any], dict[str, Any]]:
        """Returns ``(args, kwargs)``, once the modules are in the state of the original forward."""
        if self._objects:
            rewind_objects(self._objects, undo)
        return self._shape.assemble(leaves)

    def _take(self, frame: RecomputableCall, position: int, leaf: Any) -> Any:
        if isinstance(leaf, JoinedInput):
            return leaf.of(self.before)  # type: ignore[arg-type]
        if not isinstance(leaf, Argument):
            return leaf
        tensor = leaf.take(is_mutated=position in self.mutated)
        if tensor is None:
            raise RecomputeError(modified_in_place(frame.block.title, f"its argument `{frame.name_of(position)}`"))
        return tensor

    def _keep(
        self, frame: RecomputableCall, tensor: torch.Tensor, copied: torch.Tensor | None, returned: BlockOutput | None
    ) -> Argument | JoinedInput:
        """Keeps a tensor, or notes that the block right before returns it."""
        number = None if returned is None or copied is not None else returned.number_of(tensor)
        if returned is None or number is None:
            return Argument(tensor, frame, copied)
        self.before = returned.frame()
        return JoinedInput(number, tensor)

    def _shared_memory(
        self, frame: RecomputableCall, snapshot: Snapshot, originals: Sequence[_OriginalArgument]
    ) -> str | None:
        """Returns the error if arguments that share memory with others, or with buffers, were modified in place."""
        owners: dict[int, list[str]] = {}
        for each in originals:
            if has_storage(each.tensor):
                owners.setdefault(id(each.tensor.untyped_storage()), []).append(frame.name_of(each.position))
        moved = [each.tensor for each in originals if each.position in self.mutated]
        for storage in (id(tensor.untyped_storage()) for tensor in moved if has_storage(tensor)):
            if len(names := owners[storage]) > 1:
                return shares_memory(frame.block.title, names)
        for place, _ in snapshot.changed:
            own = place.owner.get(place.key)
            if place.in_place and isinstance(own, torch.Tensor) and has_storage(own):
                for name in owners.get(id(own.untyped_storage()), ()):
                    return shares_memory(frame.block.title, [name, f"{place.key} of its modules"])
        return None


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
