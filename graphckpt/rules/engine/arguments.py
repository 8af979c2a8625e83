"""The arguments of one call of a recomputed block: what is kept of them, and what the recomputation is called with.

An argument that forward modifies in place is kept as a copy. The first call of a block, for which every tensor is
copied, shows which ones these are. Arguments that share memory with one that is modified are modified with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch

from graphckpt.errors import RecomputeError
from graphckpt.rules.engine.aliases import AliasedArguments, alias_groups, has_storage
from graphckpt.rules.engine.argument import Argument, TensorProperties, as_mutated
from graphckpt.rules.engine.execution import RecomputableCall
from graphckpt.rules.engine.joined_input import BlockOutput, JoinedInput
from graphckpt.rules.engine.mismatch import iterator_argument, modified_in_place, mutates_argument, shares_with_buffer
from graphckpt.rules.engine.saved import SameArgument
from graphckpt.state.values import ChangedValue, Snapshot, copy_objects, drop_unchanged, rewind_objects
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

    def as_mutated(self) -> torch.Tensor:
        """Returns the tensor as it was, which forward may modify in place."""
        assert self.copied is not None
        properties = TensorProperties(self.tensor)
        properties.requires_grad = self.copied.requires_grad  # a modification may change that of the tensor
        return as_mutated(self.copied, properties)


@final
class Arguments:
    """What one call keeps of its arguments.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
    """

    __slots__ = (
        "_aliases",
        "_error",
        "_leaves",
        "_module_tensors",
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
        self._module_tensors: dict[int, ChangedValue] = {}
        self._aliases: Sequence[AliasedArguments] = ()
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

    def keep(
        self, frame: RecomputableCall, snapshot: Snapshot, returned: BlockOutput | None, *, learning: bool
    ) -> None:
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
        self._find_module_tensors(frame, snapshot, tensors)
        self.mutated = frame.block.mutated
        if self.mutated and not learning:
            groups = alias_groups(tensors)
            self.mutated |= {p for group in groups if not self.mutated.isdisjoint(group) for p in group}
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
            RecomputeError: Forward modified an argument in place that earlier calls left alone, or one that cannot be
                copied.
        """
        originals, self._originals = self._originals, ()
        if self._objects:
            self._objects = drop_unchanged(self._objects)
        if not learning and not self.mutated and not any(each.is_mutated() for each in originals):
            return
        tensors = [(each.position, each.tensor) for each in originals]
        if learning:
            self._find_module_tensors(frame, snapshot, tensors)
        moved = frozenset(each.position for each in originals if each.is_mutated()) - self._module_tensors.keys()
        if learning:
            self.mutated = moved | frame.block.mutated
            frame.block.mutated = self.mutated
        elif not moved <= self.mutated:
            message = mutates_argument(frame.block.title, frame.name_of(min(moved - self.mutated)))
            self.drop(message)
            raise RecomputeError(message)
        self._find_aliases(frame, tensors)
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
        self._leaves, self._originals, self._aliases = [], (), ()
        self._error = error

    def take(self, frame: RecomputableCall, undo: Undo) -> list[Any]:
        """Returns the leaves for the recomputation; :meth:`assemble` makes arguments of them.

        Raises:
            RecomputeError: One was modified in place since, or they were dropped.
        """
        if self._error is not None:
            raise RecomputeError(self._error)
        taken: list[Any] = []
        if self._originals:  # a backward within the original forward, which may modify others yet
            copied = [each for each in self._originals if each.copied is not None]
            self.mutated |= {each.position for each in copied if each.is_mutated()} - self._module_tensors.keys()
            self._find_aliases(frame, [(each.position, each.tensor) for each in self._originals])
        for position, leaf in enumerate(self._leaves):
            taken.append(
                taken[leaf.position] if isinstance(leaf, SameArgument) else self._take(frame, position, leaf, undo)
            )
        for aliases in self._aliases:
            aliases.rebuild(taken)
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
        for position, place in self._module_tensors.items():
            leaves[position] = place.owner[place.key]
        for position, leaf in enumerate(self._leaves):
            if isinstance(leaf, SameArgument):
                leaves[position] = leaves[leaf.position]
        if self._objects:
            rewind_objects(self._objects, undo)
        return self._shape.assemble(leaves)

    def _take(self, frame: RecomputableCall, position: int, leaf: Any, undo: Undo) -> Any:
        if position in self._module_tensors:
            return None  # filled in by `assemble`
        if isinstance(leaf, JoinedInput):
            return leaf.of(self.before)  # type: ignore[arg-type]
        for each in self._originals:
            if each.position == position and each.copied is not None:
                return each.as_mutated() if position in self.mutated else each.tensor
        if not isinstance(leaf, Argument):
            return leaf
        tensor = leaf.take(undo, is_mutated=position in self.mutated)
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

    def _find_aliases(self, frame: RecomputableCall, tensors: list[tuple[int, torch.Tensor]]) -> None:
        """Finds the arguments that share memory with one that forward modifies, and so are modified with it."""
        if self.mutated:
            groups = [group for group in alias_groups(tensors) if not self.mutated.isdisjoint(group)]
            self.mutated |= {position for group in groups for position in group}
            self._aliases = [
                AliasedArguments(frame, [each for each in tensors if each[0] in group]) for group in groups
            ]

    def _find_module_tensors(
        self, frame: RecomputableCall, snapshot: Snapshot, tensors: list[tuple[int, torch.Tensor]]
    ) -> None:
        """Finds the arguments that are tensors of the block's own modules which its forward modifies in place."""
        places = [place for place, _ in snapshot.changed if place.in_place]
        if not places:
            return
        for position, tensor in tensors:
            if tensor.requires_grad or not has_storage(tensor):
                continue
            for place in places:
                own = place.owner.get(place.key)
                if own is tensor:
                    self._module_tensors[position] = place
                elif _share_storage(own, tensor):
                    raise RecomputeError(shares_with_buffer(frame.block.title, frame.name_of(position), place.key))


def _share_storage(own: Any, tensor: torch.Tensor) -> bool:
    return isinstance(own, torch.Tensor) and has_storage(own) and own.untyped_storage() is tensor.untyped_storage()


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
