"""The arguments of one call of a recomputed block: what is kept of them, and what the recomputation is called with.

An argument that stays on the device and that forward does not modify in place is the same object in the recomputation.
Otherwise it is a new leaf with the same class and ``requires_grad``. One that forward modifies in place is kept as a
copy: the first call of a block, for which every tensor is copied, shows which ones these are. One that the joined block
right before returns is not kept: the recomputation of that block returns it again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, final

import torch
from torch import nn

from graphckpt.engine.call_state import CallState, ModuleState
from graphckpt.engine.mismatch import (
    iterator_argument,
    modified_in_place,
    mutates_argument,
    returns_differ,
    shares_memory,
)
from graphckpt.engine.objects import Objects, copy_objects, drop_unchanged_tensors, swap
from graphckpt.engine.saved import Call, SameArgument, SavedTensor, TensorKind, has_attributes, has_storage
from graphckpt.errors import RecomputeError
from graphckpt.stores.base import DeviceStore
from graphckpt.tree import ATOMS, flatten_call, tensors_in


@final
class Argument:
    """A tensor argument that is saved.

    Args:
        tensor: The argument.
        call: The call that keeps it.
        copied: A copy to keep in its place, where forward modifies the argument in place or may do so.
    """

    __slots__ = ("__weakref__", "_kind", "_saved", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor, call: Call, copied: torch.Tensor | None) -> None:
        self._kind = TensorKind.of(tensor)
        value = tensor if copied is None else copied
        self._tensor: torch.Tensor | None = None
        self._version: int | None = None
        self._saved: SavedTensor | None = None
        block, outer_hooks = call.block, call.outer_hooks
        # A parameter is not moved: its module keeps it alive. Neither are Python attributes.
        stays = isinstance(tensor, nn.Parameter) or has_attributes(tensor)
        if not stays and not (outer_hooks is None and isinstance(block.store, DeviceStore)):
            saved = SavedTensor(value, call)
            if not saved.stays:
                self._saved = saved
                return
        if outer_hooks is None and block.recorder is not None:
            block.recorder.tensor_saved(block.name, value, self)
        self._hold(value)

    def drop_copy(self, tensor: torch.Tensor) -> None:
        """Holds ``tensor``, the argument itself, where a copy of it is held."""
        if self._saved is None:
            self._hold(tensor)

    def _hold(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._version = None if tensor.is_inference() else tensor._version

    def take(self, *, is_mutated: bool) -> torch.Tensor | None:
        """Returns the tensor to call the block with; ``None`` if it was modified in place since.

        Args:
            is_mutated: Whether forward modifies it in place, so that it must be a copy.
        """
        tensor = self._tensor if self._saved is None else self._saved.take()
        if tensor is None or (self._version is not None and tensor._version != self._version):
            return None
        if is_mutated:
            with torch.enable_grad():  # no leaf, if it requires grad
                return self._kind.apply_to(tensor.detach()).clone()
        if self._saved is None and tensor.requires_grad is self._kind.requires_grad:
            return tensor
        return self._kind.apply_to(tensor.detach())


@final
class BlockOutput:
    """The tensors that a recomputed block has returned. It keeps neither them nor the call alive."""

    __slots__ = ("_tensors", "call")

    def __init__(self, call: Call, output: Any) -> None:
        self.call = weakref.ref(call)
        self._tensors = [(weakref.ref(t), None if t.is_inference() else t._version) for t in tensors_in(output)]

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Returns the position of ``tensor`` among them, or ``None`` if it is not there or was modified since."""
        if self.call() is None or tensor.is_inference():
            return None
        for number, (ref, version) in enumerate(self._tensors):
            if ref() is tensor:
                return number if tensor._version == version else None
        return None


last_output: ContextVar[BlockOutput | None] = ContextVar("last_output", default=None)


