"""Clones tensors of modules, sharing memory where these do and with their strides, and reads their versions."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard, final

import torch
from torch import nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy

from graphckpt._compat import is_fake, scripted_attributes, storage_of
from graphckpt.tree import ATOMS
from graphckpt.undo import Undo

_SMALL_BYTES = 64 * 1024  # a copy of such a buffer costs less than it takes to find out whether it moves


def clones_of(
    tensors: Mapping[int, Any] | Sequence[Any], indices: Iterable[int], *, shares_memory: bool
) -> dict[int, torch.Tensor]:
    """Clones tensors. With ``shares_memory``, the clones share it where the tensors do."""
    present = [index for index in indices if tensors[index] is not None]
    memory = memory_of_several(tensors[index] for index in present) if shares_memory else {}
    clones: dict[int, torch.Tensor] = {}  # by the ids of the originals: modules may share a buffer
    copies = {}
    for index in present:
        tensor = tensors[index]
        clone = clones.get(id(tensor))
        if clone is None:
            clone = clones[id(tensor)] = _clone(tensor, memory)
            if type(tensor) is torch.Tensor and tensor.__dict__:
                clone.__dict__.update(tensor.__dict__)  # as `nn.Buffer` has: tensors with attributes are not moved
            if tensor.requires_grad:
                clone.requires_grad_()
        copies[index] = clone
    return copies


def memory_of_several(tensors: Iterable[torch.Tensor | None]) -> dict[int, torch.UntypedStorage]:
    """Returns clones of the storages that several of ``tensors`` share, by the ids of these storages."""
    members: dict[int, dict[int, torch.Tensor]] = {}
    for tensor in tensors:
        storage = None if tensor is None or is_fake(tensor) or tensor.is_meta else storage_of(tensor)
        if tensor is not None and storage is not None:
            members.setdefault(id(storage), {})[id(tensor)] = tensor
    memory = {}
    for key, several in members.items():
        if len(several) > 1:
            storage = next(iter(several.values())).untyped_storage()
            all_bytes = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            memory[key] = all_bytes.clone().untyped_storage()
    return memory


def _clone(tensor: torch.Tensor, memory: Mapping[int, torch.UntypedStorage]) -> torch.Tensor:
    # The clone of a view of shared memory is the same view of the memory's clone: an edit of one shows in the others.
    storage = memory.get(id(storage_of(tensor))) if memory else None
    if storage is not None:
        place = tensor.storage_offset(), tensor.size(), tensor.stride()
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, *place)
    clone = tensor.detach().clone()
    if not is_sparse_in_memory(tensor):
        return clone
    # A clone of an expanded or a sliced tensor is dense, and a sum of it is rounded in another order.
    return tensor.detach().as_strided((num_spanned(tensor),), (1,)).clone().as_strided(tensor.size(), tensor.stride())


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
    if tensor is None or tensor.layout is torch.sparse_coo or not (type(tensor) is torch.Tensor or is_fake(tensor)):
        return False
    num_elements = num_spanned(tensor) if is_sparse_in_memory(tensor) else tensor.numel()
    return num_elements * tensor.element_size() <= _SMALL_BYTES


def is_sparse_in_memory(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor is not dense: expanded, or a slice of another one."""
    if type(tensor) is not torch.Tensor or not has_plain_values(tensor) or tensor.is_contiguous():
        return False
    return bool(tensor.numel()) and num_spanned(tensor) != tensor.numel()


def num_spanned(tensor: torch.Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))


def has_plain_values(tensor: torch.Tensor) -> bool:
    return not (tensor.is_meta or is_fake(tensor) or tensor.is_nested or tensor.layout is not torch.strided)


def read_versions(tensors: Iterable[Any]) -> tuple[int, ...]:
    try:
        return tuple([0 if tensor is None else tensor._version for tensor in tensors])
    except RuntimeError:  # a call in inference mode has set an attribute: inference tensors have no version
        return tuple([0 if tensor is None or tensor.is_inference() else tensor._version for tensor in tensors])


def without_history(value: Any) -> Any:
    has_history = isinstance(value, torch.Tensor) and value.grad_fn is not None
    return value.detach().requires_grad_() if has_history else value


def is_sharding(now: Any, then: Any) -> bool:
    """Whether FSDP exchanges a sharded parameter for a whole one, or the reverse, which its own hooks see to."""
    if now is None or then is None:
        return False
    mesh = getattr(then, "device_mesh", None)  # with tensor parallelism a whole one is sharded too, over another mesh
    storage = storage_of(then)  # of a sparse tensor there is none
    return getattr(now, "device_mesh", None) != mesh or (mesh is None and storage is not None and not storage.nbytes())


def is_plain(value: Any) -> TypeGuard[torch.Tensor]:  # a buffer or a tensor attribute
    return isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and not is_lazy(value)


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

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        scripted = [module for module in modules if isinstance(module, ScriptModule)]
        self.attributes = [(weakref.ref(m), name) for m in scripted for name in scripted_attributes(m)]

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


def tensors_and_children(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Returns the dicts of parameters, buffers and children; of a scripted module, copies, and no buffers."""
    if isinstance(module, ScriptModule):
        return dict(module._parameters.items()), {}, dict(module._modules.items())
    return module._parameters, module._buffers, module._modules
