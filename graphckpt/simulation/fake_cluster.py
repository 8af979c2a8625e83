"""A rank of a cluster that may be absent: ``torch.distributed`` in one process, for a step on fake tensors.

PyTorch's fake process group stands in for the others: its collectives move nothing and have the shapes of real ones.
"""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, ClassVar, Self, final
from unittest.mock import patch

import torch
import torch.distributed as dist

from graphckpt.errors import ConfigError
from graphckpt.simulation.cluster_profile import Cluster, ClusterProfile, cluster_note, default_cluster, load_cluster
from graphckpt.simulation.fake_ddp import simulate_ddp
from graphckpt.simulation.fake_stages import simulate_stages
from graphckpt.simulation.profile import Device, DeviceProfile, load_profile
from graphckpt.simulation.stand_ins import CUDA_HOUSEKEEPING, StandIns, copy_of, refusal
from graphckpt.simulation.timeline import bubble_seconds
from graphckpt.undo import Ending

_OBJECTS = (
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list",
)  # fmt: skip
_OBJECTS_FIX = "compute the value on each rank, or plan with real ranks by torchrun"
_FIX = "use FSDP2 (fully_shard), or plan with real ranks by torchrun"


@final
class FakeCluster:
    """One simulated rank of ``world_size``. Inside of ``with``, ``torch.distributed`` has a group of that size.

    The group takes the place of any that the code inside initializes, and a mesh of ``"cuda"`` devices is one of
    ``"cpu"``, where the fake tensors are. At the end no group and no environment variable is left.

    Args:
        world_size: the number of ranks.
        rank: the one that is simulated.
        profile: the nodes and the links between them; by default those of :func:`default_cluster` for other devices.

    Raises:
        ConfigError: a number is out of range; or, by ``with``, the process has a process group.

    >>> with FakeCluster(64, rank=3):
    ...     dist.get_world_size(), dist.get_rank(), os.environ["LOCAL_RANK"]
    (64, 3, '3')
    >>> dist.is_initialized()
    False
    """

    is_entered: ClassVar[bool] = False
    """Whether one of them is entered in this process."""

    def __init__(self, world_size: int, rank: int = 0, profile: ClusterProfile | None = None) -> None:
        for name, value, minimum in (("world_size", world_size, 1), ("rank", rank, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
                fix = "the number of ranks, such as 64" if minimum else "the number of one rank, such as 0"
                raise ConfigError(f"{name}: expected an int of {minimum} or more, got {value!r} · fix: {fix}")
        if rank >= world_size:
            what = f"expected less than world_size {world_size}, got {rank}"
            raise ConfigError(f"rank: {what} · fix: a rank from 0 to {world_size - 1}")
        self.world_size = world_size
        self.rank = rank
        self.profile = default_cluster("") if profile is None else profile
        self.notes = (cluster_note(self.profile),) if world_size > 1 else ()
        """Notes for the plans."""
        self.bubble_share = 0.0
        """The idle time of a pipeline stage on the rank, as a share of the rest of its time; stages count as equal."""
        self._stand_ins = StandIns()

    def __enter__(self) -> Self:
        if not dist.is_available():
            raise ConfigError("world_size: expected a PyTorch with torch.distributed · fix: another build of PyTorch")
        if dist.is_initialized():
            what = f"expected no process group in this process, got one of {dist.get_world_size()}"
            raise ConfigError(f"world_size: {what} · fix: plan before init_process_group, or in a separate process")
        try:
            self._install(self._stand_ins)
        except BaseException:
            self._exit()
            raise
        return self

    def _install(self, stand_ins: StandIns) -> None:
        stand_ins.swap(FakeCluster, is_entered=True)
        stand_ins.enter_context(patch.dict(os.environ, self._variables()))
        _begin_fake_group(stand_ins, self.world_size, self.rank)
        _read_meshes(stand_ins)
        stand_ins.enter_context(warnings.catch_warnings())
        # of a mesh of CPUs, which stands in for one of CUDA devices
        warnings.filterwarnings("ignore", "DTensor random operators may not have complete support on cpu")
        for name in CUDA_HOUSEKEEPING:
            stand_ins.replace(getattr(torch.cuda, name), lambda *_, **__: None)
        stand_ins.replace(torch.cuda.current_device, lambda: self.local_rank)
        _refuse(stand_ins)
        simulate_ddp(stand_ins)
        simulate_stages(stand_ins, self._see_schedule)

    def _exit(self, *_: object) -> None:
        self._stand_ins.close()

    __exit__ = Ending(_exit, _exit)

    def _see_schedule(self, num_stages: int, num_micro_batches: int) -> None:
        self.bubble_share = bubble_seconds(1.0, num_stages, num_micro_batches)

    @property
    def local_rank(self) -> int:
        """The rank within its node."""
        return self.rank % self.profile.ranks_per_node

    def _variables(self) -> dict[str, str]:
        # Rank 11 of 12, on nodes of 8, has local rank 3 of 4.
        first = self.rank - self.local_rank  # of its node, of which the last one may have fewer ranks
        local_size = min(self.world_size - first, self.profile.ranks_per_node)
        return {
            "WORLD_SIZE": str(self.world_size),
            "RANK": str(self.rank),
            "LOCAL_WORLD_SIZE": str(local_size),
            "LOCAL_RANK": str(self.local_rank),
        }


def simulated_rank(
    world_size: int | None, rank: int | None, device: Device, cluster: Cluster = None
) -> AbstractContextManager[FakeCluster | None]:
    """Returns the rank that the arguments of :func:`graphckpt.plan` describe; without a ``world_size`` there is none.

    Raises:
        ConfigError: an argument lacks another one, or is out of range.
    """
    if world_size is None:
        if rank is not None:
            raise ConfigError(f"rank: expected world_size with it, got {rank!r} alone · fix: world_size=64, rank=0")
        if cluster is not None:
            what = f"expected world_size with it, got {cluster!r} alone"
            raise ConfigError(f"cluster: {what} · fix: world_size=64, cluster='dgx-h200'")
        if FakeCluster.is_entered and device is not None:
            what = "expected no simulated rank around a plan, got one"
            raise ConfigError(f"world_size: {what} · fix: plan after the plan of the rank, not within its step")
        return nullcontext()
    if device is None:
        what = f"expected device with it, got world_size={world_size!r} alone"
        fix = "device='h200', or leave it out: with real ranks the process group has the size"
        raise ConfigError(f"world_size: {what} · fix: {fix}")
    return FakeCluster(world_size, 0 if rank is None else rank, cluster_of(cluster, load_profile(device)))


def cluster_of(cluster: Cluster, machine: DeviceProfile) -> ClusterProfile:
    """Returns the cluster that a user has named, or else the one of a device."""
    return default_cluster(machine.name) if cluster is None else load_cluster(cluster)


def _begin_fake_group(stand_ins: StandIns, world_size: int, rank: int) -> None:
    from graphckpt._compat_distributed import own_dtensor_caches, start_fake_group  # noqa: PLC0415 - takes a second

    new_group = copy_of(dist.new_group)

    def new_fake_group(
        ranks: Any = None, timeout: Any = None, backend: Any = None, pg_options: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        del backend, pg_options  # of NCCL or gloo
        return new_group(ranks, timeout, None, None, *args, **kwargs)

    # Swapped by itself, so that it is back at the end: PyTorch replaces it by one that prints the rank.
    stand_ins.swap(sys, excepthook=sys.excepthook)
    destroy_process_group = copy_of(dist.destroy_process_group)

    def end() -> None:
        if dist.is_initialized():
            destroy_process_group()

    stand_ins.callback(end)
    start_fake_group(world_size, rank)
    stand_ins.enter_context(own_dtensor_caches())
    # The group of the script is the one that is there, at its begin and after its end.
    stand_ins.replace(dist.init_process_group, lambda *_, **__: None)
    stand_ins.replace(dist.destroy_process_group, lambda *_, **__: None)
    stand_ins.replace(dist.new_group, new_fake_group)


def _read_meshes(stand_ins: StandIns) -> None:
    """Lets meshes read their numbers of ranks, which have no values where tensors are fake."""
    from torch.distributed import device_mesh  # noqa: PLC0415

    from graphckpt._compat_distributed import (  # noqa: PLC0415
        MESH_READERS,
        device_of_mesh,
        reader_of_resharding,
        without_modes,
    )

    mesh_class = device_mesh.DeviceMesh
    readers = {name: getattr(mesh_class, name) for name in MESH_READERS if hasattr(mesh_class, name)}
    stand_ins.swap(mesh_class, **{name: without_modes(reader) for name, reader in readers.items()})
    begin, make = mesh_class.__init__, without_modes(copy_of(device_mesh.init_device_mesh))

    def begin_here(mesh: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        begin(mesh, _here(device_type), *args, **kwargs)

    def init_here(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return make(_here(device_type), *args, **kwargs)

    stand_ins.swap(mesh_class, __init__=begin_here)
    stand_ins.replace(device_mesh.init_device_mesh, init_here)
    stand_ins.replace(reader_of_resharding(), without_modes(copy_of(reader_of_resharding())))
    # A mesh of CPUs: a simulated GPU has another device.
    stand_ins.replace(device_of_mesh(), lambda _: torch.empty(0, device="cuda").device)


def _here(device_type: str) -> str:
    """Returns the type of the device that stands in for one of a mesh: fake tensors are on the CPU."""
    return device_type if device_type == "meta" else "cpu"


def _refuse(stand_ins: StandIns) -> None:
    from torch.distributed.fsdp import (  # noqa: PLC0415 - takes a second
        CPUOffloadPolicy,
        FullyShardedDataParallel,
        fully_shard,
    )
    from torch.distributed.tensor.experimental import context_parallel  # noqa: PLC0415

    shard_fully = copy_of(fully_shard)

    def shard(*args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("offload_policy"), CPUOffloadPolicy):
            refusal("fully_shard(offload_policy=CPUOffloadPolicy(...))")()
        return shard_fully(*args, **kwargs)

    stand_ins.replace(fully_shard, shard)
    # Objects of other ranks have values, which a rank that does not run cannot send.
    for name in _OBJECTS:
        stand_ins.replace(getattr(dist, name), refusal(f"torch.distributed.{name}", _OBJECTS_FIX))
    stand_ins.replace(context_parallel, refusal("context_parallel", _FIX))
    refused = wraps(FullyShardedDataParallel.__init__)(refusal("FullyShardedDataParallel", _FIX))
    stand_ins.swap(FullyShardedDataParallel, __init__=refused)