@final
class JoinedInput:
    """An argument that is not kept: the recomputation of the block before returns it."""

    __slots__ = ("_dtype_and_shape", "_kind", "_number")

    def __init__(self, number: int, tensor: torch.Tensor) -> None:
        self._dtype_and_shape = tensor.dtype, tensor.shape
        self._number = number
        self._kind = TensorKind.of(tensor)

    def of(self, block: str, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the argument, one of the ``outputs`` that the recomputation of the block before has returned.

        Raises:
            RecomputeError: it has returned something else.
        """
        kinds = [(tensor.dtype, tensor.shape) for tensor in outputs]
        if kinds[self._number : self._number + 1] != [self._dtype_and_shape]:
            raise RecomputeError(returns_differ(block, self._number, self._dtype_and_shape, kinds))
        return self._kind.apply_to(outputs[self._number])


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
        function: The forward that is called with them.
    """

    __slots__ = (
        "_error",
        "_function",
        "_leaves",
        "_objects",
        "_originals",
        "_shape",
        "before",
        "mutated",
    )

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any], function: Callable[..., Any]) -> None:
        self._leaves, self._shape = flatten_call(args, kwargs)
        self._function = function
        self._originals: Sequence[_OriginalArgument] = ()
        self._objects: Objects = []
        self._error: str | None = None
        self.before: Call | None = None
        """The call of the recomputed block right before, if the two are recomputed as one."""
        self.mutated: frozenset[int] = frozenset()
        """Positions of the tensors that forward modifies in place."""

    @property
    def leaves(self) -> Sequence[Any]:
        return self._leaves

    def name(self, position: int) -> str:
        return self._shape.name(position, self._function)

    def keep(self, call: Call, returned: BlockOutput | None, *, learning: bool) -> None:
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
                    raise RecomputeError(iterator_argument(call.block.title, self.name(position)))
                self._objects = self._objects or copy_objects(leaves)
        self.mutated = call.block.mutated
        originals: list[_OriginalArgument] = []
        self._originals = originals
        for position, tensor in tensors:
            copied = _copy_of(tensor) if learning or position in self.mutated else None
            version = None if tensor.is_inference() else tensor._version
            originals.append(_OriginalArgument(position, tensor, version, copied))
            if (
                not learning or call.outer_hooks is not None
            ):  # else at the end of the forward, which shows what is modified in place
                leaves[position] = self._keep(call, tensor, copied, returned)

    def after_forward(
        self, call: Call, state: ModuleState, call_state: CallState, returned: BlockOutput | None, *, learning: bool
    ) -> None:
        """Drops what the recomputation does not need, after the original forward.

        Raises:
            RecomputeError: Forward modified an argument in place that earlier calls left alone, or that shares memory
                with another argument or a buffer.
        """
        originals, self._originals = self._originals, ()
        if self._objects:
            self._objects = drop_unchanged_tensors(self._objects)
        moved = frozenset([each.position for each in originals if each.is_mutated()])
        if learning:
            self.mutated = moved | call.block.mutated
            call.block.mutated = self.mutated
        message = None
        if moved or learning:
            message = self._shared_memory(call, state, call_state, originals)
        if message is None and not moved <= self.mutated:
            message = mutates_argument(call.block.title, self.name(min(moved - self.mutated)))
        if message is not None:
            self.drop(message)
            raise RecomputeError(message)
        if learning:
            for each in originals:
                is_mutated = each.position in self.mutated
                if call.outer_hooks is None:
                    copied = each.copied if is_mutated else None
                    self._leaves[each.position] = self._keep(call, each.tensor, copied, returned)
                elif not is_mutated:
                    self._leaves[each.position].drop_copy(each.tensor)

    def drop(self, error: str) -> None:
        """Drops all tensors after an error: the ``grad_fn`` of one modified in place would make a reference cycle.

        Args:
            error: The message of the error that :meth:`take` raises from now on.
        """
        self._leaves, self._originals = [], ()
        self._error = error

    def take(self, call: Call, outputs_before: Sequence[torch.Tensor]) -> list[Any]:
        """Returns the leaves for the recomputation; :meth:`assemble` makes arguments of them.

        Args:
            call: The call.
            outputs_before: What the recomputation of the block before has returned.

        Raises:
            RecomputeError: One was modified in place since, or they were dropped.
        """
        if self._error is not None:
            raise RecomputeError(self._error)
        leaves: list[Any] = []
        for position, leaf in enumerate(self._leaves):
            leaves.append(
                leaves[leaf.position]
                if isinstance(leaf, SameArgument)
                else self._take(call, position, leaf, outputs_before)
            )
        return leaves

    def versions(self, leaves: list[Any]) -> list[tuple[int, torch.Tensor, int]]:
        """Returns the tensors among ``leaves`` that the recomputation must not modify, and their versions."""
        return [
            (position, leaf, leaf._version)
            for position, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and position not in self.mutated and not leaf.is_inference()
        ]

    def assemble(self, leaves: list[Any], undo: Objects) -> tuple[Sequence[Any], dict[str, Any]]:
        """Returns ``(args, kwargs)``, once the modules are in the state of the original forward."""
        if self._objects:
            undo += swap(self._objects)
        return self._shape.assemble(leaves)

    def _take(self, call: Call, position: int, leaf: Any, outputs_before: Sequence[torch.Tensor]) -> Any:
        if isinstance(leaf, JoinedInput):
            return leaf.of(self.before.block.title if self.before else "", outputs_before)
        if not isinstance(leaf, Argument):
            return leaf
        tensor = leaf.take(is_mutated=position in self.mutated)
        if tensor is None:
            raise RecomputeError(modified_in_place(call.block.title, f"its argument `{self.name(position)}`"))
        return tensor

    def _keep(
        self, call: Call, tensor: torch.Tensor, copied: torch.Tensor | None, returned: BlockOutput | None
    ) -> Argument | JoinedInput:
        """Keeps a tensor, or notes that the block right before returns it."""
        number = None if returned is None or copied is not None else returned.number_of(tensor)
        if returned is None or number is None:
            return Argument(tensor, call, copied)
        self.before = returned.call()
        return JoinedInput(number, tensor)

    def _shared_memory(
        self, call: Call, state: ModuleState, call_state: CallState, originals: Sequence[_OriginalArgument]
    ) -> str | None:
        """Returns the error if arguments that share memory with others, or with buffers, were modified in place."""
        owners: dict[int, list[str]] = {}
        for each in originals:
            if has_storage(each.tensor):
                owners.setdefault(id(each.tensor.untyped_storage()), []).append(self.name(each.position))
        moved = [each.tensor for each in originals if each.position in self.mutated]
        for storage in (id(tensor.untyped_storage()) for tensor in moved if has_storage(tensor)):
            if len(names := owners[storage]) > 1:
                return shares_memory(call.block.title, names)

        def is_shared(buffer: torch.Tensor) -> bool:
            return has_storage(buffer) and id(buffer.untyped_storage()) in owners

        for name, buffer in state.mutated_buffers(call_state, is_shared):
            return shares_memory(call.block.title, [owners[id(buffer.untyped_storage())][0], name])
        return None


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
