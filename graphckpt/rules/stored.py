"""One call of a block that does not run again, but keeps what autograd saves of it in a store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from graphckpt._compat_compiler import never_compiled
from graphckpt.errors import RecomputeError
from graphckpt.rules.kept import Kept
from graphckpt.rules.mismatch import edited

if TYPE_CHECKING:
    import torch

    from graphckpt.rules.site import Site
    from graphckpt.stores import Group


@final
class StoredCall:
    """The pair of hooks around the call."""

    __slots__ = ("group", "site")

    def __init__(self, site: Site) -> None:
        self.site = site
        self.group: Group | None = site.open_group()

    @never_compiled
    def pack(self, tensor: torch.Tensor) -> Kept:
        """Answers autograd, which wants ``tensor`` saved."""
        return Kept(tensor, self, None)

    @never_compiled
    def unpack(self, kept: Kept) -> torch.Tensor:
        """Gives autograd the tensor back.

        Raises:
            RecomputeError: The tensor was edited in place since.
        """
        tensor = kept.take()
        if tensor is None:
            raise RecomputeError(edited(self.site.name, "a tensor that one of its ops saves"))
        return tensor

    def seal(self) -> None:
        """The call is over."""
        self.site.store.seal(self.group)


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
