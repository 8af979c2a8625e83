"""Which tensors of modules are cloned, how clones get strides, and versions; the attributes of scripted modules."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeGuard, final

import torch
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy

from graphckpt._compat import is_fake, scripted_attributes, shape_of, storage_of
from graphckpt.tree import ATOMS
from graphckpt.undo import Undo

# Note [How a tensor has its values of then]
#
# Of a tensor that was cloned, the recomputation must find the values before the call, under the same name, as the same
# object, in the same memory where the program can see that. Two ways, one for nearly all and one for the rest:
#
#                        memory is lent                             values are exchanged
#   what happens         `tensor.data = copy of the clone`, and     the values of now are copied, those of the clone are
#                        its own memory afterwards                  written to the memory, and those of now afterwards
#   kernels              one                                        three
#   which tensors        dense ones, alone in their memory          views, slices, those that share memory with another
#                                                                   one or with an array, subclasses, inference tensors
#   why                  writing to a tensor that autograd has      another name of the memory must show the same values
#                        saved somewhere else would ruin it
#   what autograd saves  an alias, which keeps the lent memory      a clone, as the memory gets its own values back
#   in the recomputation
#
# Neither counts as a modification: `.data` has a version counter of its own, and where one has moved nevertheless, as
# the recomputation updates the tensor, it is set to what it was.
#
# A parameter is never cloned: it is large, and a forward that modifies one is refused. Nor is a large tensor that the
# first call has left alone: the version of both says whether they have changed.

_SMALL_BYTES = 64 * 1024  # a copy of such a buffer costs less than it takes to find out whether it moves


def with_strides(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Copies a dense clone into memory with the strides of the original, such as a slice; differentiable."""
    copied = torch.empty_strided(tensor.size(), strides, dtype=tensor.dtype, device=tensor.device)
    target = copied
    for dim, stride in enumerate(strides):
        if stride == 0:  # all elements along it are one
            target, tensor = target.narrow(dim, 0, 1), tensor.narrow(dim, 0, 1)
    target.copy_(tensor)
    return copied


def is_small(tensor: torch.Tensor | None) -> bool:
    if type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.is_contiguous():  # nearly all
        return tensor.nbytes <= _SMALL_BYTES
    if tensor is None or tensor.layout is torch.sparse_coo or not (type(tensor) is torch.Tensor or is_fake(tensor)):
        return False
    num_elements = num_spanned(tensor) if is_sparse_in_memory(tensor) else tensor.numel()
    return num_elements * tensor.element_size() <= _SMALL_BYTES


def is_sparse_in_memory(tensor: torch.Tensor) -> bool:
    """Whether a ``torch.Tensor`` is not dense: expanded, or a slice of another one."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_contiguous():
        return False
    if not has_strided_values(tensor):
        return False
    return bool(tensor.numel()) and num_spanned(tensor) != tensor.numel()


def num_spanned(tensor: torch.Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))


def has_strided_values(tensor: torch.Tensor) -> bool:
    return not (tensor.is_meta or is_fake(tensor) or tensor.is_nested or tensor.layout is not torch.strided)


def is_sharding(now: Any, then: Any) -> bool:
    """Whether FSDP exchanges a sharded parameter for a whole one, or the reverse, which its own hooks see to."""
    if now is None or then is None:
        return False
    mesh = getattr(then, "device_mesh", None)  # with tensor parallelism a whole one is sharded too, over another mesh
    # Without a mesh, FSDP frees the memory of the whole parameter in between.
    storage = storage_of(then)  # of a sparse tensor there is none
    return getattr(now, "device_mesh", None) != mesh or (mesh is None and storage is not None and not storage.nbytes())


def is_clonable(tensor: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Whether a buffer is there, and can be written to: of an expanded one, forward cannot write elements either."""
    if tensor is None or is_lazy(tensor):
        return False
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_contiguous():
        return True
    return 0 not in tensor.stride() or tensor.numel() <= 1


def is_like(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return shape_of(tensor) == shape_of(other) and tensor.dtype == other.dtype and tensor.device == other.device


class Borrowed(NamedTuple):
    """Tensors of modules that are those of the call until a recomputation ends."""

    lent: frozenset[int]
    """The ids of those that have other memory."""
    exchanged: frozenset[int]
    """The ids of those that have other values in their memory, and of their storages."""


NOTHING_BORROWED = Borrowed(frozenset(), frozenset())


class ScriptedValue(NamedTuple):
    """An attribute of a scripted module before a call."""

    module: weakref.ref[ScriptModule]
    name: str
    value: Any
    """A clone of a small tensor; of another one, an alias."""
    version: int | None
    """Of a tensor that is not cloned."""


_CONTAINERS = (list, tuple, dict)


@final
class ScriptedModules:
    """The attributes of scripted modules, which their code alone reads, in C++: all are copied in every call.

    There a Python attribute is converted, so that each read returns another container.
    """

    def __init__(self, modules: Iterable[ScriptModule]) -> None:
        self.attributes = [(weakref.ref(module), name) for module in modules for name in scripted_attributes(module)]

    def take(self) -> list[ScriptedValue]:
        values = []
        for ref, name in self.attributes:
            value, version = getattr(ref(), name), None
            if isinstance(value, torch.Tensor):
                is_cloned = is_small(value)
                value = value.detach().clone() if is_cloned else value.detach()
                version = None if is_cloned or value.is_inference() else value._version
            elif type(value) not in ATOMS and not isinstance(value, _CONTAINERS):
                continue  # an object of C++
            values.append(ScriptedValue(ref, name, value, version))
        return values

    def name(self, parameter: torch.Tensor) -> str:
        modules = (module for ref, _ in self.attributes if (module := ref()) is not None)
        names = (name for module in modules for name, each in module._parameters.items() if each is parameter)
        return f"`{next(names, '?')}` of a scripted module"

    def put_in_place(self, values: Iterable[ScriptedValue], undo: Undo) -> None:
        for ref, name, value, version in values:
            module = ref()
            undo.append((setattr, (module, name, getattr(module, name))))
            is_cloned = isinstance(value, torch.Tensor) and version is None
            setattr(module, name, value.clone() if is_cloned else value)

    def mutated(self, values: Iterable[ScriptedValue]) -> str | None:
        """Names a tensor that was modified in place since and has no clone."""
        for _, name, value, version in values:
            if version is not None and value._version != version:
                return f"`{name}` of a scripted module"
        return None
