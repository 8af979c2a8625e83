"""Placeholders for saved tensors in the autograd graph, and the data needed to recompute them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, final

import torch

from graphckpt.errors import MutatedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from graphckpt.rules.engine.context import BlockContext
    from graphckpt.state.rng import RNGState
    from graphckpt.stores.base import Store, TensorGroup


@final
class SameArgument:
    """Placeholder for an argument that is the same object as an earlier one."""

    __slots__ = ("position",)

    def __init__(self, position: int) -> None:
        self.position = position


@final
class Holder:
    """Placeholder in the autograd graph for a tensor that the recomputation will fill in."""

    __slots__ = ("__weakref__", "dtype", "shape", "value", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.value: torch.Tensor | None = None
        self.version = 0


class Keeper(Protocol):
    """A call of a block that keeps tensors."""

    block: BlockContext
    group: TensorGroup | None


@final
class SavedTensor:
    """A kept tensor: an argument, an output or op result, or what a block that is not recomputed saves.

    It passes through the hooks around the block, if there are any: within a block that is recomputed itself, it is not
    kept, but recomputed.

    Args:
        tensor: The tensor.
        keeper: The call that keeps it.
        outer_hooks: The hooks around the call; ``None`` if its store keeps the tensor.
    """

    __slots__ = ("__weakref__", "_held", "_requires_grad", "_store", "_unpack", "_version")

    def __init__(self, tensor: torch.Tensor, keeper: Keeper, outer_hooks: Any) -> None:
        block = keeper.block
        self._requires_grad = tensor.requires_grad
        self._store: Store | None = block.store if outer_hooks is None else None
        self._unpack: Any = None
        self._version: int | None = None
        recorder = block.recorder
        if outer_hooks is None:
            self._held = block.store.put(tensor, keeper.group)
            if self.stays:  # other stores detect modifications themselves
                self._version = None if tensor.is_inference() else tensor._version
                if recorder is not None:
                    recorder.kept(block.name, tensor, self)
        else:
            pack, self._unpack = outer_hooks
            tensor = tensor.detach()  # as one with history is saved by an op, which may fill another one after that
            if recorder is None:
                self._held = pack(tensor)
            else:
                with recorder.passing_on():
                    self._held = pack(tensor)

    @property
    def stays(self) -> bool:
        """Whether the tensor stays on its device."""
        return self._store is not None and isinstance(self._held, torch.Tensor)

    def release(self, keeper: Keeper) -> None:
        """Drops the tensor, which :meth:`take` must not be called for any more."""
        recorder = keeper.block.recorder
        if recorder is not None and self._store is not None and isinstance(self._held, torch.Tensor):
            recorder.released(self._held, self)
        self._held = None

    def take(self) -> torch.Tensor | None:
        """Returns the tensor without history; ``None`` if it was modified in place since."""
        tensor: torch.Tensor | None
        try:
            tensor = self._unpack(self._held) if self._store is None else self._store.get(self._held)
        except MutatedError:  # from a block around this one
            return None
        if tensor is None or (self._version is not None and tensor._version != self._version):
            return None
        return tensor.detach().requires_grad_() if self._requires_grad else tensor.detach()


@final
@dataclass(frozen=True, slots=True)
class SavedResult:
    """A kept result of an op."""

    leaves: list[Any]
    spec: Any
    """``None`` if it is one tensor."""
    versions: list[tuple[torch.Tensor, int]]
    random: RNGState | None  # after an op that draws random numbers, for the ops behind it

    def is_mutated(self) -> bool:
        """Whether a tensor of it was modified in place since."""
        return are_mutated(self.versions)

    def take(self) -> list[Any] | None:
        """Returns its leaves; ``None`` if one was modified in place."""
        if self.is_mutated():
            return None  # by code after the block: the op is recomputed
        taken = [leaf.take() if isinstance(leaf, SavedTensor) else leaf for leaf in self.leaves]
        is_mutated = any(
            isinstance(leaf, SavedTensor) and value is None for leaf, value in zip(self.leaves, taken, strict=True)
        )
        return None if is_mutated else taken

    def release(self, keeper: Keeper) -> None:
        """Drops it."""
        for leaf in self.leaves:
            if isinstance(leaf, SavedTensor):
                leaf.release(keeper)


def versions_of(leaves: Iterable[Any]) -> list[tuple[torch.Tensor, int]]:
    """Returns the tensors among ``leaves`` with their present versions; inference tensors have none."""
    return [(leaf, leaf._version) for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_inference()]


def are_mutated(versions: Iterable[tuple[torch.Tensor, int]]) -> bool:
    """Whether one of the tensors was modified in place since its version was read."""
    return any(tensor._version != version for tensor, version in versions)


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor has one storage of its own: wrappers, sparse and nested tensors have none."""
    return tensor.layout is torch.strided and not tensor.is_nested and not hasattr(tensor, "__tensor_flatten__")


def may_be_filled_later(tensor: torch.Tensor) -> bool:
    """Whether the op that saves ``tensor`` may write its values only after that, as ``rrelu`` does with its noise."""
    return (
        not tensor.requires_grad
        and type(tensor) is torch.Tensor
        and tensor.is_floating_point()
        and not tensor._version
        and not tensor._is_view()
    )
