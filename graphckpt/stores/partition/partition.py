"""Parses the flag `partition`, and resolves it to the ranks of a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch.distributed as dist

from graphckpt.errors import ConfigError
from graphckpt.stores.partition.ranks import RankGroup

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from graphckpt.stores.base import TensorGroup

_FIX = "fix: use True, a ProcessGroup, a DeviceMesh, Partition(...) or False"


@final
@dataclass(frozen=True)
class Partition:
    """The ranks that share saved tensors, each with one slice.

    All of them must run the same blocks on equal tensors, as tensor-parallel ranks do, in every step and in
    ``explain()``.

    Args:
        group: A ``ProcessGroup``; a ``DeviceMesh`` with one dimension, or with a dimension called ``"tp"``; ``True``
            for the mesh of the DTensor parameters of the first block that saves something, or all ranks if it has none.
        timeout_seconds: How long a rank waits for the others. NCCL all-gathers use the ``timeout`` of their process
            group instead, because enforcing another one would block the host.

    Raises:
        ConfigError: ``group`` is of another type, or ``timeout_seconds`` is not positive.
    """

    group: Any = True
    timeout_seconds: float = 300.0

    def __post_init__(self) -> None:
        if not _is_group_or_mesh(self.group):
            raise ConfigError(f"expected a process group or a device mesh, got {self.group!r} · {_FIX}")
        if _is_mesh(self.group):
            _tensor_parallel_group(self.group)
        if isinstance(self.timeout_seconds, bool) or not self.timeout_seconds > 0:
            raise ConfigError(
                f"timeout_seconds: expected a positive number, got {self.timeout_seconds!r} · fix: use seconds"
            )


def parse_partition(value: Any) -> Partition | None:
    """Parses a value of ``partition``; ``None`` and ``False`` are ``None``.

    Raises:
        ConfigError: It is neither a process group nor a device mesh.
    """
    if value is None or value is False:
        return None
    return value if isinstance(value, Partition) else Partition(value)


def group_for(partition: Any, group: TensorGroup) -> RankGroup | None:
    """Returns the ranks that ``partition`` means for the block; ``None``, with a note, if there is only this rank.

    Raises:
        ConfigError: It is of another type, or a mesh whose dimension is ambiguous.
    """
    settings = parse_partition(partition)
    assert settings is not None
    if not (dist.is_available() and dist.is_initialized()):
        group.note("partition does nothing: torch.distributed is not initialized")
        return None
    named = settings.group
    if named is True:
        named = _mesh_of(group.own())
    try:
        found = _tensor_parallel_group(named) if _is_mesh(named) else named or dist.group.WORLD
    except ConfigError as error:
        raise ConfigError(f"{group.block}.partition: {error}") from None
    if found is None or found == dist.GroupMember.NON_GROUP_MEMBER:
        group.note("partition does nothing: this rank is not in the group")
        return None
    if found.size() == 1:
        group.note("partition does nothing: the group has one rank")
        return None
    return RankGroup(found, settings.timeout_seconds)


def _is_group_or_mesh(value: Any) -> bool:
    if value is True:
        return True
    if not dist.is_available():
        return False
    return isinstance(value, dist.ProcessGroup) or _is_mesh(value) or value == dist.GroupMember.NON_GROUP_MEMBER


def _is_mesh(value: Any) -> bool:
    if not dist.is_available():
        return False
    from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415 - missing in a build without distributed

    return isinstance(value, DeviceMesh)


def _mesh_of(tensors: Iterable[torch.Tensor]) -> Any:
    meshes = (getattr(tensor, "device_mesh", None) for tensor in tensors)
    return next((mesh for mesh in meshes if mesh is not None), None)


def _tensor_parallel_group(mesh: Any) -> Any:
    """Returns this rank's group in the unambiguous dimension; ``None`` if this rank is not in the mesh."""
    names = mesh.mesh_dim_names or ()
    if mesh.ndim != 1 and "tp" not in names:
        raise ConfigError(
            f"expected a mesh with one dimension or one called 'tp', got {mesh.ndim} dimensions"
            f" {names or 'without names'} · fix: use one dimension, such as mesh['tp']"
        )
    if mesh.get_coordinate() is None:
        return None
    return mesh.get_group("tp" if mesh.ndim != 1 else 0)
