"""One call of a block, or the rest of one, that is not recomputed: what autograd saves goes to a store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch

from graphckpt._compat import active_saved_tensor_hooks
from graphckpt._compat_compiler import never_compiled
from graphckpt.errors import MutatedError
from graphckpt.rules.engine.mismatch import modified_in_place
from graphckpt.rules.engine.saved import SavedTensor, may_be_filled_later

if TYPE_CHECKING:
    from graphckpt.rules.engine.context import BlockContext
    from graphckpt.stores.base import TensorGroup


@final
class StoredCall:
    """The saved-tensor hooks (``pack``, ``unpack``) of one call that is not recomputed.

    Args:
        block: The block.
        group: The group of the call's tensors in the store.
        outer_hooks: Hooks around the block that its tensors pass through, in place of its store.
    """

    __slots__ = ("_outer_hooks", "block", "group")

    def __init__(self, block: BlockContext, group: TensorGroup | None, outer_hooks: Any = None) -> None:
        self.block = block
        self.group = group
        self._outer_hooks = outer_hooks

    @never_compiled
    def pack(self, tensor: torch.Tensor) -> SavedTensor | torch.Tensor:
        """Hook for a tensor that autograd saves."""
        if self.block.has_rrelu and may_be_filled_later(tensor):
            return tensor
        return SavedTensor(tensor, self, self._outer_hooks)

    @never_compiled
    def unpack(self, kept: SavedTensor | torch.Tensor) -> torch.Tensor:
        """Hook for a saved tensor that autograd needs.

        Raises:
            RecomputeError: The tensor was modified in place since.
        """
        if isinstance(kept, torch.Tensor):
            return kept
        tensor = kept.take()
        if tensor is None:
            raise MutatedError(modified_in_place(self.block.title, "a tensor that one of its ops saves"))
        return tensor

    def seal(self) -> None:
        """Is called at the end of the call."""
        self.block.store.close_group(self.group)


@never_compiled
def _without_history(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()  # a node that holds its own output would never be freed


@never_compiled
def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


KEEP_ON_DEVICE = (_without_history, _same)
"""The hooks of a block whose saved tensors stay on the device whatever is around it."""


def _are_own(hooks: Any) -> bool:
    """Whether ``hooks`` are those of a block that is not recomputed, rather than the user's or a recomputed block's."""
    return hooks[1] is _same or getattr(hooks[1], "__func__", None) is StoredCall.unpack


def hooks_around(block: BlockContext) -> Any:
    """Returns the hooks that what a block saves must pass through, or ``None`` if it goes to the block's store."""
    hooks: Any = active_saved_tensor_hooks()
    if hooks is None:
        return None
    if block.recorder is not None:
        hooks = block.recorder.beneath(hooks)
    return None if block.is_placed and hooks is not None and _are_own(hooks) else hooks
