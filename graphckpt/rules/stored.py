"""One call of a block, or the rest of one, that does not run again, but keeps what autograd saves of it in a store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from graphckpt._compat import autograd_sequence_number
from graphckpt._compat_compiler import never_compiled
from graphckpt.errors import EditedError
from graphckpt.rules.kept import Kept, may_be_filled_later
from graphckpt.rules.mismatch import edited

if TYPE_CHECKING:
    import torch

    from graphckpt.rules.site import Site
    from graphckpt.stores import Group


@final
class StoredCall:
    """The pair of hooks around the call.

    Args:
        site: The block.
        group: What belongs together in its store.
        outer: Hooks around the block that its tensors pass through, in place of its store.
    """

    __slots__ = ("_outer", "_unfilled", "_unfilled_op", "group", "site")

    def __init__(self, site: Site, group: Group | None, outer: Any = None) -> None:
        self.site = site
        self.group = group
        self._outer = outer
        self._unfilled: list[_Filled] = []
        self._unfilled_op = -1

    @never_compiled
    def pack(self, tensor: torch.Tensor) -> Kept | _Filled:
        """Answers autograd, which wants ``tensor`` saved."""
        if self._unfilled and self._unfilled_op != autograd_sequence_number():
            self.keep_filled()
        if self.site.fills_saved and may_be_filled_later(tensor):
            self._unfilled_op = autograd_sequence_number()
            self._unfilled.append(_Filled(tensor))
            return self._unfilled[-1]
        return Kept(tensor, self, self._outer)

    @never_compiled
    def unpack(self, kept: Kept | _Filled) -> torch.Tensor:
        """Gives autograd the tensor back.

        Raises:
            RecomputeError: The tensor was edited in place since.
        """
        if isinstance(kept, _Filled):
            kept = kept.keep(self)
        tensor = kept.take()
        if tensor is None:
            raise EditedError(edited(self.site.name, "a tensor that one of its ops saves"))
        return tensor

    def seal(self) -> None:
        """The call is over."""
        self.keep_filled()
        self.site.store.close_group(self.group)

    def keep_filled(self) -> None:
        """The ops have run that may have filled what they had saved before."""
        while self._unfilled:
            self._unfilled.pop(0).keep(self)


@final
class _Filled:
    """A tensor that goes to the store once the op that saves it has run."""

    __slots__ = ("_kept", "_tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._kept: Kept | None = None

    def keep(self, call: StoredCall) -> Kept:
        """Returns what stands for the tensor in the store."""
        if self._kept is None:
            assert self._tensor is not None
            self._kept, self._tensor = Kept(self._tensor, call, call._outer), None
        return self._kept


@never_compiled
def _without_history(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()  # a node that holds its own output would never be freed


@never_compiled
def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


IN_PLACE = (_without_history, _same)
"""The hooks of a block whose saved tensors stay on the device whatever is around it."""


def are_own(hooks: Any) -> bool:
    """Whether hooks in force say where a block keeps what it saves, and are not a caller's or a second run's."""
    return hooks[1] is _same or getattr(hooks[1], "__func__", None) is StoredCall.unpack
