"""What the flag `partition` may hold, and which ranks it means for a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch.distributed as dist

from graphckpt.errors import ConfigError
from graphckpt.stores.partition.ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from graphckpt.stores.base import Group

_FIX = "fix: use True, a ProcessGroup, a DeviceMesh, Partition(...), or False"


@final
@dataclass(frozen=True)
class Partition:
    """The ranks that share kept tensors, each with one slice.

    All of them must run the same blocks on equal tensors, as the ranks of tensor parallelism do, whatever runs them:
    a step, or ``explain()``.

    Args:
        group: A ``ProcessGroup``; a ``DeviceMesh`` with one dimension, or with one called ``"tp"``; ``True`` for the
            mesh of the DTensor parameters of the first block that keeps something, or, where it has none, all ranks.
        timeout_seconds: How long one rank waits for the others. Gathers on NCCL wait as long as the ``timeout`` that
            the process group was made with, because to watch them would hold up the host.

    Raises:
        ConfigError: ``group`` names no ranks, or ``timeout_seconds`` is not above zero.
    """

    group: Any = True
    timeout_seconds: float = 300.0

    def __post_init__(self) -> None:
        if not _names_ranks(self.group):
            raise ConfigError(f"{self.group!r} names no ranks · {_FIX}")
        if _is_mesh(self.group):
            _tensor_parallel_group(self.group)
        if isinstance(self.timeout_seconds, bool) or not self.timeout_seconds > 0:
            raise ConfigError(f"{self.timeout_seconds!r} is no time to wait · fix: give seconds above 0")


def parse_partition(value: Any) -> Partition | None:
    """Reads a value of ``partition``; ``None`` and ``False`` are ``None``.

    Raises:
        ConfigError: It names no ranks.
    """
    if value is None or value is False:
        return None
    return value if isinstance(value, Partition) else Partition(value)


def group_for(partition: Any, group: Group) -> Ranks | None:
    """Returns the ranks that ``partition`` means for the block; ``None``, with a note, if there is nothing to cut over.

    Raises:
        ConfigError: It names no ranks, or a mesh in which it is not clear which dimension is meant.
    """
    settings = parse_partition(partition)
    assert settings is not None
    if not (dist.is_available() and dist.is_initialized()):
        group.note("partition: does nothing, torch.distributed is not initialised")
        return None
    named = settings.group
    if named is True:
        named = _mesh_of(group.own())
    try:
        found = _tensor_parallel_group(named) if _is_mesh(named) else named or dist.group.WORLD
    except ConfigError as error:
        raise ConfigError(f"{group.block}.partition: {error}") from None
    if found is None or found == dist.GroupMember.NON_GROUP_MEMBER:
        group.note("partition: does nothing, this rank is not in the group")
        return None
    if found.size() == 1:
        group.note("partition: does nothing, the group is this rank alone")
        return None
    return Ranks(found, settings.timeout_seconds)


def _names_ranks(value: Any) -> bool:
    if value is True:
        return True
    if not dist.is_available():
        return False
    return isinstance(value, dist.ProcessGroup) or _is_mesh(value) or value == dist.GroupMember.NON_GROUP_MEMBER


def _is_mesh(value: Any) -> bool:
    if not dist.is_available():
        return False
    from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415 - not there on a build without distributed

    return isinstance(value, DeviceMesh)


def _mesh_of(tensors: Iterable[torch.Tensor]) -> Any:
    meshes = (getattr(tensor, "device_mesh", None) for tensor in tensors)
    return next((mesh for mesh in meshes if mesh is not None), None)


def _tensor_parallel_group(mesh: Any) -> Any:
    """Returns this rank's group in the one dimension that can be meant; ``None`` if this rank is not in the mesh."""
    names = mesh.mesh_dim_names or ()
    if mesh.ndim != 1 and "tp" not in names:
        raise ConfigError(
            f"a mesh of {mesh.ndim} dimensions {names or 'without names'} does not say which ranks hold equal tensors"
            " · fix: give one dimension of it, such as mesh['tp'], or call that dimension 'tp'"
        )
    if mesh.get_coordinate() is None:
        return None
    return mesh.get_group("tp" if mesh.ndim != 1 else 0)
